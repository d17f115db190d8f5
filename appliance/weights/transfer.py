"""Reading and copying large files with their sha256, and saying how far it is."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, TextIO

from appliance.errors import ModelUnreadableError, printable

OnBytes = Callable[[int], None]
"""Is told how many bytes were read since it was told last."""

_CHUNK_BYTES = 4 * 2**20
_CLONE = 0x40049409  # FICLONE of linux/fs.h: the copy shares its blocks until one of them is written
_TERMINAL_S, _LINES_S = 0.2, 10.0


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


class Meter:
    """Bytes of a total, rate and time left: one line that is written over on a terminal, else one in ten seconds."""

    def __init__(
        self, doing: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._doing, self._total, self._stream, self._clock = doing, total, stream or sys.stderr, clock
        self._is_terminal = self._stream.isatty()
        self._done, self._began = 0, clock()
        self._said = self._began

    def __call__(self, count: int) -> None:
        self._done += count
        now = self._clock()
        if now - self._said >= (_TERMINAL_S if self._is_terminal else _LINES_S):
            self._said = now
            self._stream.write(f"\r{self._line(now)}\x1b[K" if self._is_terminal else f"{self._line(now)}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leaves no half line where another text will stand."""
        if self._is_terminal and self._said != self._began:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        rate = self._done / max(now - self._began, 1e-3)
        left = max(0, self._total - self._done) / max(rate, 1)
        share = f"{size(self._done)} of {size(self._total)}"
        return f"{self._doing}: {share}, {size(round(rate))}/s, {left:,.0f} s left"


def size(count: int) -> str:
    """`4.7 GiB`; bytes below one KiB."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"
