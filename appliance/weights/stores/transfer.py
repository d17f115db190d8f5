"""Reading and copying large files with their sha256."""

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
"""Is told how many bytes were read since it was told last."""

_CHUNK_BYTES = 4 * 2**20
_CLONE = 0x40049409  # FICLONE of linux/fs.h: the copy shares its blocks until one of them is written


class Hash(Protocol):
    """Of hashlib."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_file(path: Path, digest: Hash, on_bytes: OnBytes) -> str:
    """Raises ModelUnreadableError."""
    for chunk in _chunks(path):
        digest.update(chunk)
        on_bytes(len(chunk))
    return digest.hexdigest()


def copy(source: Path, target: IO[bytes], on_bytes: OnBytes) -> str:
    """The sha256 of what was copied, which is on the disk then. Raises ModelUnreadableError for the source, and OSError
    for the target."""
    digest = hashlib.sha256()
    for chunk in _chunks(source):
        digest.update(chunk)
        target.write(chunk)
        on_bytes(len(chunk))
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    """No error of whoever takes them is caught here."""
    try:
        # Not to wait for a pipe that lies there.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    file = os.fdopen(handle, "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        message = f"file cannot be read: {printable(str(path))}: it is a folder, device, pipe or socket"
        raise ModelUnreadableError(message, hint="remove it, or look at what put it there")
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
    return ModelUnreadableError(message, hint="look at its owner and mode, and at the disk that it is on")


def clone(source: Path, target: IO[bytes]) -> bool:
    """Whether the disk could share the blocks."""
    with source.open("rb") as file:
        try:
            fcntl.ioctl(target.fileno(), _CLONE, file.fileno())
        except OSError:
            return False
    return True
