"""The folder of profiles on the volume: atomic writes and locks. This module does not know the files' content.

Several containers may share the volume. A writer locks `<id>.lock`, writes a new file, syncs it and renames it over the
old one, so a reader sees the old or the new file, whole. The lock belongs to the open file and ends with its process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from appliance.errors import VolumeError
from appliance.system.disk import Disk, put_file, sync_folder

MAX_BYTES = 16 * 2**20  # our files have about 100 KB; a larger one is not ours
_HINT = "check free space, owner and mode of the volume"

T = TypeVar("T")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn an OSError into VolumeError, exit code 50."""
    try:
        yield
    except OSError as error:
        message = f"{what}: {error.strerror}"
        raise VolumeError(message, hint=_HINT) from error


class ProfileFiles:
    """Files of the profile folder. Methods raise OSError unless their docstring says otherwise. Tests pass a failing
    `disk`."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or Disk()

    def path(self, id_: str, suffix: str = ".json") -> Path:
        return self.folder / f"{id_}{suffix}"

    def names(self) -> list[str]:
        """List all file names. Raises VolumeError."""
        with refusing(f"profiles cannot be listed: {self.folder}"):
            return self._disk.names(self.folder)

    def ids(self, suffix: str = ".json") -> list[str]:
        """List the ids that have a file with this suffix. Hidden files are skipped: they belong to a running or killed
        writer. Raises VolumeError."""
        names = self.names()
        return [name.removesuffix(suffix) for name in names if name.endswith(suffix) and not name.startswith(".")]

    def read(self, path: Path) -> bytes:
        """Read the file, at most MAX_BYTES + 1 bytes, so that the caller notices a file that is too large."""
        return self._disk.read(path, MAX_BYTES + 1)

    def put(self, path: Path, data: bytes, modified_ns: int | None = None) -> None:
        """Write the file atomically and durably. Call it under the lock of its id.

        If only the last sync fails, OSError is raised although the new file is there.
        """
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        modified_ns = time.time_ns() if modified_ns is None else modified_ns
        put_file(self._disk, path, data, temporary=temporary, modified_ns=modified_ns)

    def touch(self, path: Path) -> None:
        """Create an empty file durably; an existing file is not changed."""
        with suppress(FileExistsError):
            self._disk.close(self._disk.create(path))
        self.sync()

    def remove(self, path: Path) -> None:
        """Remove the file if it exists. Durable after `sync`."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def sync(self) -> None:
        sync_folder(self._disk, self.folder)

    def rename(self, path: Path, new: Path) -> None:
        self._disk.rename(path, new)

    def drop_leftovers(self, id_: str) -> None:
        """Remove temporary files of killed writers of this id. Call it under the lock of the id: then nobody else
        writes one."""
        for name in self._disk.names(self.folder):
            if name.startswith(f".{id_}.") and name.endswith(".tmp"):
                with suppress(OSError):
                    self._disk.remove(self.folder / name)

    def modified_ns(self, id_: str) -> int:
        """Return the modification time, or 0 if it cannot be read: an unknown order must not be fatal."""
        with suppress(OSError):
            return self._disk.modified_ns(self.path(id_))
        return 0

    def next_ns(self) -> int:
        """Return a modification time later than that of every other profile, even if the clock jumped back. Profiles
        are ordered by it."""
        return max((time.time_ns(), *(self.modified_ns(id_) + 1 for id_ in self.ids())))

    @contextmanager
    def locked(self, id_: str) -> Iterator[None]:
        """Hold the lock of this id; waits for another holder. Raises VolumeError."""
        with self._lock(self.path(id_, ".lock"), wait=True):
            yield

    @contextmanager
    def locked_at_once(self, id_: str) -> Iterator[bool]:
        """Try the lock of this id without waiting, for work that can be done later. Yields True if it was taken. Raises
        VolumeError."""
        with self._lock(self.path(id_, ".lock"), wait=False) as is_ours:
            yield is_ours

    @contextmanager
    def tuning(self, id_: str) -> Iterator[bool]:
        """Try the tuning lock without waiting for another container's tuning. Yields True if it was taken. Raises
        VolumeError."""
        with self._lock(self.path(id_, ".tuning"), wait=False) as is_ours:
            yield is_ours

    @contextmanager
    def _lock(self, path: Path, *, wait: bool) -> Iterator[bool]:
        with refusing(f"lock on the volume cannot be opened: {path}"):
            handle = self._disk.open_lock(path)
        try:
            with refusing(f"lock on the volume cannot be taken: {path}"):
                is_ours = self._disk.lock(handle, wait=wait)
            yield is_ours
        finally:
            with suppress(OSError):  # the lock ends in any case, and the work under it is done
                self._disk.close(handle)


class KeptResult(Generic[T]):
    """One result in a file `<id><suffix>`, under the key of a profile; it may exist without one. `what` names it in
    messages. `parse` raises ValueError for what it cannot read."""

    def __init__(self, files: ProfileFiles, id_: str, suffix: str, what: str, parse: Callable[[bytes], T]) -> None:
        self._files = files
        self._id = id_
        self._path = files.path(id_, suffix)
        self._what = what
        self._parse = parse

    def load(self, warn: Callable[[str], None]) -> T | None:
        """Return the result; None if there is none. `warn` is called for an unreadable file, which counts as none and
        is replaced. Changes nothing."""
        try:
            return self._parse(self._files.read(self._path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warn(f"{self._what} cannot be read, not used: {self._path}: {error}")
        return None

    def save(self, data: bytes) -> None:
        """Replace the result. Raises VolumeError."""
        with self._files.locked(self._id), refusing(f"{self._what} cannot be kept: {self._path}"):
            self._files.drop_leftovers(self._id)
            self._files.put(self._path, data)
