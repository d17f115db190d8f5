"""The one partial file of a blob: always its beginning without holes, hashed as it grows.

Therefore every run, also of another program, can resume at its end.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from appliance.weights.cache.download_set import WantedFile
from appliance.weights.cache.hub_layout import FILE_MODE

HASHED_AT_ONCE = 8 * 2**20  # hashed per step when resuming; short, so that a stop need not wait
# Written to disk as it arrives: a stop then has little left to write, and few dirty pages stay in memory.
SYNCED_AFTER = 32 * 2**20


class Partial:
    """Partial file. Each method is short and may raise OSError; one thread at a time. `began` is the size when it
    was opened."""

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
        """Reset the hash. Git's hash begins with a header."""
        is_git = self._file.sha256 is None and self._file.git_sha1 is not None
        header = b"blob %d\0" % (self._file.bytes or 0)
        self._hash = hashlib.sha1(header, usedforsecurity=False) if is_git else hashlib.sha256()
        self.hashed = 0

    def hash_step(self) -> bool:
        """Hash a part of the existing bytes. Returns False when all are hashed."""
        if self.hashed < self.size:
            data = os.pread(self._handle, min(HASHED_AT_ONCE, self.size - self.hashed), self.hashed)
            self._hash.update(data)
            self.hashed += len(data)
        return self.hashed < self.size

    def write(self, data: bytes) -> None:
        """Append data. If the disk becomes full, `size` counts what was written."""
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
        """Empty the file, because its content is useless."""
        os.ftruncate(self._handle, 0)
        self.size = self.began = 0
        self._start_hash()

    def undo(self) -> None:
        """Remove what was written since the file was opened; remove the file if it was empty then."""
        os.ftruncate(self._handle, self.began)
        if not self.began:
            self.remove()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def move_to(self, blob: Path) -> None:
        """Sync the file, then rename it to its blob name: a file with that name is trusted."""
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
