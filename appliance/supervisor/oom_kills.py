"""Kills by the kernel's memory killer, of late."""

from __future__ import annotations

import time
from collections.abc import Callable

LATELY_S = 60.0


class OomKills:
    """The kernel counts kills of the whole control group, and `count` tells them; it may tell None. What a program has
    outlived by LATELY_S was another process: not just before its end, since a program may end later than a part of it
    that was killed. Assumed is that nothing else of the group is killed in the last minute or two of a program that is
    itself ended by SIGKILL."""

    def __init__(self, count: Callable[[], int | None], *, lately_s: float = LATELY_S) -> None:
        self._count = count
        self._lately_s = lately_s
        self._marks = [(time.monotonic(), count())]  # two at most, the older one first

    def note(self) -> None:
        """The program lives. Called now and then."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= self._lately_s:
            self._marks = [self._marks[-1], (now, self._count())]

    def lately(self) -> int | None:
        """Return how many there were since the start, or since a minute or two ago. None if nobody counts."""
        before, after = self._marks[0][1], self._count()
        return None if before is None or after is None else after - before
