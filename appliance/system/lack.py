"""A lack of descriptors, memory or processes. It passes: whoever meets one waits and tries again, and ends nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# At the process (EMFILE), at the machine (ENFILE, ENOMEM, ENOBUFS), at the control group or the user (EAGAIN at fork).
ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
RETRY_S = 0.25
QUIET_S = 60.0  # a lack that comes again sooner is the same one, and is not said again

_WORDS = tuple(os.strerror(number) for number in sorted(ERRNOS))
_log = logging.getLogger(__name__)


def is_lack(error: BaseException | None) -> bool:
    """True for a lack, also one that a thread's start, an import, or an error of ours was raised from."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))  # an error that was raised from itself is its own cause
        if isinstance(error, OSError) and error.errno in ERRNOS:
            return True
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # CPython's thread_run
            return True
        if isinstance(error, ImportError) and any(words in str(error) for words in _WORDS):  # the loader's of a library
            return True
        error = error.__cause__
    return False


class Told:
    """Says the first of a row of lacks. There is one for the process, since all of it shares what is lacking."""

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
    """Log a lack that is waited out, once in a row of them, whoever meets them. `doing` is what cannot go on."""
    _told.tell(doing, error)


async def outlast(action: Callable[[], Awaitable[T]], doing: str, *, every_s: float = RETRY_S) -> T:
    """The result of `action`, begun anew as long as a lack ends it."""
    while True:
        try:
            return await action()
        except Exception as error:
            if not is_lack(error):
                raise
            tell(doing, error)
        await asyncio.sleep(every_s)
