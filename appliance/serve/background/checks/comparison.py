"""Comparison of a plan with another one, on engines of their own, and the plan that the checks of a profile allow.

The engines are started as those of measuring are (`IdleTuner`): beside the one that serves, or in its place if memory
holds only one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from appliance.errors import EngineError
from appliance.plan import Plan
from appliance.profile import best_of
from appliance.serve.background.checks.context_check import is_wanted
from appliance.serve.model.served_model import ServedModel
from appliance.tune.trials.engine import Bench, in_time, running, unless_stalled

if TYPE_CHECKING:
    from appliance.command import Command

LIMIT_S = 1800.0  # in one start, loads and interrupted work included: the next start continues


class Subject(Protocol):
    """What is compared."""

    name: str  # of events in the log
    words: str  # of messages
    gained: int  # results so far

    def is_open(self, plan: Plan) -> bool:
        """True if this plan has what is compared, and no verdict on it."""

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

    @property
    def is_due(self) -> bool:
        """True if the plan that serves was not compared yet, or if it is not the one that the checks allow."""
        plan = self._served.host.plan
        if plan is None or not is_wanted(self._served):
            return False
        return self._is_open(plan) or self._served.host.is_another(allowed(self._served, plan))

    @property
    def gained(self) -> int:
        return self._subject.gained

    def _is_open(self, plan: Plan) -> bool:
        return self._left_s > 0 and self._subject.is_open(plan)

    async def measure(self, _is_alone: bool) -> Plan | None:
        """Compare, and return the plan to serve. None while another container measures for the same key."""
        plan = self._served.host.plan
        if plan is None:
            return None
        if self._is_open(plan):
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
        finally:
            self._left_s -= time.monotonic() - began
        if self._left_s <= 0 and subject.is_open(plan):
            report.info(f"{subject.name}_open", f"{subject.describe(plan)}; the next start goes on")

    async def _run(self, plan: Plan, work: Callable[[Command], Awaitable[None]], *, doing: str) -> None:
        """See `RunEngine`. The engine is killed without a grace if this is cancelled."""
        start = self._served.start
        bench = Bench(engine=start.engine, install=start.install, socket_path=self._served.trial_socket)
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
