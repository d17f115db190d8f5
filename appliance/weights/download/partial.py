"""The one partial file of a blob: the beginning of it, never with a hole, hashed as it grows.

That it is a beginning lets every run, of whichever program, go on at its end.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from appliance.weights.cache.download_set import WantedFile
from appliance.weights.cache.hub_layout import FILE_MODE

HASHED_AT_ONCE = 8 * 2**20  # a step of hashing again what is there; short, so that a stop need not wait
# Written back as it comes: a stop then has little left to write, and what is dirty in memory stays small.
SYNCED_AFTER = 32 * 2**20


class Partial:
    """Each method is short and may raise OSError; one thread at a time. `began` is its size when it was opened."""

    def __init__(self, path: Path, file: WantedFile) -> None:
        self._path = path
        self._file = file
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        status = os.fstat(self._handle)
        self.size = self.began = status.st_size
        if status.st_uid == os.geteuid():
            os.fchmod(self._handle, FILE_MODE)
        self._unsynced = 0
        self._start_hash()

    def _start_hash(self) -> None:
        """Git's hash begins with a header."""
        is_git = self._file.sha256 is None and self._file.git_sha1 is not None
        header = b"blob %d\0" % (self._file.bytes or 0)
        self._hash = hashlib.sha1(header, usedforsecurity=False) if is_git else hashlib.sha256()
        self.hashed = 0

    def hash_step(self) -> bool:
        """Hashes some of what was there before; False when all is hashed."""
        if self.hashed < self.size:
            data = os.pread(self._handle, min(HASHED_AT_ONCE, self.size - self.hashed), self.hashed)
            self._hash.update(data)
            self.hashed += len(data)
        return self.hashed < self.size

    def write(self, data: bytes) -> None:
        """At the end. What a full disk took of it is counted, so that `size` is the file's."""
        left = memoryview(data)
        while left:
            taken = os.pwrite(self._handle, left, self.size)
            self._hash.update(left[:taken])
            self.size += taken
            self.hashed += taken
            left = left[taken:]
        self._unsynced += len(data)
        if self._unsynced >= SYNCED_AFTER:
            os.fdatasync(self._handle)
            self._unsynced = 0

    def restart(self) -> None:
        """From nothing: what was there was of no use."""
        os.ftruncate(self._handle, 0)
        self.size = self.began = 0
        self._start_hash()

    def undo(self) -> None:
        """Takes back what was written since it was opened; without anything before that, the file goes."""
        os.ftruncate(self._handle, self.began)
        if not self.began:
            self.remove()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def move_to(self, blob: Path) -> None:
        """Durable before it has the name by which it is believed."""
        os.fsync(self._handle)
        self._path.replace(blob)
        folder = os.open(blob.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._handle)
