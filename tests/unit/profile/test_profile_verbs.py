"""`appliance profiles …` as a user types it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.plan import with_launch
from appliance.profile import Profile, ProfileStore, dump_profile, speeds_document, speeds_of
from appliance.profile.record import SCHEMA
from appliance.settings import PREFIX
from tests.builders import key, profile
from tests.unit.appliance.test_main import House, Said

OLD = profile(key("b1"), speed="slow")
NEW = replace(profile(key("b2", kv_type="q8_0"), speed="fast"), plan=with_launch(profile().plan, threads=7))
IDS = (OLD.key.id, NEW.key.id)


class Desk(House):
    """The fixture of the other verbs, with a store."""

    def __init__(self, root: Path, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(root, capture)
        self.folder = self.data / "profiles"
        self.folder.mkdir()
        self.store = ProfileStore(self.folder, print)

    def save(self, *found: Profile) -> None:
        for one in found:
            assert self.store.save(one)

    def profiles(self, *words: str) -> Said:
        return self.run("profiles", *words)


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    umask = os.umask(0o022)
    yield Desk(tmp_path, capsys)
    os.umask(umask)


def test_two_profiles_differ_in_each_part_with_both_values(desk: Desk) -> None:
    desk.save(OLD, NEW)
    said = desk.profiles("diff", *IDS)
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[:2] == ["build: b1 -> b2", "settings.kv_type: auto -> q8_0"]
    assert f"plan.threads: {launch_of(OLD.plan).threads} -> 7" in lines
    assert "plan.speed: slow -> fast" in lines
    document = json.loads(desk.profiles("diff", *IDS, "--json").out)
    assert document["key"] == {"build": ["b1", "b2"], "settings.kv_type": ["auto", "q8_0"]}
    assert document["plan"]["threads"] == [launch_of(OLD.plan).threads, 7]
    assert (document["from"], document["to"]) == IDS


def test_a_profile_and_itself_do_not_differ(desk: Desk) -> None:
    desk.save(OLD)
    said = desk.profiles("diff", OLD.key.id, OLD.key.id[:8])
    assert (said.code, said.out) == (0, "")
    assert "do not differ" in said.err


def test_a_profile_against_this_machine_names_what_a_start_would_find_changed(desk: Desk) -> None:
    desk.add("a.gguf")
    desk.save(OLD)
    said = desk.profiles("diff", OLD.key.id, "--threads", "3")
    assert said.code == 0, said.err
    lines = dict(line.split(": ", 1) for line in said.out.splitlines())
    assert lines["settings.threads"] == "None -> 3"
    assert lines["model"].startswith(OLD.key.parts["model"])
    assert lines["hardware.cpu"].startswith("test -> ")
    assert "build" not in lines
    document = json.loads(desk.profiles("diff", OLD.key.id, "--json").out)
    assert (document["to"], document["plan"]) == ("this machine", {})


def test_against_this_machine_a_missing_model_is_said(desk: Desk) -> None:
    desk.save(OLD)
    assert desk.profiles("diff", OLD.key.id).code == 10


def test_a_pinned_profile_is_marked_and_not_replaced(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.save(OLD)
    assert desk.profiles("pin", OLD.key.id[:6]).out.startswith(f"{OLD.key.id}: pinned: ")
    assert "  pinned  " in desk.profiles().out
    assert json.loads(desk.profiles("--json").out)[0]["pinned"] is True
    assert desk.profiles("show", OLD.key.id).out.endswith("\n  pinned: not measured again, and not replaced\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(dump_profile(replace(OLD, speed="other"))))
    said = desk.profiles("import")
    assert said.code == 10
    assert f"{OLD.key.id} exists and is pinned" in said.err
    assert f"profiles unpin {OLD.key.id}" in said.err
    assert desk.store.find(OLD.key.id) == OLD
    assert json.loads(desk.profiles("unpin", OLD.key.id, "--json").out) == {"unpinned": OLD.key.id}
    monkeypatch.setattr(sys, "stdin", io.StringIO(dump_profile(replace(OLD, speed="other"))))
    assert json.loads(desk.profiles("import", "--json").out) == {"imported": OLD.key.id}
    assert desk.store.find(OLD.key.id).speed == "other"


def test_a_profile_that_no_longer_holds_is_marked_and_says_why(desk: Desk) -> None:
    words = "decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower, twice"
    found = replace(OLD, gpu_uuids=("GPU-1", "GPU-2"))
    desk.save(found, NEW)
    assert json.loads(desk.profiles("--json").out)[1]["stale"] is None
    desk.store.mark_stale(found, words)
    lines = desk.profiles().out.splitlines()
    assert ["  stale  " in line for line in lines] == [False, True]
    assert [row["stale"] for row in json.loads(desk.profiles("--json").out)] == [None, words]
    assert desk.profiles("show", OLD.key.id).out.endswith(f"\n  stale: {words}\n  on GPU-1, GPU-2\n")
    assert json.loads(desk.profiles("show", OLD.key.id, "--json").out)["stale"] == words
    assert "stale" not in desk.profiles("show", NEW.key.id).out
    assert desk.profiles("export", OLD.key.id).out == dump_profile(found)  # what is said of it here stays here
    assert desk.profiles("forget", OLD.key.id).code == 0
    assert {path.suffix for path in desk.folder.iterdir()} == {".lock", ".json"}


def test_a_forgotten_profile_is_gone_and_named(desk: Desk) -> None:
    desk.save(OLD, NEW)
    desk.store.pin(OLD.key.id)
    said = desk.profiles("forget", OLD.key.id)
    assert said.out == f"{OLD.key.id} of {OLD.plan.alias}: forgotten, which was pinned\n"
    row = {"forgotten": NEW.key.id, "model": NEW.plan.alias, "was_pinned": False}
    assert json.loads(desk.profiles("forget", NEW.key.id, "--json").out) == row
    assert desk.profiles("forget", NEW.key.id).code == 10
    assert {path.suffix for path in desk.folder.iterdir()} == {".lock"}


def test_what_is_exported_can_be_imported_elsewhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.save(OLD)
    text = desk.profiles("export", OLD.key.id).out
    assert text == dump_profile(OLD)
    shown = json.loads(desk.profiles("show", OLD.key.id, "--json").out)
    assert shown.pop("speeds") == json.loads(json.dumps(speeds_document(OLD.plan, speeds_of(OLD.plan, OLD))))
    assert shown == json.loads(text)
    desk.profiles("forget", OLD.key.id)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert desk.profiles("import").code == 0
    assert desk.store.find(OLD.key.id) == OLD


def test_what_is_no_profile_is_not_imported(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    said = desk.profiles("import")
    assert said.code == 10
    assert "profile cannot be imported: " in said.err


def test_profiles_of_another_version_are_named_in_the_list(desk: Desk) -> None:
    document = {**json.loads(dump_profile(OLD)), "schema": 0}
    (desk.folder / "0123.json").write_text(json.dumps(document))
    said = desk.profiles("list")
    assert (said.code, said.out) == (0, "")
    assert said.err == f"0123: kept for another version, schema 0, ours is {SCHEMA}\n"
    assert desk.profiles("forget", "0123").out == "0123: forgotten\n"


@pytest.mark.parametrize(
    "words",
    [("show",), ("diff",), ("pin",), ("unpin",), ("forget",), ("export",), ("show", "a", "b"), ("list", "a"),
     ("import", "a")],
)  # fmt: skip
def test_too_few_and_too_many_ids_are_usage(desk: Desk, words: tuple[str, ...]) -> None:
    said = desk.profiles(*words)
    assert said.code == 2
    assert f"profiles {words[0]} " in said.err


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["show", "diff", "export", "pin", "unpin", "forget"])
def test_an_id_of_none_or_of_several_is_said(desk: Desk, verb: str) -> None:
    assert "no profile matches this id: abc" in desk.profiles(verb, "abc").err
    many = [profile(key(f"c{number}")) for number in range(17)]  # more than there are first letters of an id
    desk.save(*many)
    (prefix, count), *_ = Counter(found.key.id[0] for found in many).most_common()
    said = desk.profiles(verb, prefix)
    assert said.code == 10
    assert f"{count} profiles match this id: {prefix}" in said.err
