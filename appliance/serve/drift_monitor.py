"""Probes the engine that serves, while nobody asks, until it is known whether its profile still holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.command import Command
from appliance.engines.engine import Engine
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.probe.watch import Watch
from appliance.profile import Profile
from appliance.profile.drift import PROBES_MAX, TOKENS, Baseline, Drift, DriftState, baseline_of
from appliance.race import first_of
from appliance.report import Report
from appliance.tune.curve import Point

if TYPE_CHECKING:
    from appliance.gateway.traffic import Traffic  # for the name only: it takes half a second to import

PROBE_AFTER_S = 120.0  # without a request, and after the last probe: what slowed that one may have ended by then
# The machine is watched for at least so long: the kernel counts in hundredths of a second, and of less it tells little.
WATCHED_S = 1.0


class DriftMonitor:
    """`command` started the engine that serves; `watch` makes what sees the work of others meanwhile."""

    def __init__(
        self,
        profile: Profile,
        serving: Plan,
        engine: Engine,
        command: Command,
        *,
        traffic: Traffic,
        report: Report,
        watch: Callable[[], Watch],
        after_s: float = PROBE_AFTER_S,
    ) -> None:
        self._id = profile.key.id
        self._baseline = baseline_of(profile, serving)
        self._is_speculating = serving.speculation is not None
        self._engine = engine
        self._command = command
        self._traffic = traffic
        self._report = report
        self._watch = watch
        self._after_s = after_s
        self._drift = Drift()

    @property
    def state(self) -> DriftState | None:
        """None where the plan that serves was not measured: there is nothing to compare with."""
        return self._drift.state if self._baseline else None

    async def run(self) -> Drift:
        """Until it is decided or PROBES_MAX probes have ended; at once where there is nothing to compare with."""
        began, ended = float("-inf"), 0
        while self._baseline is not None and self._drift.state is DriftState.UNDECIDED and ended < PROBES_MAX:
            await self._until_idle(began)
            began = time.monotonic()
            try:
                ended += await self._unless_asked(self._baseline)
            except EngineNotReadyError as error:  # of a death the supervisor tells, and another engine is probed
                ended += 1
                self._say(f"no figure: {error.message}")
            except Exception as error:
                ended += 1
                self._report.warning(
                    "profile_not_probed", f"probe of profile {self._id}: {type(error).__name__}: {error}"
                )
        if self._baseline is not None and self._drift.state is DriftState.UNDECIDED:
            self._say(f"{ended} probes decided nothing; there are no more before the next start")
        return self._drift

    async def _until_idle(self, began: float) -> None:
        """Until nobody has asked for long enough, nor have we."""
        while True:
            idle_s = 0.0 if self._traffic.running else self._traffic.idle_s
            left_s = self._after_s - min(idle_s, time.monotonic() - began)
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _unless_asked(self, baseline: Baseline) -> bool:
        """One probe, given up at once when a request comes; whether it came to its end. Raises EngineNotReadyError."""
        probing, _ = await first_of(self._probe(baseline), self._traffic.until_arrival())
        if probing.cancelled():
            self._say("given up, since a request came")
            return False
        point, disturbance = probing.result()
        found = baseline.compare(point)
        figures = "; ".join(one.describe() for one in found)
        self._say(f"{figures}; it counts for nothing: {disturbance}" if disturbance else figures)
        self._drift = self._drift.observe(found, disturbance)
        return True

    async def _probe(self, baseline: Baseline) -> tuple[Point, str | None]:
        from appliance.tune.measure import Probe  # here: a start from a profile may never probe

        async with self._engine.client(self._command, doing="probing") as client, self._watch() as watching:
            ends = time.monotonic() + WATCHED_S
            probe = await Probe.of(client)
            point = await probe.repeat(baseline.point.depth, TOKENS, is_speculating=self._is_speculating)
            await asyncio.sleep(ends - time.monotonic())
        return point, watching.conditions.disturbance

    def _say(self, words: str) -> None:
        self._report.info("profile_probed", f"probe of profile {self._id}: {words}")
