"""Files of saved prompts: what their names say, and who removes them."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import pytest

from appliance.errors import VolumeError
from appliance.gateway.accounts.named_keys import add_key, read_keys
from appliance.gateway.accounts.verbs import add_arguments, run
from appliance.gateway.clients.auth import Keys
from appliance.settings import resolve_settings
from appliance.system.saved_prompts import (
    NO_OWNER,
    held_bytes,
    keep_owners,
    owner_of,
    read_or_make_secret,
    remove_of_models,
    remove_of_owners,
)
from appliance.weights.verbs import Request
from appliance.weights.verbs import run as run_models
from tests.unit.model.gguf_files import LLAMA, write_model

KEY = "0123456789abcdef" * 2


def save(folder: Path, model: str, owner: str, number: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}-{KEY}.{owner}.{number:016x}.prompt"
    path.write_bytes(b"x" * 100)
    return path


def test_a_tag_is_of_one_key_and_tells_nothing_of_it() -> None:
    first, second = (hashlib.sha256(key).hexdigest() for key in (b"sk-1", b"sk-2"))
    assert owner_of(first) != owner_of(second)
    assert owner_of(first) not in first
    assert len(owner_of(first)) == 16
    assert Keys(frozenset({"sk-1"})).owner == owner_of(first)


def test_what_is_removed_is_that_of_the_model_or_the_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    assert (remove_of_models(folder, {"a" * 16}), keep_owners(folder, ()), held_bytes(folder)) == (0, 0, 0)
    mine, hers, others = (
        save(folder, "a" * 16, "mine"),
        save(folder, "a" * 16, "hers", 1),
        save(folder, "b" * 16, "mine"),
    )
    nobodys = save(folder, "b" * 16, NO_OWNER, 2)
    strange = [folder / name for name in ("notes.prompt", f"{'a' * 16}-x.prompt", ".hidden.prompt", "a.txt")]
    for path in strange:
        path.write_bytes(b"")
    assert held_bytes(folder) == 400
    assert remove_of_owners(folder, {"hers"}) == 1
    assert not hers.exists()
    assert keep_owners(folder, {"mine"}) == 0
    assert remove_of_models(folder, {"a" * 16}) == 1
    assert not mine.exists()
    assert keep_owners(folder, ()) == 1
    assert not others.exists()
    assert nobodys.exists(), "requests without a key have no key that could go"
    assert all(path.exists() for path in strange)


def test_the_secret_is_made_once_and_anew_if_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    first = read_or_make_secret(path)
    assert (len(first), read_or_make_secret(path)) == (32, first)
    assert path.stat().st_mode & 0o007 == 0
    path.write_text("not a secret")
    second = read_or_make_secret(path)
    assert second != first
    assert read_or_make_secret(path) == second


def keys(*words: str, path: Path, prompts: Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return run(parser.parse_args(words), path, prompts)


@pytest.mark.parametrize("action", ["remove", "rotate"])
def test_a_key_that_goes_takes_its_prompts_along(action: str, tmp_path: Path) -> None:
    path, folder = tmp_path / "keys.json", tmp_path / "prompts"
    for name in ("ci", "anna"):
        add_key(path, name, {})
    ci, anna = (save(folder, "a" * 16, owner_of(key.sha256)) for key in read_keys(path))
    assert keys(action, "ci", path=path, prompts=folder) == 0
    assert (ci.exists(), anna.exists()) == (False, True)


def test_prompts_that_cannot_be_removed_are_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "ci", {})
    not_a_folder = tmp_path / "prompts"
    not_a_folder.write_bytes(b"")
    with pytest.raises(VolumeError, match="the key is gone, but prompts that were saved for it are still"):
        keys("remove", "ci", path=path, prompts=not_a_folder)
    assert read_keys(path) == ()


def test_a_model_that_goes_takes_its_prompts_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from appliance.model import digest, read_model

    settings = resolve_settings({"data_dir": str(tmp_path)}, {})
    settings.models_dir.mkdir()
    found = {}
    for name, width in (("one", 512), ("two", 1024)):
        path = write_model(settings.models_dir / f"{name}.gguf", metadata={**LLAMA, "llama.context_length": width})
        model = read_model(path)
        found[name] = save(settings.prompts_dir, digest(model.parts, model.header_bytes).key, "mine")
    assert run_models("rm", Request(settings=settings, name="one")) == 0
    assert "one.gguf: removed" in capsys.readouterr().out
    assert (found["one"].exists(), found["two"].exists()) == (False, True)
    assert [path.name for path in settings.models_dir.iterdir()] == ["two.gguf"]
