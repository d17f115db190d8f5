"""How work that can wait treats other programs on the machine: measuring in idle time, and checks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from appliance.race import first_of

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import

LOOKS = 5
"""Looks that find the machine busy; then the work is done as it is, since the machine may never be quiet."""
LOOK_AGAIN_S = 60.0  # after the first busy look, doubled after each


class Courtesy:
    """Looks at the machine once in an idle period, and leaves a busy one alone, each time for twice as long.

    `what_else_works()` looks while our engine rests, and returns "" if the machine is quiet. `idle_s` is the pause that
    begins such work; the first busy look is followed by no longer one.
    """

    def __init__(self, what_else_works: Callable[[], Awaitable[str]], idle_s: float) -> None:
        self._what_else_works = what_else_works
        self._again_s = min(LOOK_AGAIN_S, idle_s)
        self._busy_looks = 0
        self._not_before = 0.0
        self._calm_in: int | None = None  # the idle period in which a look found the machine quiet

    @property
    def is_used_up(self) -> bool:
        """True if other programs are no reason to wait any more."""
        return self._busy_looks >= LOOKS

    @property
    def rest_s(self) -> float:
        """How much longer a busy machine is left alone."""
        return 0.0 if self.is_used_up else max(0.0, self._not_before - time.monotonic())

    @property
    def most_s(self) -> float:
        """The seconds after which the work is done anyway."""
        return sum(self._after(looks) for looks in range(1, LOOKS))

    def is_calm(self, traffic: Traffic) -> bool:
        """True if a look in this idle period found the machine quiet, or if it need not be. Idle periods are told apart
        by how many requests came before them."""
        return self.is_used_up or self._calm_in == traffic.arrivals

    async def look(self, traffic: Traffic) -> str:
        """Look, and return what keeps the machine busy; "" if nothing does. A request ends the look, since our own
        engine works then."""
        period = traffic.arrivals
        looking, _ = await first_of(self._what_else_works(), traffic.until_arrival())
        if looking.cancelled() or period != traffic.arrivals:
            return ""
        words: str = looking.result()
        if words:
            self.leave_alone()
        else:
            self._calm_in = period
        return words

    def leave_alone(self) -> None:
        """Wait for a quieter machine, twice as long each time."""
        self._busy_looks += 1
        self._calm_in = None
        self._not_before = time.monotonic() + self._after(self._busy_looks)

    def _after(self, busy_looks: int) -> float:
        return self._again_s * 2.0 ** (busy_looks - 1)
