"""Segments in /dev/shm that an engine made and did not remove: whoever is killed leaves them, and they are memory.

They are known by who maps them: other programs of the machine have theirs there too where the folder is shared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from appliance.supervisor.reaper import Process

_FOLDER = Path("/dev/shm")  # noqa: S108 - where the kernel has them
_SLACK_S = 1.0  # of clocks


class SharedMemory:
    """Of one family of processes, since it was made."""

    def __init__(self) -> None:
        self._since = time.time() - _SLACK_S
        self._known: set[Path] = set()

    def note(self, members: Iterable[Process]) -> None:
        """What they map now, and was made since; nothing is told of those that are gone."""
        for process in members:
            self._known |= {path for path in mapped(process.pid) if self._is_new(path)}

    def remove(self) -> None:
        """After their end."""
        for path in self._known:
            with suppress(OSError):  # the family removed it, or another user's program holds it
                path.unlink()
        self._known.clear()

    def _is_new(self, path: Path) -> bool:
        try:
            found = path.stat()
        except OSError:
            return False
        return found.st_uid == os.geteuid() and found.st_ctime >= self._since


def mapped(pid: int) -> set[Path]:
    """Files of /dev/shm in its memory; none of a process that is gone or another user's."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    names = (line.partition(f"{_FOLDER}/")[2] for line in text.splitlines() if f" {_FOLDER}/" in line)
    return {_FOLDER / name for name in names if name and not name.endswith(" (deleted)") and "/" not in name}
