"""Calls that hang keep nobody waiting: not a coroutine, not the event loop, not the exit of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance.errors import VolumeError
from appliance.system.background_writer import BackgroundWriter
from appliance.system.detached import Glance, answered, detached
from tests.process.stages.boot import eventually


async def test_a_result_and_an_error_come_back() -> None:
    assert await detached(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await detached(divmod, 7, 0)


async def test_a_call_that_hangs_is_an_error_of_the_volume() -> None:
    goes_on = threading.Event()
    with pytest.raises(VolumeError, match="volume does not answer: /data"):
        await answered(goes_on.wait, Path("/data"), within_s=0.01)
    goes_on.set()
    assert await answered(lambda: 5, Path("/data")) == 5


async def test_a_cancelled_wait_ends_at_once() -> None:
    goes_on = threading.Event()
    waiting = asyncio.create_task(detached(goes_on.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    goes_on.set()


def test_a_glance_shows_the_last_result_while_the_call_hangs() -> None:
    goes_on = threading.Event()
    goes_on.set()
    results = iter((1, 2))
    calls: list[int] = []

    def ask() -> int:
        calls.append(len(calls))
        assert goes_on.wait(60)
        return next(results)

    glance = Glance(ask, unknown=0)
    assert eventually(glance) == 1
    goes_on.clear()
    before = len(calls)
    assert [glance(), glance()] == [1, 1]
    assert len(calls) == before + 1, "nothing is asked while an earlier call hangs"
    goes_on.set()
    eventually(lambda: glance() == 2)


async def test_an_older_result_does_not_replace_a_newer_one() -> None:
    goes_on, answers = threading.Event(), iter(("old", "new", "newer"))

    def ask() -> str:
        found = next(answers)
        assert found != "old" or goes_on.wait(60)
        return found

    glance = Glance(ask, unknown="none")
    assert glance() == "none"
    await glance.renew(Path("/data"))
    assert glance.last == "new"
    goes_on.set()
    assert eventually(glance) == "newer"
    assert glance.last == "newer"


def test_a_glance_raises_the_error_of_its_call() -> None:
    def refuse() -> int:
        message = "it is gone"
        raise VolumeError(message)

    glance = Glance(refuse, unknown=0)
    with pytest.raises(VolumeError):
        eventually(glance)


def test_a_writer_tells_for_how_long_a_write_hangs() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def write(_before: str) -> str:
        begun.set()
        assert goes_on.wait(60)
        return ""

    writer = BackgroundWriter("test", write, every_s=0.0, again_s=60.0)
    assert writer.silent_s == 0
    writer.wake()
    assert begun.wait(60)
    eventually(lambda: writer.silent_s > 0)
    writer.close(0.0)  # which does not wait for it
    goes_on.set()
    eventually(lambda: writer.silent_s == 0)


def test_the_process_ends_although_a_call_hangs() -> None:
    lines = (
        "import asyncio, threading",
        "from appliance.system.detached import detached",
        "async def main():",
        "    await asyncio.wait((asyncio.create_task(detached(threading.Event().wait)),), timeout=0.01)",
        "asyncio.run(main())",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=60, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
