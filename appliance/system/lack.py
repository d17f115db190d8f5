"""Detects a lack of file descriptors, memory or processes. A lack is temporary: code that meets one waits and
retries."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# limits of the process (EMFILE), the machine (ENFILE, ENOMEM, ENOBUFS), the control group or user (EAGAIN at fork)
ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
RETRY_S = 0.25
QUIET_S = 60.0  # a lack that comes again within this time is the same episode and is not logged again

_WORDS = tuple(os.strerror(number) for number in sorted(ERRNOS))
_log = logging.getLogger(__name__)


def is_lack(error: BaseException | None) -> bool:
    """True if the error, or one of its causes, is a lack: from a system call, a thread's start, an import, or an error
    of ours."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))  # an error raised from itself is its own cause
        if isinstance(error, OSError) and error.errno in ERRNOS:
            return True
        if isinstance(error, MemoryError):
            return True
        # the message of CPython's thread_run
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            return True
        # raised by the loader of a library
        if isinstance(error, ImportError) and any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__
    return False


class Told:
    """Logs the first of a series of lacks. The process has one, since all of its parts share the lacking resource."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def tell(self, doing: str, error: BaseException | None) -> None:
        now = time.monotonic()
        is_new, self._last = now - self._last > QUIET_S, now
        if is_new:
            words = "the container lacks open files, memory or processes: %s: %s; waiting until there are more"
            _log.warning(words, doing, error)


_told = Told()


def tell(doing: str, error: BaseException | None) -> None:
    """Log a lack that the caller waits out, once a series. `doing` is the work that cannot continue."""
    _told.tell(doing, error)


async def outlast(action: Callable[[], Awaitable[T]], doing: str, *, every_s: float = RETRY_S) -> T:
    """Return the result of `action`; repeat it as long as a lack ends it."""
    while True:
        try:
            return await action()
        except Exception as error:
            if not is_lack(error):
                raise
            tell(doing, error)
        await asyncio.sleep(every_s)
