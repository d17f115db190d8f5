"""Counts recent kills by the kernel's OOM killer."""

from __future__ import annotations

import time
from collections.abc import Callable

LATELY_S = 60.0


class OomKills:
    """Recent kills by the kernel's OOM killer, from the kernel's count for the whole control group.

    `count` returns that number, or None if it is unknown. Kills that the program outlived by LATELY_S hit another
    process and are not counted. The period is not shorter, because a program may end later than a killed part of it.
    The result is wrong if another process of the group is killed in the last minute or two of a program that SIGKILL
    ends.
    """

    def __init__(self, count: Callable[[], int | None], *, lately_s: float = LATELY_S) -> None:
        self._count = count
        self._lately_s = lately_s
        self._marks = [(time.monotonic(), count())]  # (time, count), at most two, the older first

    def note(self) -> None:
        """Note that the program is alive. Called now and then."""
        now = time.monotonic()
        if now - self._marks[-1][0] >= self._lately_s:
            self._marks = [self._marks[-1], (now, self._count())]

    def lately(self) -> int | None:
        """Return the number of kills since the start, or since a minute or two ago. None if the count is unknown."""
        before, after = self._marks[0][1], self._count()
        return None if before is None or after is None else after - before
