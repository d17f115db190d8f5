"""The folder of profiles on the volume: whole files and locks. What is in the files is not known here.

Several containers may share the volume: a writer locks `<id>.lock`, writes a file of its own, syncs it and renames it
over the old one, so that a reader sees the old or the new one whole. The lock belongs to the open file and dies with
its process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.errors import VolumeError
from appliance.system.disk import Disk, put_file, sync_folder

MAX_BYTES = 16 * 2**20  # ours are some 100 KB; a larger file is not one of ours
_HINT = "check free space, owner and mode of the volume"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """An OSError as VolumeError, exit code 50."""
    try:
        yield
    except OSError as error:
        message = f"{what}: {error.strerror}"
        raise VolumeError(message, hint=_HINT) from error


class ProfileFiles:
    """`disk` is what a test lets fail. Where nothing else is said a method raises OSError."""

    def __init__(self, folder: Path, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or Disk()

    def path(self, id_: str, suffix: str = ".json") -> Path:
        return self.folder / f"{id_}{suffix}"

    def names(self) -> list[str]:
        """Raises VolumeError."""
        with refusing(f"profiles cannot be listed: {self.folder}"):
            return self._disk.names(self.folder)

    def ids(self, suffix: str = ".json") -> list[str]:
        """Of all with such a file; hidden ones are of a writer that is at work, or was killed. Raises VolumeError."""
        names = self.names()
        return [name.removesuffix(suffix) for name in names if name.endswith(suffix) and not name.startswith(".")]

    def read(self, path: Path) -> bytes:
        """Of a file that is too large, more than MAX_BYTES."""
        return self._disk.read(path, MAX_BYTES + 1)

    def put(self, path: Path, data: bytes, modified_ns: int | None = None) -> None:
        """Whole and durable, or not at all, but for an error of the very last sync. Under the lock of its id."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        modified_ns = time.time_ns() if modified_ns is None else modified_ns
        put_file(self._disk, path, data, temporary=temporary, modified_ns=modified_ns)

    def touch(self, path: Path) -> None:
        """An empty file, durable; one that is there stays."""
        with suppress(FileExistsError):
            self._disk.close(self._disk.create(path))
        self.sync()

    def remove(self, path: Path) -> None:
        """Also one that is not there. Durable after `sync`."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def sync(self) -> None:
        sync_folder(self._disk, self.folder)

    def rename(self, path: Path, new: Path) -> None:
        self._disk.rename(path, new)

    def drop_leftovers(self, id_: str) -> None:
        """Of writers of this id that were killed: under its lock nobody else is writing one."""
        for name in self._disk.names(self.folder):
            if name.startswith(f".{id_}.") and name.endswith(".tmp"):
                with suppress(OSError):
                    self._disk.remove(self.folder / name)

    def modified_ns(self, id_: str) -> int:
        """0 for a file that has gone, or whose time cannot be told: an order is no reason to fail."""
        with suppress(OSError):
            return self._disk.modified_ns(self.path(id_))
        return 0

    def next_ns(self) -> int:
        """For the time of a file, by which profiles are ordered: later than every other one's, also when the clock is
        not."""
        return max((time.time_ns(), *(self.modified_ns(id_) + 1 for id_ in self.ids())))

    @contextmanager
    def locked(self, id_: str) -> Iterator[None]:
        """Waits for another that has it. Raises VolumeError."""
        with self._lock(self.path(id_, ".lock"), wait=True):
            yield

    @contextmanager
    def locked_at_once(self, id_: str) -> Iterator[bool]:
        """Whether it is ours: what can be done later waits for nobody. Raises VolumeError."""
        with self._lock(self.path(id_, ".lock"), wait=False) as is_ours:
            yield is_ours

    @contextmanager
    def tuning(self, id_: str) -> Iterator[bool]:
        """Whether it is ours: nobody waits for another's measuring. Raises VolumeError."""
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
            with suppress(OSError):  # the lock is gone in any case, and the work under it is done
                self._disk.close(handle)
