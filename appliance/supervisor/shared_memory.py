"""Removes segments and semaphores in /dev/shm that an engine left behind. A killed process leaves them, and they occupy
memory.

They are recognized by the inodes that the engine's processes map. Names do not suffice: a shared /dev/shm also holds
files of other programs, and a semaphore is mapped under the temporary name that the C library gave it (`sem_open`),
which is shown as "(deleted)".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from appliance.supervisor.reaper import Process
from appliance.system.lack import is_lack, tell

_FOLDER = Path("/dev/shm")  # noqa: S108 - the kernel's folder
_SLACK_S = 1.0  # tolerance between clocks
_AGAIN_S = 2.0  # reading the mappings again takes time: a large engine has thousands


class SharedMemory:
    """Shared memory that one process tree has mapped since this object was made."""

    def __init__(self) -> None:
        self._since = time.time() - _SLACK_S
        self._known: set[int] = set()
        self._noted_at = 0.0

    def note(self, members: Iterable[Process]) -> None:
        """Add the inodes that the processes map now. Processes that are already gone add nothing."""
        self._noted_at = time.monotonic()
        for process in members:
            self._known |= mapped(process.pid)

    def note_now_and_then(self, members: Iterable[Process]) -> None:
        """Call `note` at most every _AGAIN_S, for callers that ask often."""
        if time.monotonic() - self._noted_at > _AGAIN_S:
            self.note(members)

    def remove(self) -> None:
        """Remove the noted files that are ours, were made since, and are mapped by no process; call it after the
        engine's end. Removes nothing if the mappings of other processes cannot be read."""
        try:
            left = dict(self._left())
            others = _mapped_by_any() if left else set()
        except OSError as error:
            if not is_lack(error):
                raise
            tell("removing the engine's shared memory", error)
        else:
            for inode in left.keys() - others:
                with suppress(OSError):  # another program removed it
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
    """Return the inodes of /dev/shm that the process maps; empty if it is gone or another user's. Raises OSError if
    files or memory are lacking."""
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
