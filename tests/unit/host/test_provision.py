"""Secrets, the decision about a channel, and what the program may import in the image."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.host.provision.channel import Wanted, changed, check_models
from appliance.host.provision.secret import RULES, check_folder, make_secrets, read_secret, write_key

ROOT = Path(__file__).parents[3]
OF_DOCKER = {"--detach", "--wait", "--rm", "--user", "--entrypoint"}
WANTED = Wanted(name="appliance", base_url="http://a:1", models=("m", "n"), context=4096, key="sk-1")


def as_listed(**given: Any) -> dict[str, Any]:
    return {"id": 7, "status": 1, "group": "vip", "priority": 5, **WANTED.fields(), **given}


def test_no_channel_is_made_whole() -> None:
    change = changed(WANTED, [])
    assert change.id is None
    assert {**change.fields, "other": ""} == {
        "name": "appliance", "type": 1, "base_url": "http://a:1", "models": "m,n", "other": "", "key": "sk-1",
        "status": 1, "group": "default", "priority": 0, "weight": 0, "model_mapping": "",
    }  # fmt: skip


def test_what_the_user_set_is_no_difference() -> None:
    change = changed(WANTED, [as_listed()])
    assert (change.id, change.fields, change.enables, change.is_disabled_by_hand) == (7, {}, False, False)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"models": "m"}, {"models"}),
        ({"base_url": "http://a:1/"}, {"base_url"}),
        ({"base_url": None}, {"base_url"}),
        ({"type": 8}, {"type"}),
        ({"other": "appliance: context 2048, key 00000000"}, {"other", "key"}),
        ({"other": None}, {"other", "key"}),
    ],
)
def test_only_differences_are_written(given: dict[str, Any], fields: set[str]) -> None:
    assert set(changed(WANTED, [as_listed(**given)]).fields) == fields


def test_disabled_by_itself_is_enabled_and_by_hand_is_not() -> None:
    assert changed(WANTED, [as_listed(status=3)]).enables
    by_hand = changed(WANTED, [as_listed(status=2)])
    assert (by_hand.enables, by_hand.is_disabled_by_hand) == (False, True)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 channels named 'appliance': ids 7, 8"):
        changed(WANTED, [as_listed(), as_listed(id=8)])


def test_an_appliance_without_a_key_gets_one_that_is_not_empty() -> None:
    wanted = Wanted(name="a", base_url="http://a", models=("m",), context=None, key="")
    assert changed(wanted, []).fields["key"] == "none"


def test_the_key_is_in_no_representation_and_its_mark_is_short() -> None:
    assert "sk-1" not in repr(WANTED)
    assert re.fullmatch(r"appliance: context 4096, key [0-9a-f]{8}", WANTED.note)


@pytest.mark.parametrize("name", ["a,b", " a", ""])
def test_names_that_a_list_cannot_hold(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used in a channel"):
        check_models(["m", name])


def test_made_secrets_are_right_kept_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert set(make_secrets(folder).values()) == {"made"}
    texts = {name: (folder / name).read_text() for name in RULES}
    assert len(set(texts.values())) == len(RULES)
    assert all((folder / name).stat().st_mode & 0o777 == 0o600 for name in RULES)
    assert set(make_secrets(folder).values()) == {"kept"}
    assert texts == {name: (folder / name).read_text() for name in RULES}
    assert set(check_folder(folder)) == set(RULES)


@pytest.mark.parametrize(
    ("name", "text", "mode", "words"),
    [
        ("access_token", "", 0o600, "is empty"),
        ("access_token", " \n", 0o600, "is empty"),
        ("access_token", "0" * 32, 0o644, "is open to every user of the machine"),
        ("access_token", "0" * 32, 0o602, "is open to every user of the machine"),
        ("access_token", "0" * 33, 0o600, "33 characters, required: 32 hexadecimal digits"),
        ("root_password", "1234567", 0o600, "7 characters, required: 8 to 20 printable"),
        ("root_password", "a b c d e f", 0o600, "required: 8 to 20 printable"),
        ("session_secret", "random_string", 0o600, "required: 16 to 128"),
        ("database_password", "pass:word@host/xxx", 0o600, "required: 16 to 64 letters"),
    ],
)
def test_a_secret_that_is_wrong_is_refused_without_being_shown(
    tmp_path: Path, name: str, text: str, mode: int, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words) as refused:
        read_secret(path)
    assert str(path) in refused.value.message
    assert refused.value.hint
    assert not text.strip() or text not in refused.value.message + refused.value.hint
    with pytest.raises(ConfigError, match=words):
        check_folder(tmp_path)


def test_a_secret_that_is_not_there_and_a_folder_without_any(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        read_secret(tmp_path / "access_token")
    with pytest.raises(ConfigError, match="the folder contains no secret"):
        check_folder(tmp_path)
    with pytest.raises(ConfigError, match="folder of secrets cannot be read"):
        check_folder(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_secrets(tmp_path / "file")


def test_a_group_may_read_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "access_token"
    path.write_text("a" * 32)
    path.chmod(0o640)
    assert read_secret(path) == "a" * 32


def test_a_tokens_file_is_written_once_and_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert write_key(path, "sk-a") is True
    assert write_key(path, "sk-a") is False
    assert write_key(path, "sk-b") is True
    assert path.read_text() == "sk-b\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_key(tmp_path / "none" / "token", "sk-a")


def program(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "appliance.host.provision", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no access token and no password for one-api's management was given"),
        (("secrets",), 2, "a folder is missing: secrets FOLDER"),
        (("secret", "x"), 2, "argument action: invalid choice: 'secret'"),
        (("check", "/nowhere"), 10, "the folder of secrets cannot be read: /nowhere"),
        (("--access-token-file", "/nowhere/access_token"), 10, "the secret file cannot be read: /nowhere/access_token"),
        (("--one-api", "https://one-api"), 2, "not an http address: https://one-api (--one-api)"),
        (("--appliance", "appliance:11435"), 2, "not the URL of an endpoint: appliance:11435"),
    ],
)
def test_words_that_cannot_be_meant_end_before_anything_is_asked(
    words: tuple[str, ...], code: int, message: str
) -> None:
    done = program(*words)
    assert (done.returncode, f"error: {message}" in done.stderr) == (code, True), done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("words", [("--every-s", "0"), ("--wait-s", "-1"), ("--channel", "x" * 31), ("--token", " ")])
def test_numbers_and_names_outside_their_range(tmp_path: Path, words: tuple[str, str]) -> None:
    make_secrets(tmp_path)
    done = program("--access-token-file", str(tmp_path / "access_token"), *words)
    assert done.returncode == 2, done.stderr
    assert words[0] in done.stderr


@pytest.mark.thorough
def test_it_needs_nothing_that_an_image_has_not() -> None:
    """It imports the standard library, the appliance and packages that are locked for every image, nothing else."""
    source = (
        "import sys, json; before = set(sys.modules); import appliance.host.provision.verb; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    outside = set(json.loads(done.stdout)) - sys.stdlib_module_names - {"appliance"}
    locked = re.findall(r"^([a-z0-9_-]+)==", (ROOT / "images/locks/appliance.txt").read_text(), re.MULTILINE)
    assert "msgspec" in outside
    assert outside <= {name.replace("-", "_") for name in locked}


def test_the_page_says_what_there_is() -> None:
    """Flags, files and messages of docs/one-api.md."""
    page = (ROOT / "docs/one-api.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "appliance/host/provision").glob("*.py"))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - OF_DOCKER
    assert "--model-wait-s" in flags
    assert {flag for flag in flags if f'"{flag}"' not in source} == set()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    assert all((ROOT / "docs" / link).exists() for link in links)
    messages = re.findall(r"^\| `([^`]+)` \((?:10|43)\)", page, re.MULTILINE)
    assert len(messages) == 5
    for message in messages:
        words = re.split(r"\d+(?: channels)?|'[^']*'|…", message)  # what a format fills in
        assert all(re.sub(r"\s+", " ", word).strip() in source for word in words), message
    variables = re.findall(r"`((?:APPLIANCE|ONE_API|NEW_API|DATABASE)_[A-Z_]+)`", page)
    compose = "".join(
        (ROOT / "compose" / name).read_text() for name in ("one-api.yaml", "new-api.yaml", "appliance.yaml")
    )
    assert "ONE_API_HOST_PORT" in variables
    assert [name for name in variables if f"${{{name}:" not in compose] == []
