"""Comparison of a plan with another one, on engines of their own, and the plan that the checks of a profile allow.

The engines are started as those of measuring are (`IdleTuner`): beside the one that serves, or in its place if memory
holds only one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from appliance.errors import EngineError, VolumeError
from appliance.plan import Plan
from appliance.profile import best_of
from appliance.serve.background.checks.context_check import is_wanted
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import answered
from appliance.tune.checkpoint import PartialResults
from appliance.tune.trials.engine import Bench, in_time, running, unless_stalled

if TYPE_CHECKING:
    from appliance.command import Command

LIMIT_S = 1800.0  # in one start, loads and interrupted work included: the next start continues


class _NoLoadsLeftError(Exception):
    """The engine loads of the day are used up."""


class Subject(Protocol):
    """What is compared."""

    name: str  # of events in the log
    words: str  # of messages
    gained: int  # results so far

    def is_open(self, plan: Plan) -> bool:
        """True if this plan has what is compared, and no verdict on it."""

    def compared_with(self, plan: Plan) -> tuple[Plan, ...]:
        """Return the plans that this one is compared with, unless they take less memory."""

    async def compare(self, plan: Plan, run: RunEngine) -> None:
        """Compare and judge, from where an earlier sitting left it. Raises the engine's error if it fails."""

    def describe(self, plan: Plan) -> str: ...


class RunEngine(Protocol):
    async def __call__(self, plan: Plan, work: Callable[[Command], Awaitable[None]], *, doing: str) -> None:
        """Start an engine with this plan, do the work, and end the engine."""


class Comparison:
    """Comparison of one subject for one served model, over all idle periods of a start."""

    def __init__(self, served: ServedModel, subject: Subject, *, limit_s: float = LIMIT_S) -> None:
        self._served = served
        self._subject = subject
        self._left_s = limit_s
        self._is_told = False
        self.lacks_loads = False  # True if it goes on another day, since the engine loads of this one are used up

    async def is_due(self) -> bool:
        """True if the plan that serves was not compared yet and an engine may be loaded for it today, or if it is not
        the one that the checks allow."""
        plan = self._served.host.plan
        if plan is None or not is_wanted(self._served):
            return False
        return self._served.host.is_another(allowed(self._served, plan)) or await self._may_compare(plan)

    def loads(self) -> tuple[Plan, ...]:
        """Return the plans that are loaded to compare the plan that serves; () if none serves."""
        plan = self._served.host.plan
        return () if plan is None else (plan, *self._subject.compared_with(plan))

    @property
    def gained(self) -> int:
        return self._subject.gained

    async def _may_compare(self, plan: Plan) -> bool:
        self.lacks_loads = False
        if self._left_s <= 0 or not self._subject.is_open(plan):
            return False
        try:
            results = await self._results()
        except VolumeError:  # it does not answer, which the log has said: nothing is compared until it does
            return False
        self.lacks_loads = not self._may_load(results)
        if self.lacks_loads and not self._is_told:
            self._is_told = True
            used = f"all {self._served.settings.loads_a_day} engine loads of this day (UTC) are used"
            words = f"{self._subject.describe(plan)}; {used}, and the next day goes on"
            self._served.report.info(f"{self._subject.name}_open", words)
        return not self.lacks_loads

    async def _results(self) -> PartialResults:
        """Return the results of unfinished tunings, which count the engine loads of the day. Raises VolumeError if the
        volume does not answer."""
        from appliance.serve.engine.measure import PartialOf  # here: a start from a profile may never need it

        served = self._served
        results = PartialResults(PartialOf(served=served, key=served.key), served.report, shows_phase=False)
        await answered(results.load, served.store.folder)
        return results

    def _may_load(self, results: PartialResults) -> bool:
        return results.loads_today < self._served.settings.loads_a_day

    async def measure(self, _is_alone: bool) -> Plan | None:
        """Compare, and return the plan to serve. None while another container measures for the same key."""
        plan = self._served.host.plan
        if plan is None:
            return None
        if await self._may_compare(plan):
            async with self._served.measuring() as is_ours:
                if not is_ours:
                    return None
                await self._compare(plan)
        return allowed(self._served, plan)

    async def _compare(self, plan: Plan) -> None:
        report, subject, began = self._served.report, self._subject, time.monotonic()
        try:
            await in_time(self._left_s, subject.compare(plan, self._run))
        except EngineError as error:
            report.warning(f"{subject.name}_not_compared", f"{subject.words} was not compared: {error.message}")
            self._left_s = 0.0
        except _NoLoadsLeftError:
            pass
        finally:
            self._left_s -= time.monotonic() - began
        if self._left_s <= 0 and subject.is_open(plan):
            report.info(f"{subject.name}_open", f"{subject.describe(plan)}; the next start goes on")

    async def _run(self, plan: Plan, work: Callable[[Command], Awaitable[None]], *, doing: str) -> None:
        """See `RunEngine`. The engine is killed without a grace if this is cancelled."""
        start, results = self._served.start, await self._results()
        if not self._may_load(results):
            raise _NoLoadsLeftError
        bench = Bench(
            engine=start.engine,
            install=start.install,
            socket_path=self._served.trial_socket,
            on_load=results.on_load,
        )
        command = bench.start(plan)

        async def working() -> None:
            await work(command)

        async with running(bench.engine, command) as supervisor:
            await unless_stalled(working(), supervisor, command.stall_timeout_s, doing=doing)


def allowed(served: ServedModel, plan: Plan) -> Plan:
    """Return the plan to serve: this one, or the profile's best if a check refused it or its context failed."""
    profile = served.profile
    if profile is None:
        return plan
    checks = profile.checks
    speculation = plan.speculation
    speculates_wrongly = speculation is not None and checks.refuses_speculation(speculation.describe())
    is_refused = speculates_wrongly or checks.refuses(plan.kv_type)
    if not is_refused and not checks.has_failed(plan.context, plan.kv_type):
        return plan
    best = best_of(profile, served.settings.mode, served.space_of_profile)
    return best if is_refused or not checks.has_failed(best.context, best.kv_type) else plan
