"""The lock of one blob, the one that the hub's own client takes: flock on `.locks/<repository>/<key>.lock`.

huggingface_hub 2.4.0, utils/_fixes.py, WeakFileLock: filelock's FileLock with mode 0664, which on Linux is flock on a
file that stays when it is released (filelock 4.2.11, _unix.py).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from appliance.weights.cache.hub_layout import FILE_MODE

POLL_S = 0.2


@asynccontextmanager
async def locked(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Waits for it as long as it takes, and says so at each look. Raises OSError where there are no locks."""
    import asyncio  # here: it costs 20 ms, and `plan` has no loop

    handle = _take(path)
    while handle is None:
        on_wait()
        await asyncio.sleep(POLL_S)
        handle = _take(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Whether it could be had at once; it is held meanwhile."""
    handle = _take(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _take(path: Path) -> int | None:
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def _open(path: Path) -> int:
    """Reading is enough for a lock: older clients of other users made theirs for themselves alone."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)
    with suppress(PermissionError):  # another user made it, with this mode
        os.fchmod(handle, FILE_MODE)
    return handle
