"""The file of named keys: what is read, what is refused, and how it changes."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError, VolumeError
from appliance.gateway.accounts.named_keys import (
    FILE_BYTES_MAX,
    KEYS_MAX,
    NamedKey,
    add_key,
    digest_of,
    is_name,
    parse_keys,
    read_keys,
    remove_key,
    rotate_key,
)

ROW: dict[str, Any] = {"name": "ci", "sha256": "0" * 64, "created": "2026-01-31"}
WRONG = ("name", "sha256", "created", "is_admin", "until", "requests_per_minute", "tokens_per_minute", "streams")


def document(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"keys": rows}).encode()


def test_a_key_is_added_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert read_keys(path) == ()
    first = add_key(path, "ci", {"streams": 2}, until="2030-01-01")
    second = add_key(path, "anna", {}, is_admin=True)
    ci, anna = read_keys(path)
    assert (ci.name, ci.streams, ci.until, ci.is_admin) == ("ci", 2, "2030-01-01", False)
    assert (anna.is_admin, bytes.fromhex(anna.sha256)) == (True, digest_of(second.encode()))
    third = rotate_key(path, "ci")
    assert len({first, second, third}) == 3
    assert read_keys(path)[0] == NamedKey(**{**vars(ci), "sha256": digest_of(third.encode()).hex()})
    remove_key(path, "ci")
    assert read_keys(path) == (anna,)


def test_the_file_has_no_key_and_is_for_owner_and_group_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [add_key(path, "ci", {}), rotate_key(path, "ci")]
    text = path.read_text()
    assert not any(key in text or key.removeprefix("sk-") in text for key in keys)
    assert path.stat().st_mode & 0o7777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"], "nothing else is left"


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "-x", "ä", "a\n", "x" * 65, "\x1b[2J", "a/b", ".hidden"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ConfigError):
        add_key(tmp_path / "keys.json", name, {})
    assert not (tmp_path / "keys.json").exists()


def test_a_name_is_given_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "ci", {})
    with pytest.raises(ConfigError, match="there is a key of this name: ci"):
        add_key(path, "ci", {})
    for change in (remove_key, rotate_key):
        with pytest.raises(ConfigError, match="no key has this name: anna") as caught:
            change(path, "anna")
        assert caught.value.hint == "there are: ci"


def test_two_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [threading.Thread(target=add_key, args=(path, f"key{number}", {})) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path)} == {f"key{number}" for number in range(24)}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="cannot be written"):
        add_key(tmp_path / "missing" / "keys.json", "ci", {})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "Expecting value"),
        (b'{"keys": ["\xff"]}', "codec can't decode"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "nested too deep"),
        (b"{}", "it is not"),
        (b'{"keys": {}}', "it is not"),
        (b'{"keys": [], "more": 1}', "it is not"),
        (b'{"keys": [1]}', "key 1 is not an object"),
        (document({**ROW, "more": 1}), "key 1 is not an object"),
        (document({"name": "ci"}), "key 1 is not an object"),
        (document(ROW, ROW), "two keys have the same name"),
        (document(ROW, {**ROW, "name": "b"}), "two keys have the same sha256"),
        (document(*[ROW] * (KEYS_MAX + 1)), "over the limit of 256"),
        (b" " * (FILE_BYTES_MAX + 1), "over 1 MiB"),
        *((document({**ROW, field: ["x"]}), f"key 1 has an invalid {field}") for field in WRONG),
        *((document({**ROW, field: "9" * 50}), f"key 1 has an invalid {field}") for field in WRONG[1:]),
        *(
            (document({**ROW, field: number}), f"invalid {field}")
            for field in WRONG[5:]
            for number in (0, -1, 1e3, True)
        ),
        (document({**ROW, "until": "2026-02-30"}), "invalid until"),
        (document({**ROW, "until": "20260101"}), "invalid until"),
        (document({**ROW, "name": "\x1b[2J"}), "invalid name"),
        (document({**ROW, "sha256": "A" * 64}), "invalid sha256"),
    ],
)
def test_a_damaged_file_is_refused_as_a_whole(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert str(path) in caught.value.message
    assert says in caught.value.message
    assert caught.value.hint
    with pytest.raises(ConfigError):
        add_key(path, "new", {})
    assert path.read_bytes() == data, "what a person may mend is not overwritten"


def test_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    os.mkfifo(path)
    with pytest.raises(VolumeError, match="not a regular file"):
        read_keys(path)


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
    lambda rows: json.dumps({"keys": rows}).encode()
))  # fmt: skip
def test_any_bytes_give_keys_or_a_reason(data: bytes) -> None:
    with suppress(ValueError):
        assert parse_keys(data) == ()


def test_the_last_day_counts() -> None:
    key = NamedKey(**ROW, until="2026-03-01")
    assert not key.has_ended(date(2026, 3, 1))
    assert key.has_ended(date(2026, 3, 2))
    assert not NamedKey(**ROW).has_ended(date(9999, 1, 1))
