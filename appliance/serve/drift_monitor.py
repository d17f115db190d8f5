"""Probes the engine that serves, while nobody asks, until it is known whether its profile still holds.

A probe gives way: on a busy machine none is begun, one beside which others begin to work is given up, and so is one
that takes several times what the profile says. After each of the first two the next comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.engine import Engine
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.probe.load.watch import Watch
from appliance.profile import Profile
from appliance.profile.drift import (
    OVERDUE_LEAST_S,
    PROBES_MAX,
    TOKENS,
    Baseline,
    Compared,
    Drift,
    DriftState,
    baseline_of,
)
from appliance.race import first_of
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.tune.figures.curve import Point

PROBE_AFTER_S = 120.0  # without a request, and after the last probe: what slowed that one may have ended by then
# The machine is watched for at least so long: the kernel counts in hundredths of a second, and of less it tells little.
WATCHED_S = 1.0
AFTER_MOST_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class _Probed:
    """What one probe found, or how it ended without a figure. `disturbance` says what else was at work: then the probe
    counts for nothing."""

    end: str = ""
    found: tuple[Compared, ...] = ()
    disturbance: str | None = None


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
        alone: asyncio.Lock | None = None,
        after_s: float = PROBE_AFTER_S,
        overdue_least_s: float = OVERDUE_LEAST_S,
        watched_s: float = WATCHED_S,
    ) -> None:
        self._id = profile.key.id
        self._baseline = baseline_of(profile, serving)
        self._is_speculating = serving.speculation is not None
        self._engine = engine
        self._command = command
        self._traffic = traffic
        self._report = report
        self._watch = watch
        self._alone = alone or asyncio.Lock()
        self._after_s = self._pause_s = after_s
        self._overdue_least_s = overdue_least_s
        self._watched_s = watched_s
        self._is_told = False  # that the machine is busy
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
            left_s = max(self._after_s - idle_s, self._pause_s - (time.monotonic() - began))
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _unless_asked(self, baseline: Baseline) -> bool:
        """One probe, given up at once when a request comes; whether it came to its end. Raises EngineNotReadyError."""
        async with self._alone:
            probing, _ = await first_of(self._probe(baseline), self._traffic.until_arrival())
        if probing.cancelled():
            self._say("given up, since a request came")
            return False
        probed: _Probed = probing.result()
        self._pause_s = min(2 * self._pause_s, AFTER_MOST_S) if probed.disturbance else self._after_s
        self._tell(probed)
        self._drift = self._drift.observe(probed.found, probed.disturbance)
        return True

    def _tell(self, probed: _Probed) -> None:
        """That the machine is busy is said once, until it was quiet again."""
        figures = "; ".join(one.describe() for one in probed.found) or probed.end
        if not probed.disturbance:
            self._say(figures)
        elif not self._is_told:
            again = f"tried again ever less often, at least every {AFTER_MOST_S / 60:.0f} min"
            self._say(f"{figures}; it counts for nothing: {probed.disturbance}; {again}")
        self._is_told = bool(probed.disturbance)

    async def _probe(self, baseline: Baseline) -> _Probed:
        async with self._watch() as watching:
            await asyncio.sleep(self._watched_s)
        if busy := watching.conditions.disturbance:
            return _Probed(end="not begun", disturbance=busy)
        limit_s, began = baseline.limit_s(self._overdue_least_s), time.monotonic()
        async with self._watch() as watching:
            ends = time.monotonic() + self._watched_s
            asking, crowding = await first_of(
                self._ask(baseline.point.depth), watching.until_crowded(), timeout_s=limit_s
            )
            await asyncio.sleep(ends - time.monotonic())
        disturbance = watching.conditions.disturbance
        if not asking.cancelled():
            return _Probed(found=baseline.compare(asking.result()), disturbance=disturbance)
        if not crowding.cancelled():
            return _Probed(end="given up", disturbance=disturbance or crowding.result())
        return _Probed(found=baseline.overdue(time.monotonic() - began), disturbance=disturbance)

    async def _ask(self, depth: int) -> Point:
        from appliance.tune.trials.run_trial import Probe  # here: a start from a profile may never probe

        async with self._engine.client(self._command, doing="probing") as client:
            probe = await Probe.of(client)
            return await probe.repeat(depth, TOKENS, is_speculating=self._is_speculating)

    def _say(self, words: str) -> None:
        self._report.info("profile_probed", f"probe of profile {self._id}: {words}")
