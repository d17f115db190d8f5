"""Time and engine loads that a tuning may spend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta


def utc_day() -> str:
    """Return the present day of UTC, such as "2026-11-28"."""
    return datetime.now(UTC).date().isoformat()


def day_after(day: str) -> str:
    return (datetime.fromisoformat(day) + timedelta(days=1)).date().isoformat()


@dataclass(frozen=True, kw_only=True)
class LoadsOfDay:
    """Number of engines that were loaded for measuring on one day of UTC."""

    day: str
    count: int

    def on(self, day: str) -> int:
        return self.count if self.day == day else 0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Limits of a tuning in idle time. `loads_a_day` is for each model, machine and build.

    With `waits`, no client waits for the result: the tuning has no time limit, and ends when no trial is worth its
    price.
    """

    loads_a_day: int
    waits: bool


class Budget:
    """Budget of one tuning. `loads_left` returns how many engines may still be loaded today."""

    def __init__(
        self, seconds: float, *, is_timed: bool = True, loads_left: Callable[[], float] = lambda: math.inf
    ) -> None:
        self.seconds = seconds
        self.is_timed = is_timed
        self._loads_left = loads_left
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        """Seconds left: 0 if no engine may be loaded, infinite without a time limit."""
        return self.left_of(self.seconds - self.spent_s)

    def left_of(self, seconds: float, *, reserved_loads: int = 0) -> float:
        """Return `seconds`, or infinity without a time limit; 0 if at most `reserved_loads` engines may be loaded."""
        if self._loads_left() <= reserved_loads:
            return min(0.0, seconds)
        return seconds if self.is_timed else math.inf

    def has_loads(self, count: int) -> bool:
        return self._loads_left() >= count

    def at_most_s(self, share: float, *, load_s: float = 0.0) -> float:
        """Return this share of the whole budget, or the time left if it is less. Without a time limit, a load of
        `load_s` does not count."""
        return min(self.left_s, self.seconds * share + (0.0 if self.is_timed else load_s))
