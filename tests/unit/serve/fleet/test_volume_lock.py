"""The folder cache/fleet of a volume, with what other containers or anybody else may leave there."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest

from appliance.console.report import Report
from appliance.serve.fleet.volume_lock import VolumeLock
from tests.process.stages.boot import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache/fleet"


def lock_on(folder: Path, log: StringIO | None = None) -> VolumeLock:
    return VolumeLock(folder, Report("json", log or StringIO()))


@contextmanager
def living(path: Path) -> Iterator[None]:
    """Lock an entry as a container does that lives."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield
    os.close(handle)


def test_two_containers_see_what_the_other_holds(folder: Path) -> None:
    one, other = lock_on(folder), lock_on(folder)
    one.write({"host": 30.0})
    other.write({"host": 5.0})
    eventually(lambda: (one.of_others(), other.of_others()) == ({"host": 5.0}, {"host": 30.0}))
    one.write({"host": 7.0})  # shorter than before
    eventually(lambda: other.of_others() == {"host": 7.0})
    one.close()
    assert other.of_others() == {}
    assert len(list(folder.iterdir())) == 1


def test_only_one_container_has_the_lock(folder: Path) -> None:
    one, other = lock_on(folder), lock_on(folder)
    handle = one.try_now()
    assert handle is not None
    assert handle >= 0
    assert other.try_now() is None
    one.write({"host": 3.0})
    one.release(handle)
    found = eventually(other.try_now)
    assert other.of_others() == {"host": 3.0}, "what it holds is written before the lock is free"
    other.release(found)
    again = other.try_now()
    assert again is not None, "its own release is waited for"
    other.release(again)
    one.close()
    other.close()


def test_the_entry_of_a_container_that_ended_is_removed(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "gone.json").write_text(json.dumps({"unseen_mib": {"host": 1e6}}))
    assert lock_on(folder).of_others() == {}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"unseen_mib": {"host": 1e999}}',
        '{"unseen_mib": {"host": Infinity}}',
        '{"unseen_mib": {"host": NaN}}',
        '{"unseen_mib": {"host": -5}}',
        '{"unseen_mib": {"host": 1' + "0" * 400 + "}}",
        '{"unseen_mib": {"host": "much"}}',
        '{"unseen_mib": {"host": null}}',
        '{"unseen_mib": [1]}',
        '{"unseen_mib": 5}',
        "[" * 60_000,
        "",
        "\ud800",
        " " * 10**6 + '{"unseen_mib": {"host": 5}}',
    ],
    ids=range(13),
)
def test_a_damaged_entry_of_a_living_container_claims_nothing(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    path = folder / "other.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with living(path):
        assert sum(lock_on(folder).of_others().values()) == 0


def test_what_is_no_file_is_passed_over(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / "fifo.json")
    os.mkfifo(folder / "living.json")
    (folder / "folder.json").mkdir()
    (folder / "other.json").mkdir()
    (folder / "link.json").symlink_to("/proc/self/mem")
    log = StringIO()
    with living(folder / "living.json"), living(folder / "other.json"):
        assert lock_on(folder, log).of_others() == {}
    assert log.getvalue() == ""


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_a_lock_that_is_no_file_is_told_and_gone_without(folder: Path, what: str) -> None:
    folder.mkdir(parents=True)
    path, log = folder / "lock", StringIO()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(folder.parent / "elsewhere")
    else:
        path.mkdir()
    assert lock_on(folder, log).try_now() == -1
    assert "cannot tell each other" in log.getvalue()
    assert not (folder.parent / "elsewhere").exists()


def test_a_file_in_the_place_of_the_folder_is_told_once(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    log = StringIO()
    lock = lock_on(folder, log)
    assert lock.try_now() == -1
    lock.write({"host": 1.0})
    assert lock.of_others() == {}
    lock.close()
    assert log.getvalue().count("cannot tell each other") == 1


def test_a_full_volume_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StringIO()
    lock = lock_on(folder, log)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock.write({"host": 1.0})
    eventually(lambda: "No space left on device" in log.getvalue())
    lock.write({"host": 1.0})
    lock.close()
    assert log.getvalue().count("No space left on device") == 1


def test_an_entry_is_never_seen_without_its_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container removes entries without a lock, and would remove this one at its making."""
    one, other = lock_on(folder), lock_on(folder)
    lock_it = fcntl.flock

    def late(handle: int, how: int) -> None:
        if how & fcntl.LOCK_EX:
            other.of_others()
        lock_it(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    one.write({"host": 3.0})
    eventually(lambda: other.of_others() == {"host": 3.0})
    monkeypatch.undo()
    assert other.of_others() == {"host": 3.0}
    one.close()


async def test_a_volume_that_hangs_is_used_without_its_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, goes_on = VolumeLock(folder, Report("json", StringIO()), hangs_s=0.05), threading.Event()
    lock_it = fcntl.flock

    def hung(handle: int, how: int) -> None:
        assert goes_on.wait(60)
        lock_it(handle, how)

    monkeypatch.setattr(fcntl, "flock", hung)
    async with lock.held():
        goes_on.set()  # now it gets the lock that nobody waits for, and gives it back
    monkeypatch.undo()
    other = lock_on(folder)
    handle = eventually(other.try_now)
    other.release(handle)
    other.close()
    lock.close()
