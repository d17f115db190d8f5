"""All file operations of the profile store, one method each, so that a test can let any one of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

_MODE = 0o664  # group-writable: another user of group 0 may have to replace the file

_MADE_BY_DOCKER = (
    "Docker makes such a folder if the path of `-v PATH:…` is not there on the host: look at that path (relative, of "
    "another machine, or one that Docker Desktop or a snap does not see), remove the empty folder, and start again"
)


def hint_of_empty(path: Path) -> str | None:
    """Return what to do about an empty folder in the place of a file or a filled folder; None for everything else."""
    try:
        return _MADE_BY_DOCKER if path.is_dir() and not any(path.iterdir()) else None
    except (OSError, ValueError):  # ValueError: a NUL byte
        return None


class Disk:
    """The real disk. Each method is about one system call; each may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        """Return the sorted names in a folder; empty if the folder does not exist."""
        try:
            return sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return []

    def read(self, path: Path, limit: int) -> bytes:
        return read_file(path, limit)

    def modified_ns(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def create(self, path: Path) -> int:
        """Create a file and open it for writing. Raises FileExistsError if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lock(self, handle: int, *, wait: bool) -> bool:
        """Lock the file. False if another process holds the lock and `wait` is False."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, handle: int, data: bytes) -> int:
        """Return how many bytes were written: a disk that fills up takes a part and refuses the next call."""
        return os.write(handle, data)

    def set_modified(self, handle: int, time_ns: int) -> None:
        os.utime(handle, ns=(time_ns, time_ns))

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink()


def read_file(path: Path, limit: int) -> bytes:
    """Return at most `limit` bytes of a regular file. Raises OSError for any other kind: reading a named pipe would
    block."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(limit)


def put_file(disk: Disk, path: Path, data: bytes, *, temporary: Path, modified_ns: int) -> None:
    """Replace a file durably; on OSError the previous file is still there.

    The file is synced before the rename: otherwise a power cut could leave the new name without content. The folder is
    synced after it: otherwise a power cut could bring the old file back. Only if that last step fails, the new file is
    there although OSError is raised.
    """
    handle = disk.create(temporary)
    try:
        _fill(disk, handle, data, modified_ns)
        disk.rename(temporary, path)
    except OSError:
        _remove_quietly(disk, temporary)
        raise
    sync_folder(disk, path.parent)


def sync_folder(disk: Disk, folder: Path) -> None:
    handle = disk.open_folder(folder)
    try:
        disk.sync(handle)
    finally:
        disk.close(handle)


def _fill(disk: Disk, handle: int, data: bytes, modified_ns: int) -> None:
    try:
        left = data
        while left:
            left = left[disk.write(handle, left) :]
        disk.set_modified(handle, modified_ns)
        disk.sync(handle)
    finally:
        disk.close(handle)


def _remove_quietly(disk: Disk, path: Path) -> None:
    try:
        disk.remove(path)
    except OSError:
        return  # the first error is the one reported; the next save of this profile removes the leftover
