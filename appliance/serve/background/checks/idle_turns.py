"""Turns of a check on the engine that serves: one begins in a pause between requests, and the next request ends it.

Other programs that take a large part of the machine end it too, and none begins beside them: what a check asks takes
every core for minutes, and a game or another container would be slowed by it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.errors import EngineNotReadyError
from appliance.race import first_of
from appliance.serve.model.courtesy import Courtesy

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.serve.model.served_model import ServedModel

AFTER_S = 60.0  # idle time before a turn
BREAKS_MAX = 2  # times that the engine breaks off, in one start: then the check is left to the next one
LOOK_EVERY_S = 1.0  # for an engine that is away
SHORTEST_S = 0.1  # of one wait
_DIED_WITHIN_S = 2.0  # the supervisor notes the death of an engine within this time
T = TypeVar("T")


async def until_quiet(served: ServedModel, traffic: Traffic, after_s: float) -> None:
    """Wait until nobody has asked for `after_s` while no other model is wanted."""
    while True:
        await served.sharing.is_alone.wait()
        left_s = after_s - traffic.idle_s  # whose idle_s is 0 while a request for work runs
        if left_s <= 0:
            return
        await asyncio.sleep(max(SHORTEST_S, left_s))


class IdleTurns:
    """Turns of one check. `alone` is held during a turn: probes and measurements would slow each other.

    `limit_s` is for all turns in one start, interrupted ones included.
    """

    def __init__(self, served: ServedModel, *, alone: asyncio.Lock, after_s: float, limit_s: float) -> None:
        self._served = served
        self._alone = alone
        self._after_s = min(after_s, served.settings.idle_s)
        self._breaks = 0
        self._courtesy = Courtesy(served.what_crowds, served.settings.idle_s)
        self.left_s = limit_s
        self.turn_s = 0.0  # of the last one, without its wait for probes and measurements

    async def until_idle(self, traffic: Traffic) -> None:
        """Wait for a pause that is long enough while the engine answers, no other model is wanted and no other program
        crowds the machine."""
        while True:
            await asyncio.sleep(self._courtesy.rest_s)
            await until_quiet(self._served, traffic, self._after_s)
            if not self._served.host.is_ready:
                await asyncio.sleep(LOOK_EVERY_S)
            elif self._courtesy.is_calm(traffic):
                return
            else:
                await self._courtesy.look(traffic)

    async def take(self, work: Coroutine[Any, Any, T], traffic: Traffic, *, most_s: float | None = None) -> T | None:
        """Do the work. None if a request came, another model is loaded, other programs crowd the machine, or the engine
        was taken away meanwhile; also after `most_s`.

        Raises EngineNotReadyError (43) if the engine died of it.
        """
        served = self._served
        supervisor = served.host.supervisor
        crash_before = supervisor.crash if supervisor else None
        async with self._alone:
            began = time.monotonic()
            leaving = (traffic.until_arrival(), served.sharing.is_shared.wait())
            crowded = () if self._courtesy.is_used_up else (served.until_crowded(),)
            working, _, _, *crowding = await first_of(work, *leaving, *crowded, timeout_s=most_s)
        self.turn_s = time.monotonic() - began
        self.left_s -= self.turn_s
        if working.cancelled():
            if any(not each.cancelled() for each in crowding):
                self._courtesy.leave_alone()
            return None
        try:
            found: T = working.result()
        except EngineNotReadyError as error:
            await asyncio.sleep(_DIED_WITHIN_S)
            self._breaks += 1
            if self._breaks == BREAKS_MAX:
                self.left_s = 0.0
            if supervisor is not None and supervisor.crash is not crash_before:
                raise
            served.report.info("check_broken_off", error.message)
            return None
        return found
