"""Every operation on files that the store of profiles makes, one method each: a test lets any one of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

_MODE = 0o664  # another user of group 0 may have to replace it

_MADE_BY_DOCKER = (
    "Docker makes such a folder if the path of `-v PATH:…` is not there on the host: look at that path (relative, of "
    "another machine, or one that Docker Desktop or a snap does not see), remove the empty folder, and start again"
)


def hint_of_empty(path: Path) -> str | None:
    """What to do about an empty folder where a file or a full folder is meant; None for anything else."""
    try:
        return _MADE_BY_DOCKER if path.is_dir() and not any(path.iterdir()) else None
    except (OSError, ValueError):  # ValueError: a NUL byte
        return None


class Disk:
    """The real one. Each method is one call to the kernel, or nearly; each may raise OSError."""

    def names(self, folder: Path) -> list[str]:
        """Sorted; none for a folder that is not there."""
        try:
            return sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            return []

    def read(self, path: Path, limit: int) -> bytes:
        return read_file(path, limit)

    def modified_ns(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def create(self, path: Path) -> int:
        """A new file, open for writing; FileExistsError where there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)

    def open_lock(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lock(self, handle: int, *, wait: bool) -> bool:
        """False where it is held by another and `wait` is not."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, handle: int, data: bytes) -> int:
        """How many bytes were taken: a disk that fills up takes a part and refuses the next call."""
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
    """At most `limit` bytes of a regular file. OSError for anything else: a named pipe would be waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        return file.read(limit)


def put_file(disk: Disk, path: Path, data: bytes, *, temporary: Path, modified_ns: int) -> None:
    """Whole and durable, or an OSError and what was there before.

    The file is synced before it is renamed, or a power cut could leave the new name with nothing in it; the folder
    after that, or it could bring the old file back. Only when that last step fails is the new file there all the same.
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
        return  # it failed already, and that is what is said; the next save of this profile removes the leftover
