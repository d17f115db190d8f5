"""Switch to the plan of another mode while requests come: none of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from appliance.console.progress import Phase
from appliance.errors import FatalError
from appliance.plan import Plan
from appliance.profile import Profile, best_of, speeds_of
from appliance.serve.model.mode_state import ModePlan
from appliance.serve.model.served_model import ServedModel
from appliance.settings import MODES
from appliance.start.inputs import StartInputs
from appliance.system.detached import detached
from appliance.system.lack import outlast
from appliance.tune.figures.speeds import predicted_speeds
from appliance.tune.figures.workload import parse_mix

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.gateway.engine.upstream_pool import UpstreamPool

MODES_EVERY_S = 1.0


class ModeSwitch:
    """One switch to the plan of `mode`. The caller is the only one who loads and stops engines meanwhile.

    `why_no_room(start, plan)` says why free memory holds no second engine with that plan; "" if it does.
    """

    def __init__(
        self,
        served: ServedModel,
        upstream: UpstreamPool,
        mode: str,
        why_no_room: Callable[[StartInputs, Plan], Awaitable[str]],
    ) -> None:
        self._served = served
        self._host = served.host
        self._report = served.report
        self._upstream = upstream
        self._mode = mode
        self._start = served.start.in_mode(mode)
        self._why_no_room = why_no_room

    async def run(self) -> None:
        """Switch. A failure is noted in `served.modes`, and the plan before it serves on.

        Raises the engine's error if an engine that was stopped for it does not come back.
        """
        why = "the switch was broken off"
        try:
            why = await self._switch()
        except FatalError as error:
            why = error.message
            if self._report.progress.phase is Phase.FAILED:
                raise
        finally:
            # Other plans may serve since the change, even if this was cancelled while the earlier engine drains.
            self._served.modes.end("" if self._served.settings.mode == self._mode else why)
        if why:
            self._report.warning("mode_failed", f"mode '{self._mode}' cannot be served: {why}", mode=self._mode)

    async def _switch(self) -> str:
        """Switch, and return why that failed; empty if it did not."""
        served = self._served
        plan = await detached(self._best)
        if not self._host.is_ready:
            return "the engine is not ready"
        if not self._host.is_another(plan):
            self._take_mode()
            self._host.recognize(plan)
            self._report.info("mode_changed", served.modes.words(self._mode), mode=self._mode, plan=plan.key)
            return ""
        why_no_room = await self._why_no_room(self._start, plan)
        where = f"in place of the engine that serves, since {why_no_room}" if why_no_room else "on a second engine"
        words = f"switching to mode '{self._mode}': loading {plan.key} {where}"
        self._report.info("mode_switch", words, mode=self._mode, plan=plan.key)
        why = await (self._alone(plan) if why_no_room else self._beside(plan))
        if not why:
            self._report.info("mode_changed", served.modes.words(self._mode), mode=self._mode, plan=plan.key)
        return why

    def _best(self) -> Plan:
        profile = self._served.profile
        return best_of(profile, self._mode, self._start.space(profile.kv_checks if profile else ()))

    def _take_mode(self) -> None:
        self._served.set_start(self._served.start.in_mode(self._mode))

    async def _beside(self, plan: Plan) -> str:
        crash = await self._host.swap(plan, self._upstream, on_switch=self._take_mode)
        return f"its engine did not load: {crash.describe()}; the plan before it serves on" if crash else ""

    async def _alone(self, plan: Plan) -> str:
        """Let requests wait, load the plan in place of the engine, and the earlier plan if that fails."""
        words = f"the plan of mode '{self._mode}' is being loaded, about {self._host.load_s:.0f} s"
        self._report.phase(Phase.HELD, words)
        await self._upstream.wait_free()
        before = await self._host.stop_current()
        why = await self._why_not_loaded(plan)
        if not why:
            self._take_mode()
        else:
            why = f"its engine did not load: {why}; the plan before it serves again"
            await self._bring_back(before)
        self._report.phase(Phase.READY)
        return why

    async def _bring_back(self, plan: Plan) -> None:
        """Load the plan that was stopped. Raises the engine's error if it does not come back."""
        self._report.phase(Phase.HELD, f"the earlier plan is being loaded, about {self._host.load_s:.0f} s")
        try:
            crash = await outlast(partial(self._host.load, plan), "loading the earlier plan")
            if crash is not None:
                raise self._served.start.engine.as_error(crash)
        except FatalError as error:
            self._report.phase(Phase.FAILED, error.message)
            raise

    async def _why_not_loaded(self, plan: Plan) -> str:
        try:
            crash = await self._host.load(plan)
        except FatalError as error:
            return error.message
        return crash.describe() if crash else ""


async def keep_modes(served: ServedModel, backend: Backend) -> None:
    """Keep `served.modes.plans` as they follow from the inputs and the profile. Never returns."""
    seen: tuple[StartInputs, Profile | None] | None = None
    while True:
        await asyncio.sleep(MODES_EVERY_S)  # first of all: the first requests after a start need the CPU
        known = served.start, served.profile
        is_new = seen is None or known[0] is not seen[0] or known[1] is not seen[1]
        if is_new and not backend.traffic.working:
            served.modes.plans = await detached(modes_of, *known)
            seen = known


def modes_of(start: StartInputs, profile: Profile | None) -> tuple[ModePlan, ...]:
    """Return the plan of each mode."""
    return tuple(_mode_plan(start.in_mode(mode), profile) for mode in MODES)


def _mode_plan(start: StartInputs, profile: Profile | None) -> ModePlan:
    mode = start.settings.mode
    try:
        plan = best_of(profile, mode, start.space(profile.kv_checks if profile else ()))
    except FatalError as error:
        return ModePlan(mode=mode, plan=None, why_none=error.message)
    measured = speeds_of(plan, profile)
    speeds = measured or predicted_speeds(plan)
    if speeds is None:
        return ModePlan(mode=mode, plan=plan)
    depth = min(parse_mix(start.settings.workload).depth, plan.context)
    at = min(speeds.at, key=lambda point: abs(point.depth - depth), default=None)
    return ModePlan(
        mode=mode,
        plan=plan,
        decode_tokens_per_s=at.decode_tokens_per_s if at else None,
        prefill_tokens_per_s=at.prefill_tokens_per_s if at else None,
        is_measured=measured is not None,
    )
