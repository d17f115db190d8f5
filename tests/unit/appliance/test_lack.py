"""What counts as a lack of open files, memory or processes, and that it is waited out."""

from __future__ import annotations

import asyncio
import errno
import logging
import os

import pytest

from appliance.errors import EngineNotReadyError, VolumeError
from appliance.system.lack import ERRNOS, Told, is_lack, outlast


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("number", sorted(ERRNOS))
def test_a_lack(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert is_lack(error)
    assert is_lack(raised(VolumeError("the profile cannot be kept"), error))
    assert is_lack(raised(RuntimeError("outer"), raised(EngineNotReadyError("inner"), error)))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        MemoryError(),
        ImportError("libx.so.1: cannot open shared object file: Too many open files"),
        ImportError("libx.so.1: cannot map zero-fill pages: Cannot allocate memory"),
    ],
)
def test_a_lack_that_has_no_number(error: BaseException) -> None:
    assert is_lack(error)


@pytest.mark.parametrize(
    "error",
    [
        None,
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError("no number"),
        RuntimeError("a bug"),
        ImportError("No module named x"),
        raised(VolumeError("full"), OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_what_does_not_pass_by_itself(error: BaseException | None) -> None:
    assert not is_lack(error)


def test_an_error_may_be_its_own_cause() -> None:
    error = RuntimeError("raised from itself")
    error.__cause__ = error
    assert not is_lack(error)


async def test_an_action_is_begun_anew_until_it_can_be_done() -> None:
    lacks = [OSError(errno.EMFILE, "Too many open files"), BlockingIOError(errno.EAGAIN, "fork")]

    async def action() -> str:
        if lacks:
            raise lacks.pop()
        return "done"

    async with asyncio.timeout(10):
        assert await outlast(action, "testing", every_s=0.0) == "done"


async def test_another_error_comes_out() -> None:
    async def action() -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        await outlast(action, "testing")


def test_a_row_of_lacks_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    for doing in ("starting the engine", "watching the engine", "measuring"):
        told.tell(doing, OSError(errno.EMFILE, "Too many open files"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        "the container lacks open files, memory or processes: starting the engine: [Errno 24] Too many open files; "
        "waiting until there are more"
    )
