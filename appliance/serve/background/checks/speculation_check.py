"""Checks in idle time whether speculative decoding is harmless, and takes it out of service if it is not.

The engines of the comparison are started as those of measuring are (`IdleTuner`): beside the one that serves, or in its
place if memory holds only one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from appliance.errors import EngineError
from appliance.plan import KINDS, Plan, SpeculationCheck
from appliance.profile import best_of
from appliance.serve.background.checks.context_check import is_wanted
from appliance.serve.model.served_model import ServedModel
from appliance.tune.trials.engine import Bench, in_time, running, unless_stalled

if TYPE_CHECKING:
    from appliance.engines.engine import Client

LIMIT_S = 1800.0  # in one start, loads and interrupted work included: the next start continues
DOING = "speculative decoding was compared"
Documents = Literal["plain_documents", "documents"]


class SpeculationComparison:
    """The comparison for one served model, over all idle periods of a start. Writes the checks of its profile."""

    def __init__(self, served: ServedModel, *, limit_s: float = LIMIT_S) -> None:
        self._served = served
        self._left_s = limit_s
        self._is_given_up = False
        self.gained = 0  # prompts and documents that were answered

    @property
    def is_due(self) -> bool:
        """True if the plan that serves was not compared yet, or if it is not the one that the checks allow."""
        plan = self._served.host.plan
        if plan is None or self._is_given_up or not is_wanted(self._served):
            return False
        return self._is_open(plan) or self._served.host.is_another(self._allowed(plan))

    def give_up(self) -> None:
        """Leave it to the next start."""
        self._is_given_up = True

    def _is_open(self, plan: Plan) -> bool:
        return plan.speculation is not None and self._check(plan).verdict == "open" and self._left_s > 0

    def _check(self, plan: Plan) -> SpeculationCheck:
        """Return the check of the plan's kind so far."""
        from appliance.tune.harmless import WINDOW  # here: no start needs it

        profile = self._served.profile
        of = plan.speculation.describe() if plan.speculation else ""
        found = profile.checks.speculation if profile else None
        return found if found and found.of == of else SpeculationCheck(of=of, window=WINDOW)

    def _allowed(self, plan: Plan) -> Plan:
        """Return the plan to serve: this one, or the profile's best if this one was refused or its context failed."""
        served = self._served
        profile = served.profile
        if profile is None:
            return plan
        is_refused = plan.speculation is not None and self._check(plan).verdict == "refused"
        if not is_refused and not profile.checks.has_failed(plan.context):
            return plan
        best = best_of(profile, served.settings.mode, served.space_of_profile)
        return best if is_refused or not profile.checks.has_failed(best.context) else plan

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
        return self._allowed(plan)

    async def _compare(self, plan: Plan) -> None:
        report, began = self._served.report, time.monotonic()
        try:
            await in_time(self._left_s, self._runs(plan))
        except EngineError as error:
            report.warning("speculation_not_compared", f"speculative decoding was not compared: {error.message}")
            self._left_s = 0.0
        finally:
            self._left_s -= time.monotonic() - began
        check = self._check(plan)
        if check.verdict == "open" and self._left_s <= 0:
            report.info("speculation_open", f"{check.describe()}; the next start goes on")

    async def _runs(self, plan: Plan) -> None:
        """Make the three runs, each as far as an earlier sitting left it, and judge."""
        from appliance.abilities.soak import DOCUMENTS  # here, both: no start needs them
        from appliance.tune.harmless import answer_plainly, continue_windows

        base = replace(plan, speculation=None)
        if not self._check(plan).is_answered:
            await self._run(base, lambda client: answer_plainly(client, self._check(plan), plan.context, self._keep))
            self._keep(replace(self._check(plan), is_answered=True))
        if len(self._check(plan).plain_documents) < DOCUMENTS:
            again = lambda client: continue_windows(client, self._check(plan), self._keep, speculates=False)  # noqa: E731
            await self._run(base, again, asks=(plan, "plain_documents"))
        if len(self._check(plan).documents) < DOCUMENTS:
            with_it = lambda client: continue_windows(client, self._check(plan), self._keep, speculates=True)  # noqa: E731
            await self._run(plan, with_it, asks=(plan, "documents"))
        found = self._check(plan).judged(is_asked_for=self._served.settings.speculation in KINDS)
        self._keep(found)
        told = self._served.report.info if found.verdict == "harmless" else self._served.report.warning
        told("speculation_compared", found.describe(), verdict=found.verdict)

    async def _run(
        self, plan: Plan, work: Callable[[Client], Awaitable[None]], asks: tuple[Plan, Documents] | None = None
    ) -> None:
        """Start an engine, do the work, then ask for documents. It is killed without a grace if this is cancelled."""
        start = self._served.start
        bench = Bench(engine=start.engine, install=start.install, socket_path=self._served.trial_socket)
        command = bench.start(plan)

        async def both() -> None:
            async with bench.engine.client(command, doing=DOING) as client:
                await work(client)
            if asks is None:
                return
            from appliance.abilities.soak import ask_documents  # here, both: no start needs an HTTP client
            from appliance.engines.json_socket import JsonSocket

            serving, field = asks

            def add(is_valid: bool) -> None:
                check = self._check(serving)
                self._keep(replace(check, **{field: (*getattr(check, field), is_valid)}))  # type: ignore[arg-type]

            async with JsonSocket(command, doing=DOING, keeps_connections=False) as engine:
                await ask_documents(engine, plan.alias, len(getattr(self._check(serving), field)), add)

        async with running(bench.engine, command) as supervisor:
            await unless_stalled(both(), supervisor, command.stall_timeout_s, doing=DOING)

    def _keep(self, check: SpeculationCheck) -> None:
        profile = self._served.profile
        if profile is not None:
            self.gained += 1
            self._served.keep_checks(replace(profile.checks, speculation=check))
