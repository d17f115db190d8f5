"""Looks for silent losses while a model serves: a slower build, a GPU that is gone, a GPU that is slowed down."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.probe.gpu.nvidia import query_gpus
from appliance.profile import losses
from appliance.profile.losses import Loss
from appliance.race import first_of
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import

LOOK_EVERY_S = 2.0  # while requests run
IDLE_LOOK_EVERY_S = 10.0
CLOCKS_OVER_S = 60.0
CLOSED_AFTER_S = 60.0  # without a request the child that reads GPUs ends: it keeps their driver open
_ROOT = Path("/")


class LossWatch:
    """Writes `losses` of one served model, and logs each once until it is over."""

    def __init__(self, served: ServedModel, *, every_s: float = LOOK_EVERY_S) -> None:
        self._served = served
        self._every_s = every_s
        self._compared: tuple[object, object] = (None, None)  # profile and plan that were compared last
        self._ready: object = None  # the engine that was ready at the last look for GPUs
        self._builds: tuple[Loss, ...] = ()
        self._missing: tuple[Loss, ...] = ()

    async def run(self, traffic: Traffic) -> None:
        """Look again and again. Never returns."""
        while True:
            await self._look_at_profiles()
            await self._look_for_gpus()
            clocks = await self._look_at_clocks(traffic)
            self._tell((*self._builds, *self._missing, *clocks))
            if traffic.working:
                await asyncio.sleep(self._every_s)
                continue
            if traffic.idle_s > CLOSED_AFTER_S:
                self._served.meter.rest()
            await first_of(traffic.until_arrival(), timeout_s=min(IDLE_LOOK_EVERY_S, 5 * self._every_s))

    async def _look_at_profiles(self) -> None:
        served = self._served
        now = served.profile, served.host.plan
        if now == self._compared:
            return
        self._compared = profile, plan = now
        self._builds = ()
        if profile is not None and plan is not None:
            earlier = await detached(served.store.of_other_builds, served.key)
            self._builds = tuple(losses.of_builds(plan, profile, earlier))

    async def _look_for_gpus(self) -> None:
        """Compare the GPUs with those of the first start, each time another engine became ready."""
        served = self._served
        if served.ready is self._ready:
            return
        is_first, self._ready = self._ready is None, served.ready
        if is_first or not served.gpus_at_first:
            return
        now = await detached(query_gpus, _ROOT, served.environment, served.settings.data_dir)
        self._missing = tuple(losses.of_missing(served.gpus_at_first, now.gpus, now.problem))

    async def _look_at_clocks(self, traffic: Traffic) -> tuple[Loss, ...]:
        meter = self._served.meter
        if not meter.has_gpus:
            return ()
        if traffic.working:
            await detached(meter.read, fresh_s=self._every_s / 2)
        last = meter.last
        readings = meter.since(last.time_s - CLOCKS_OVER_S) if last else ()
        return tuple(losses.of_clocks([reading.gpus for reading in readings]))

    def _tell(self, found: tuple[Loss, ...]) -> None:
        before = {loss.kind for loss in self._served.losses}
        for loss in found:
            if loss.kind not in before:
                self._served.report.warning("loss", f"{loss.what}; {loss.hint}", kind=loss.kind)
        self._served.losses = found
