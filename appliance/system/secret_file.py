"""API keys and the files that hold them: changed by one process at a time, and whole at every moment."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

KEY_BYTES = 32


def new_key() -> str:
    """Return a new API key with 256 random bits."""
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the file while the block runs; waits for it. Raises OSError."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def read_or_make(path: Path, read: Callable[[Path], str], new: Callable[[], str]) -> str:
    """Return what `read` finds in the file, else keep a new secret there and return that. Two processes that start at
    once get the same one. `read` returns "" if the file has no secret. Raises OSError."""
    if found := read(path):
        return found
    with locked(path):
        if not read(path):  # an empty file is left over from an interrupted write
            replace_secret(path, f"{new()}\n".encode())
        return read(path)


def replace_secret(path: Path, data: bytes) -> None:
    """Replace the file: a reader sees the old one or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # 0640 and not 0600: another start may run as another user of group 0, who must be able to read it.
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
