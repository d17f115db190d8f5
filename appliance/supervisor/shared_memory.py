"""Segments and semaphores in /dev/shm that an engine made and did not remove: whoever is killed leaves them, and they
are memory.

They are known by who maps them, by inode: other programs of the machine have theirs there too where the folder is
shared, and a semaphore is mapped under the name that it had while the C library made it (`sem_open`), which is
"(deleted)" since.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from appliance.supervisor.reaper import Process
from appliance.system.lack import is_lack, tell

_FOLDER = Path("/dev/shm")  # noqa: S108 - where the kernel has them
_SLACK_S = 1.0  # of clocks
_AGAIN_S = 2.0  # a large engine has thousands of mappings to be read


class SharedMemory:
    """Of one family of processes, since it was made."""

    def __init__(self) -> None:
        self._since = time.time() - _SLACK_S
        self._known: set[int] = set()
        self._noted_at = 0.0

    def note(self, members: Iterable[Process]) -> None:
        """What they map now; nothing is told of those that are gone."""
        self._noted_at = time.monotonic()
        for process in members:
            self._known |= mapped(process.pid)

    def note_now_and_then(self, members: Iterable[Process]) -> None:
        """As `note`, for whoever asks often."""
        if time.monotonic() - self._noted_at > _AGAIN_S:
            self.note(members)

    def remove(self) -> None:
        """After their end: what is ours, was made since, and is mapped by nobody else. While it cannot be known who
        maps what, nothing is removed."""
        try:
            left = dict(self._left())
            others = _mapped_by_any() if left else set()
        except OSError as error:
            if not is_lack(error):
                raise
            tell("removing the engine's shared memory", error)
        else:
            for inode in left.keys() - others:
                with suppress(OSError):  # another user's program removed it
                    left[inode].unlink()
        self._known.clear()

    def _left(self) -> Iterator[tuple[int, Path]]:
        with suppress(FileNotFoundError, PermissionError), os.scandir(_FOLDER) as entries:
            for entry in entries:
                if entry.inode() in self._known and self._is_own(entry):
                    yield entry.inode(), Path(entry.path)

    def _is_own(self, entry: os.DirEntry[str]) -> bool:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return False
        return found.st_uid == os.geteuid() and found.st_ctime >= self._since


def _mapped_by_any() -> set[int]:
    return set[int]().union(*(mapped(int(name)) for name in os.listdir("/proc") if name.isdecimal()))  # noqa: PTH208


def mapped(pid: int) -> set[int]:
    """Inodes of /dev/shm in its memory; none of a process that is gone or another user's. Raises OSError for a lack."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        device = _FOLDER.stat().st_dev
    except OSError as error:
        if is_lack(error):
            raise
        return set()
    own = f"{os.major(device):02x}:{os.minor(device):02x}"
    # Range, rights, offset, device, inode, name.
    fields = (line.split(None, 5) for line in text.splitlines() if f" {_FOLDER}/" in line)
    return {int(inode) for *_, where, inode, _ in fields if where == own}
