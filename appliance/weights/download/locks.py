"""The lock of one blob, the same as in the hub's own client: flock on `.locks/<repository>/<key>.lock`.

huggingface_hub 2.4.0, utils/_fixes.py, WeakFileLock: filelock's FileLock with mode 0664. On Linux this is flock on a
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
    """Wait for the lock as long as necessary; `on_wait` is called at each attempt. Raises OSError if locks are not
    supported."""
    import asyncio  # here: it costs 20 ms, and `plan` needs no event loop

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
    """Yield True if the lock was free; it is held during the block."""
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
    """Open the lock file. Read access is enough for a lock: older clients create it without access for others."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)
    with suppress(PermissionError):  # created by another user, with this mode already
        os.fchmod(handle, FILE_MODE)
    return handle
