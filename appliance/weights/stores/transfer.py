"""Read and copy large files and compute their sha256."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from appliance.errors import ModelUnreadableError, printable

OnBytes = Callable[[int], None]
"""Callback with the number of bytes read since its last call."""

_CHUNK_BYTES = 4 * 2**20
_CLONE = 0x40049409  # FICLONE of linux/fs.h: copy-on-write sharing of blocks


class Hash(Protocol):
    """A hash object of hashlib."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_file(path: Path, digest: Hash, on_bytes: OnBytes) -> str:
    """Hash a file. Raises ModelUnreadableError."""
    for chunk in _chunks(path):
        digest.update(chunk)
        on_bytes(len(chunk))
    return digest.hexdigest()


def copy(source: Path, target: IO[bytes], on_bytes: OnBytes) -> str:
    """Copy a file durably and return its sha256. Raises ModelUnreadableError for the source, OSError for the target."""
    digest = hashlib.sha256()
    for chunk in _chunks(source):
        digest.update(chunk)
        target.write(chunk)
        on_bytes(len(chunk))
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the file's content. Errors of the consumer are not caught here."""
    try:
        # O_NONBLOCK, so that opening a pipe does not block.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    file = os.fdopen(handle, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        message = f"file cannot be read: {printable(str(path))}: it is a folder, device, pipe or socket"
        raise ModelUnreadableError(message, hint="remove it, or find out what created it")
    with file:
        while True:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except OSError as error:
                raise _unreadable(path, error) from error
            if not chunk:
                return
            yield chunk


def _unreadable(path: Path, error: OSError) -> ModelUnreadableError:
    message = f"file cannot be read: {printable(str(path))}: {(error.strerror or str(error)).lower()}"
    return ModelUnreadableError(message, hint="check its owner and mode, and its disk")


def clone(source: Path, target: IO[bytes]) -> bool:
    """Share the blocks of `source`. Returns True if the disk supports it."""
    with source.open("rb") as file:
        try:
            fcntl.ioctl(target.fileno(), _CLONE, file.fileno())
        except OSError:
            return False
    return True
