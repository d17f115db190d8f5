"""Time budget of a tuning."""

from __future__ import annotations

import time


class Budget:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begin()

    def begin(self) -> None:
        self._began = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s

    def at_most_s(self, share: float) -> float:
        """Return this share of the whole budget, or the time left if it is less."""
        return min(self.left_s, self.seconds * share)
