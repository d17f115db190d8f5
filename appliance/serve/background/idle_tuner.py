"""Measure in idle time, then load the best plan. `idle_policy` decides each step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import FatalError
from appliance.race import first_of
from appliance.serve.background.idle_policy import (
    SETTLE_S,
    Action,
    IdleState,
    decide,
    doubled,
    worth_after_s,
)
from appliance.serve.model.courtesy import Courtesy
from appliance.serve.model.engine_host import EngineHost, Upstream
from appliance.serve.model.tuning_state import TuningState
from appliance.supervisor import Crash
from appliance.system.lack import is_lack, tell

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for types only: it takes half a second to import

P = TypeVar("P")
LACK_S = 10.0  # between two tries if open files, memory or processes are lacking
AGAIN_S = 60.0  # between two tries while another container measures
STOP_S = 1.0  # measuring has to end within this: a request waits for it, and then for the load


async def _nothing_else() -> str:
    return ""


async def _never() -> str:
    await asyncio.Event().wait()
    return ""


class IdleTuner(Generic[P]):
    """Tunes one model whose engine serves. Reads `tuning.wanted_now` and writes `tuning.is_busy`.

    `measure(is_alone)` goes on from earlier measurements, which it keeps itself. It returns the best plan if nothing is
    left to measure, and None while another container measures: it is tried again after AGAIN_S, and in place of the
    engine only in the next idle period, since each try costs a load. A request cancels it; its engine must be gone
    within a second then, so start it with a grace of 0. A FatalError from it ends the tuning, and serving goes on.

    `measure_serving()` measures the plan that serves on its own engine, before anything is loaded; None: that is not
    done. An error of the engine ends it, and the plan is measured like all others.

    `why_no_room(plan)` says why memory holds no second engine with that plan, "" if it does; None stands for any plan
    that would be measured. `as_error` turns the crash of an engine into its error.

    `need_s()` is the time for one load and one depth, `gained()` the number of results that this sitting has kept.
    `what_else_works()` looks at the machine while our engine rests, and returns "" if it is quiet. `until_crowded()`
    returns when other programs take a large part of the CPUs. Once `gives_way` is set no further step begins; once
    `is_shared` is set, since another model is wanted or loaded, measuring ends too.
    """

    def __init__(
        self,
        *,
        host: EngineHost[P],
        traffic: Traffic,
        upstream: Upstream,
        report: Report,
        tuning: TuningState,
        measure: Callable[[bool], Awaitable[P | None]],
        measure_serving: Callable[[], Awaitable[None]] | None = None,
        why_no_room: Callable[[P | None], Awaitable[str]],
        as_error: Callable[[Crash], FatalError],
        idle_s: float,
        settle_s: float = SETTLE_S,
        need_s: Callable[[], float] = lambda: 0.0,
        gained: Callable[[], int] = lambda: 0,
        what_else_works: Callable[[], Awaitable[str]] = _nothing_else,
        until_crowded: Callable[[], Awaitable[str]] = _never,
        gives_way: asyncio.Event | None = None,
        is_shared: asyncio.Event | None = None,
    ) -> None:
        self._host = host
        self._traffic = traffic
        self._upstream = upstream
        self._report = report
        self._tuning = tuning
        self._measure_on = measure
        self._measure_serving_on = measure_serving
        self._has_baseline = measure_serving is None
        self._why_no_room = why_no_room
        self._as_error = as_error
        self._patient_idle_s = idle_s
        self._patient_settle_s = settle_s
        self._need_s = need_s
        self._gained = gained
        self._courtesy = Courtesy(what_else_works, idle_s)
        self._until_crowded = until_crowded
        self._gives_way = gives_way or asyncio.Event()
        self._is_shared = is_shared or asyncio.Event()
        self._wasted = 0  # sittings in a row that were interrupted before anything was kept
        self._others_until = 0.0  # as far as is known, another container measures until then
        self._told: set[str] = set()
        self._best: P | None = None
        self._is_given_up = False
        self.failure: FatalError | None = None  # the error that ended measuring
        self.why_given_up = ""
        # Idle periods are told apart by how many requests came before them.
        self._reloaded_in: int | None = None
        self._began = time.monotonic()

    @property
    def _is_hurried(self) -> bool:
        """True if a client waits for the result: only the end of a request is waited for, no idle period."""
        return self._tuning.wanted_now.is_set()

    @property
    def _idle_s(self) -> float:
        return 0.0 if self._is_hurried else self._patient_idle_s

    @property
    def _settle_s(self) -> float:
        return 0.0 if self._is_hurried else self._patient_settle_s

    async def run(self) -> bool:
        """Tune until the best plan serves or none could be found. Returns False if it ended before, to give way.

        Raises FatalError if the engine that was stopped for measuring does not come back.
        """
        steps: dict[Action, Callable[[], Awaitable[None]]] = {
            Action.LOOK: self._look,
            Action.MEASURE_SERVING: self._measure_serving,
            Action.MEASURE_BESIDE: self._measure_beside,
            Action.MEASURE_ALONE: self._measure_alone,
            Action.SWAP_BESIDE: self._swap_beside,
            Action.SWAP_ALONE: self._swap_alone,
        }
        self._began = time.monotonic()
        while True:
            # Asked before the traffic: nothing may be awaited between that look and the pause, or a request could
            # reach an engine that is about to be stopped.
            why = await self._why_no_room(self._best)
            step = decide(self._state(has_room=not why), idle_s=self._idle_s, settle_s=self._settle_s)
            if self._gives_way.is_set() or self._is_shared.is_set():
                return False
            if step.action is Action.END:
                return True
            self._tuning.is_busy = step.action not in (Action.WAIT, Action.LOOK)
            if step.action is not Action.WAIT:
                await steps[step.action]()
                continue
            if why:
                self._tell_no_room(why)
            self._tell_pauses()
            await self._until_traffic_changes(step.wait_s)

    async def _until_traffic_changes(self, timeout_s: float) -> None:
        if self._traffic.running:
            await first_of(self._traffic.until_idle(timeout_s), self._gives_way.wait(), self._is_shared.wait())
            return
        hurrying = () if self._is_hurried else (self._tuning.wanted_now.wait(),)
        changes = (self._traffic.until_arrival(), self._gives_way.wait(), self._is_shared.wait())
        await first_of(*changes, *hurrying, timeout_s=timeout_s)

    def _state(self, *, has_room: bool) -> IdleState:
        traffic = self._traffic
        return IdleState(
            is_ready=self._host.is_ready,
            running=traffic.running,
            idle_s=min(traffic.idle_s, time.monotonic() - self._began),
            has_room=has_room,
            is_measured=self._best is not None or self._is_given_up,
            has_better=not self._is_given_up and self._best is not None and self._host.is_another(self._best),
            was_reloaded_now=self._reloaded_in == traffic.arrivals,
            pauses=self._pauses,
            need_s=doubled(self._need_s(), self._wasted),
            rest_s=self._rest_s,
            has_baseline=self._has_baseline,
            is_calm=self._is_hurried or self._courtesy.is_calm(traffic),
        )

    @property
    def _rest_s(self) -> float:
        return max(self._others_until - time.monotonic(), 0.0 if self._is_hurried else self._courtesy.rest_s)

    @property
    def _pauses(self) -> tuple[float, ...]:
        """Earlier pauses, to predict this one. A client that waits is delayed only after a wasted sitting."""
        return () if self._is_hurried and not self._wasted else tuple(self._traffic.pauses)

    @property
    def _measures_anyway(self) -> bool:
        """True if other programs are ignored: a client waits for the result, or the machine was never quiet."""
        return self._is_hurried or self._courtesy.is_used_up

    async def _look(self) -> None:
        if words := await self._courtesy.look(self._traffic):
            self._tell_busy(words)

    def _crowded_out(self, words: str) -> None:
        self._courtesy.leave_alone()
        self._tell_busy(words)

    def _tell_busy(self, words: str) -> None:
        minutes = self._courtesy.most_s / 60
        self._tell("idle_busy", f"{words}: measuring waits for a quieter moment, {minutes:.0f} min at most")

    def _tell_pauses(self) -> None:
        need_s = doubled(self._need_s(), self._wasted)
        if self._is_given_up or self._best is not None or not worth_after_s(self._pauses, self._traffic.idle_s, need_s):
            return
        words = (
            f"requests follow each other too soon: measuring needs about {need_s:.1f} s and waits for a longer pause"
        )
        self._tell("idle_pauses", words)

    def _tell(self, event: str, words: str) -> None:
        """Log an event once."""
        if event not in self._told:
            self._told.add(event)
            self._report.info(event, words)

    @property
    def _worst_wait_s(self) -> float:
        return self._host.load_s + STOP_S

    def _tell_no_room(self, why: str) -> None:
        if "idle_no_room" in self._told:
            return
        self._told.add("idle_no_room")
        words = (
            f"{why}: measuring begins after {self._idle_s:g} s without a request; a request during it waits up "
            f"to {self._worst_wait_s:.1f} s, since the model has to be loaded again"
        )
        self._report.info("idle_no_room", words, worst_wait_s=round(self._worst_wait_s, 3), idle_s=self._idle_s)

    async def _measure_serving(self) -> None:
        """Measure on the engine that serves, until a request comes. What was measured is kept."""
        if self._measure_serving_on is None:
            return
        self._report.info("idle_measure_serving", "idle: measuring the plan that serves on its own engine")
        measuring, _, crowding = await first_of(
            self._measure_serving_on(),
            first_of(self._traffic.until_arrival(), self._is_shared.wait(), self._gives_way.wait()),
            _never() if self._measures_anyway else self._until_crowded(),
        )
        if measuring.cancelled():
            if not crowding.cancelled():
                self._crowded_out(crowding.result())
            return
        self._has_baseline = True
        try:
            measuring.result()
        except FatalError as error:
            words = f"the engine that serves could not be measured: {error.message}; its plan is loaded for it instead"
            self._report.warning("idle_failed_serving", words)

    async def _measure_beside(self) -> None:
        if not self._others_until:  # else it was said, and the other container may still measure
            self._report.info("idle_measure", "idle: measuring on a second engine while the first keeps serving")
        await self._measure(is_alone=False)

    async def _measure_alone(self) -> None:
        began = self._pause("the machine is being measured; the model is back about {} after a request")
        words = (
            f"idle for {self._traffic.idle_s:.0f} s: measuring in place of the engine that serves; a request now "
            f"waits up to {self._worst_wait_s:.1f} s"
        )
        self._report.info("idle_measure", words, worst_wait_s=round(self._worst_wait_s, 3))
        served = await self._host.stop_current()
        if self._traffic.arrivals == began:
            await self._measure(is_alone=True)
        await self._bring_back(served)

    async def _swap_alone(self) -> None:
        self._pause("another plan is being loaded, about {}")
        words = f"idle for {self._traffic.idle_s:.0f} s: loading the best measured plan"
        self._report.info("idle_change", words, worst_wait_s=round(self._worst_wait_s, 3))
        await self._bring_back(await self._host.stop_current())

    def _pause(self, words: str) -> int:
        """Let requests wait from here on. Returns the number of requests so far."""
        self._report.phase(Phase.HELD, words.format(f"{self._host.load_s:.0f} s"))
        self._reloaded_in = self._traffic.arrivals
        return self._traffic.arrivals

    async def _bring_back(self, served: P) -> None:
        """Load the best plan if it is known, else the one that served; that one too if the best does not load."""
        wanted = served if self._best is None else self._best
        about_s = self._host.load_s
        self._report.phase(Phase.HELD, f"the model is being loaded, about {about_s:.0f} s")
        crash = await self._host.load(wanted)
        if crash is not None and wanted is not served:
            self._give_up(f"the best plan did not load: {crash.describe()}; the plan before it serves on")
            crash = await self._host.load(served)
        if crash is not None:
            self._report.phase(Phase.FAILED, crash.describe())
            raise self._as_error(crash)
        self._report.phase(Phase.READY)
        words = f"the engine is back after {self._host.load_s:.1f} s"
        self._report.info("idle_back", words, seconds=round(self._host.load_s, 3), held=self._traffic.running)

    async def _swap_beside(self) -> None:
        if self._best is None:
            return
        self._report.info(
            "idle_change", "loading the best measured plan on a second engine while the first keeps serving"
        )
        try:
            crash = await self._host.swap(self._best, self._upstream)
        except FatalError as error:
            self._give_up(f"the best plan cannot be started: {error.message}; the plan before it serves on")
            return
        if crash is not None:
            self._give_up(f"the best plan did not load: {crash.describe()}; the plan before it serves on")
            return
        self._report.info("idle_changed", "the best plan serves, and the earlier engine is gone")

    async def _measure(self, *, is_alone: bool) -> None:
        """Measure until nothing is left, a request comes, or other programs crowd the machine."""
        arrived_at = 0.0
        crowded = _never if self._measures_anyway else self._until_crowded

        async def arrival() -> None:
            nonlocal arrived_at
            await first_of(self._traffic.until_arrival(), self._is_shared.wait())
            arrived_at = time.monotonic()

        measuring, arriving, crowding = await first_of(self._measure_on(is_alone), arrival(), crowded())
        if lacking := next((each for each in (measuring, crowding) if is_lack(_error_of(each))), None):
            tell("measuring", lacking.exception())
            await first_of(self._traffic.until_arrival(), timeout_s=LACK_S)
            return
        if measuring.cancelled() and arriving.cancelled():
            self._crowded_out(crowding.result())
            self._reloaded_in = None  # else the next try would wait for a request, which may not come for days
            return
        is_wasted = measuring.cancelled() and not self._gained()
        self._wasted = self._wasted + 1 if is_wasted else 0
        if measuring.cancelled():
            seconds = time.monotonic() - arrived_at
            words = f"a request came: measuring stopped within {seconds:.2f} s and goes on in the next pause"
            self._report.info("idle_stopped", words, seconds=round(seconds, 3))
            return
        try:
            self._best = measuring.result()
        except FatalError as error:
            self.failure = error
            self._give_up(f"measuring failed: {error.message}; the prediction serves on")
            return
        if self._best is None:
            self._others_until = time.monotonic() + AGAIN_S
        # The plan that serves gets the measured figures: documents would show the prediction otherwise.
        elif not self._host.is_another(self._best):
            self._host.recognize(self._best)

    def _give_up(self, words: str) -> None:
        self._is_given_up = True
        self.why_given_up = words
        self._best = None
        self._report.warning("idle_failed", words)


def _error_of(ended: asyncio.Future[Any]) -> BaseException | None:
    return None if ended.cancelled() else ended.exception()
