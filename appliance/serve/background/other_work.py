"""Tell the user if other programs on the CPUs slow the engine down, from looks while it answers.

No other plan is loaded for that: the engine itself decodes with as many threads as are fastest beside them
(images/decisions.md), and a load would cost more than is left to win while the others work.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from appliance.profile import speeds_of
from appliance.race import first_of
from appliance.serve.model.served_model import ServedModel

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import

LOOK_EVERY_S = 10.0
SLOW = 0.5  # share of the slowest speed in the profile: even the deepest context is faster


def slow_beside(rate: float, measured: float | None, crowd: str | None) -> str | None:
    """Describe the slowdown; None without one, without a figure to compare with, or without other programs.

    `rate` is the sum of all streams, 0 if none of them got a token.
    """
    if not crowd or not measured or not 0 < rate < SLOW * measured:
        return None
    return f"decodes {rate:.1f} tok/s, at least {measured:.1f} by its profile: {crowd}"


class OtherWork:
    """Writes `slow_beside` of one served model once two looks in a row found it slow."""

    def __init__(self, served: ServedModel, *, every_s: float = LOOK_EVERY_S) -> None:
        self._served = served
        self._every_s = every_s
        self._was_slow = False

    async def run(self, traffic: Traffic) -> None:
        """Look every `every_s` while requests run. Never returns."""
        served = self._served
        while True:
            await first_of(traffic.until_arrival(), timeout_s=None if served.slow_beside is None else self._every_s)
            words = await self._look(traffic) if traffic.working else None
            if words and self._was_slow:
                self._tell(words)
            if not words:
                served.slow_beside = None
            self._was_slow = bool(words)

    async def _look(self, traffic: Traffic) -> str | None:
        watch, before = self._served.watch(with_gpus=False), traffic.rate.total
        try:
            with watch:
                await asyncio.sleep(self._every_s)
        except OSError:  # no file is left to look with, so nothing is known
            await asyncio.sleep(self._every_s)
            return None
        if not traffic.working:
            return None
        # The current rate counts as well: a request that began during the look is not slow for that.
        rate = max((traffic.rate.total - before) / self._every_s, traffic.rate.per_s)
        measured = speeds_of(self._served.host.plan, self._served.profile)
        slowest = min((at.decode_tokens_per_s for at in measured.at), default=None) if measured else None
        return slow_beside(rate, slowest, watch.conditions.crowd)

    def _tell(self, words: str) -> None:
        """Log it once, until the engine was fast again or had nothing to do."""
        if self._served.slow_beside is None:
            advice = "stop the others or give the engine CPUs of its own (docker run --cpuset-cpus)"
            self._served.report.warning("slow_beside", f"{words}; {advice}")
        self._served.slow_beside = words
