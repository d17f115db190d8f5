"""Two processes with a store on the same folder, and disks that are full or turned read-only."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.errors import VolumeError
from appliance.profile import ProfileStore
from appliance.profile.at_start import ProfileState, StartAction, at_start
from tests.builders import key, profile
from tests.mounts import tmpfs
from tests.unit.profile.test_profile_store import Shelf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "profiles")


HELPER = """
import os, sys
sys.path[:0] = sys.argv[1:2]
from dataclasses import replace
from pathlib import Path
from tests.builders import key, profile
from appliance.profile import ProfileStore
store = ProfileStore(Path(sys.argv[2]), print)
print("ready", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "save":
        found = profile()  # once: made-up plans are computed
        for number in range(int(rest)):
            store.save(replace(found, speed=f"{os.getpid()} " + "x" * (number * 997 % 20000)))
        print("saved", flush=True)
    elif word == "tuning":
        with store.tuning(key()) as is_ours:
            print(is_ours, flush=True)
            if rest == "hold" and is_ours:
                sys.stdin.readline()
        if rest == "hold":
            print("let go", flush=True)
"""


@contextmanager
def helper(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process with a store on the same folder; it does as it is told, a line each."""
    argv = [sys.executable, "-B", "-c", HELPER, str(ROOT), str(folder)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert answer(process) == "ready"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdin
    process.stdin.write(words + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_with_two_writers_at_once_the_file_is_always_whole(shelf: Shelf) -> None:
    shelf.store.save(profile())
    with helper(shelf.folder) as one, helper(shelf.folder) as other:
        seen: set[str] = set()
        loads, deadline_s = 0, time.monotonic() + 90
        while loads < 400 or (len(seen) < 2 and time.monotonic() < deadline_s):
            found = shelf.store.load(key())
            assert found is not None
            seen.add(found.speed.split()[0])
            if not loads:  # what was there before is seen
                for process in (one, other):
                    tell(process, "save 150")
            loads += 1
        assert [answer(one), answer(other)] == ["saved", "saved"]
        last = shelf.store.load(key())
    assert last is not None
    assert len(seen) >= 2  # it did see them write
    assert shelf.warnings == []
    assert sorted(path.suffix for path in shelf.folder.iterdir()) == [".json", ".lock"]


def test_one_process_at_a_time_may_measure_and_a_killed_one_leaves_no_lock(shelf: Shelf) -> None:
    with helper(shelf.folder) as one:
        tell(one, "tuning hold")
        assert answer(one) == "True"
        with shelf.store.tuning(key()) as is_ours:
            assert not is_ours
        with shelf.store.tuning(key("b2")) as is_ours:
            assert is_ours  # another key is nobody's
        one.send_signal(signal.SIGKILL)
        one.wait(60)
    with shelf.store.tuning(key()) as is_ours, helper(shelf.folder) as other:
        assert is_ours
        tell(other, "tuning")
        assert answer(other) == "False"


def start(store: ProfileStore, *, may_measure: bool) -> StartAction:
    found = store.load(key())
    if found is None:
        return at_start(None, tune="first", may_measure=may_measure).action
    stale = store.why_stale(found)
    return at_start(ProfileState(id=found.key.id, stale=stale, busy=""), tune="first", may_measure=may_measure).action


def test_of_two_processes_one_measures_and_the_other_does_not_wait(shelf: Shelf) -> None:
    """Without a profile the other serves the prediction; with a stale profile it serves that one. The next start uses
    what was found."""
    for before, meanwhile in ((None, StartAction.PREDICT), (profile(), StartAction.USE)):
        if before is not None:
            shelf.store.save(before)
            shelf.store.mark_stale(before, "24 % slower, twice")
        with helper(shelf.folder) as one:
            tell(one, "tuning hold")
            assert answer(one) == "True"
            with shelf.store.tuning(key()) as is_ours:
                assert start(shelf.store, may_measure=is_ours) is meanwhile
            tell(one, "")  # it lets go, without having found anything
            assert answer(one) == "let go"
            with shelf.store.tuning(key()) as is_ours:
                assert start(shelf.store, may_measure=is_ours) is StartAction.MEASURE
            tell(one, "save 1")
            assert answer(one) == "saved"
        with shelf.store.tuning(key()) as is_ours:
            assert start(shelf.store, may_measure=is_ours) is StartAction.USE
        shelf.store.forget(key().id)


def test_a_full_disk_is_said_and_the_old_profile_is_still_there(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=128k") as folder:
        shelf = Shelf(folder / "profiles")
        shelf.store.save(profile())
        with pytest.raises(VolumeError, match=r"profile cannot be written: .*No space left on device") as caught:
            shelf.store.save(profile(speed="x" * 200_000))
        assert caught.value.exit_code == 50
        assert shelf.store.load(key()) == profile()
        assert not list(shelf.folder.glob(".*.tmp"))


def test_a_folder_that_turned_read_only_is_said_and_the_old_profile_is_used(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=128k") as folder:
        shelf = Shelf(folder / "profiles")
        shelf.store.save(profile())
        shelf.store.save(profile(key("b2")))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert shelf.store.load(key()) == profile()
        with pytest.raises(VolumeError, match="Read-only file system") as caught:
            shelf.store.save(profile(speed="new"))
        assert caught.value.exit_code == 50
        assert shelf.store.load(key()) == profile()
