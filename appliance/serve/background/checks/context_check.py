"""Checks on the serving engine, in idle time, whether the profile holds: needles in its context, and a soak."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.abilities import Result
from appliance.errors import EngineNotReadyError
from appliance.plan import SMALLEST_CONTEXT, SoakCount
from appliance.serve.background.checks.ability_check import CHAT
from appliance.serve.background.checks.idle_turns import AFTER_S, IdleTurns

if TYPE_CHECKING:
    from appliance.abilities.judge import Verdict
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.plan import NeedleRow, Plan
    from appliance.serve.model.served_model import ServedModel

NEEDLES_LIMIT_S = 3600.0  # in one start, interrupted rows included
LEAST_CONTEXT = 512
SOAK_TURN_S = 60.0
ERRORS_KEPT = 5


def is_wanted(served: ServedModel) -> bool:
    """True if the settings allow checks, and a profile of a model that makes text is there to be checked."""
    settings = served.settings
    return settings.check_profile and settings.tune != "off" and settings.nodes == 1 and served.profile is not None


class ContextCheck:
    """Writes the checks of `ServedModel.profile`. A request ends the row or the turn that runs."""

    def __init__(self, served: ServedModel, *, alone: asyncio.Lock) -> None:
        self._served = served
        self._needles = IdleTurns(served, alone=alone, after_s=AFTER_S, limit_s=NEEDLES_LIMIT_S)
        done_s = served.profile.checks.soak.seconds if served.profile and served.profile.checks.soak else 0.0
        self._soak = IdleTurns(served, alone=alone, after_s=AFTER_S, limit_s=served.settings.soak_s - done_s)

    async def find_needles(self, traffic: Traffic) -> None:
        """Look for the needles in the context that serves, and in smaller ones while one is lost, unless the user gave
        the context. Returns when one holds, when none is left, or when the time is used up."""
        served = self._served
        while is_wanted(served) and self._needles.left_s > 0:
            plan, profile = served.host.plan, served.profile
            if plan is None or profile is None or plan.context < LEAST_CONTEXT:
                return
            # On the engine that serves: a prompt of that length is all that a smaller context has.
            least = plan.context if served.settings.ctx_size else SMALLEST_CONTEXT
            context = profile.checks.next_for_needles(plan.context, least, plan.kv_type)
            if context is None:
                return
            await self._needles.until_idle(traffic)
            if served.host.plan is not plan:
                continue
            found: list[NeedleRow] = []
            try:
                await self._needles.take(self._look(plan, context, found), traffic)
            except EngineNotReadyError as error:
                served.report.warning("needles", f"needles in {context:,} tokens: {error.message}")
            if found:
                self._keep([replace(row, kv_type=plan.kv_type) for row in found])

    async def _look(self, plan: Plan, context: int, found: list[NeedleRow]) -> None:
        from appliance.tune.trials.needles import find_needles  # here: no start needs it

        served = self._served
        socket_path = served.host.socket_path
        if socket_path is None:
            return
        known = served.profile.checks.needles_in(context, plan.kv_type) if served.profile else ()
        async with served.start.engine.client(served.command(plan, socket_path), doing="looking for needles") as client:
            await find_needles(client, context, known=known, on_row=found.append)

    def _keep(self, found: list[NeedleRow]) -> None:
        served = self._served
        checks = served.profile.checks if served.profile else None
        if checks is None:
            return
        for row in found:
            checks = checks.with_needle(row)
            told = served.report.warning if row.verdict == "failed" else served.report.info
            told("needle", f"needle {row.verdict}: {row.words}", context=row.context, share=row.share)
        served.keep_checks(checks)

    async def soak(self, traffic: Traffic) -> None:
        """Repeat requests with tools and documents, several at a time, until the time of the soak is used up."""
        served = self._served
        if not any(route.path == CHAT for route in served.start.engine.routes):
            return
        while is_wanted(served) and self._soak.left_s > 0:
            await self._soak.until_idle(traffic)
            plan, profile = served.host.plan, served.profile
            if plan is None or profile is None or plan.context < LEAST_CONTEXT:
                return
            count = _Count(profile.checks.soak or SoakCount())
            most_s = min(SOAK_TURN_S, self._soak.left_s)
            try:
                await self._soak.take(self._ask(plan, count), traffic, most_s=most_s)
            except EngineNotReadyError:
                count.add("engine", "it ended while it answered")
            served.keep_checks(replace(profile.checks, soak=count.after(self._soak.turn_s)))
            if self._soak.left_s <= 0 and served.profile and (soaked := served.profile.checks.soak):
                told = served.report.warning if soaked.failed else served.report.info
                told("soak", f"soak with tools: {soaked.describe()}", failed=soaked.failed, answers=soaked.answers)

    async def _ask(self, plan: Plan, count: _Count) -> None:
        from appliance.abilities.soak import soak, soak_rows  # here, both: no start needs an HTTP client
        from appliance.engines.json_socket import JsonSocket

        served = self._served
        socket_path = served.host.socket_path
        if socket_path is None:
            return
        command = served.command(plan, socket_path)
        rows = soak_rows(served.abilities.by_name() if served.abilities else {})
        async with JsonSocket(command, doing="a soak", keeps_connections=False) as engine:
            await soak(engine, rows, plan.alias, plan.parallel, count.add_verdict)


class _Count:
    """The count of a turn, added to that of the turns before."""

    def __init__(self, before: SoakCount) -> None:
        self._before = before
        self._answers = self._failed = 0
        self._errors = list(before.errors)

    def add_verdict(self, name: str, verdict: Verdict) -> None:
        self._answers += 1
        if verdict.result is Result.FAILED:
            self.add(name, verdict.reason)

    def add(self, name: str, error: str) -> None:
        self._failed += 1
        words = f"{name}: {error}"
        if words not in self._errors and len(self._errors) < ERRORS_KEPT:
            self._errors.append(words)

    def after(self, seconds: float) -> SoakCount:
        before = self._before
        return SoakCount(
            seconds=before.seconds + seconds,
            answers=before.answers + self._answers,
            failed=before.failed + self._failed,
            errors=tuple(self._errors),
        )
