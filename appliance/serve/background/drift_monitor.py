"""Probe the engine that serves in idle time, until it is known whether its profile still holds.

No probe begins on a busy machine. A probe is given up if other programs begin to work, or if it takes several times
what the profile says. A busy machine delays the next probe.
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

PROBE_AFTER_S = (
    120.0  # idle time before a probe, and from one probe to the next: what slowed one may have ended by then
)
# Shortest watch: the kernel counts in hundredths of a second, so a shorter one tells little.
WATCHED_S = 1.0
AFTER_MOST_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class _Probed:
    """The result of one probe, or how it ended without a figure. It counts for nothing if `disturbance` is not None:
    other programs worked meanwhile."""

    end: str = ""
    found: tuple[Compared, ...] = ()
    disturbance: str | None = None


class DriftMonitor:
    """Probes one engine, which `command` started. `watch` sees other programs; `on_state` is told each new state."""

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
        on_state: Callable[[DriftState | None], None] = lambda _: None,
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
        self._on_state = on_state
        self._after_s = self._pause_s = after_s
        self._overdue_least_s = overdue_least_s
        self._watched_s = watched_s
        self._is_told = False  # True once the log said that the machine is busy
        self._drift = Drift()

    @property
    def state(self) -> DriftState | None:
        """The state so far; None if the plan that serves was not measured, so nothing can be compared."""
        return self._drift.state if self._baseline else None

    async def run(self) -> Drift:
        """Probe until the state is decided or PROBES_MAX probes have ended; at once if nothing can be compared."""
        self._on_state(self.state)
        began, ended = float("-inf"), 0
        while self._baseline is not None and self._drift.state is DriftState.UNDECIDED and ended < PROBES_MAX:
            await self._until_idle(began)
            began = time.monotonic()
            try:
                ended += await self._unless_asked(self._baseline)
            except EngineNotReadyError as error:  # the supervisor tells of a death, and the next engine is probed
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
        """Wait until the last request and the last probe are long enough ago."""
        while True:
            idle_s = 0.0 if self._traffic.running else self._traffic.idle_s
            left_s = max(self._after_s - idle_s, self._pause_s - (time.monotonic() - began))
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _unless_asked(self, baseline: Baseline) -> bool:
        """Probe once; False if a request came, which ends the probe at once. Raises EngineNotReadyError."""
        async with self._alone:
            probing, _ = await first_of(self._probe(baseline), self._traffic.until_arrival())
        if probing.cancelled():
            self._say("given up, since a request came")
            return False
        probed: _Probed = probing.result()
        self._pause_s = min(2 * self._pause_s, AFTER_MOST_S) if probed.disturbance else self._after_s
        self._tell(probed)
        self._drift = self._drift.observe(probed.found, probed.disturbance)
        self._on_state(self.state)
        return True

    def _tell(self, probed: _Probed) -> None:
        """Log the result; a busy machine once, until it was quiet again."""
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
