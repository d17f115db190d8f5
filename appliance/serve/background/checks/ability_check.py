"""Checks the abilities of a served model in idle time: the rows of the suite that its volume has no result of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.abilities import Abilities, Ability, Result
from appliance.abilities.kept import KeptAbilities
from appliance.errors import EngineNotReadyError, VolumeError
from appliance.serve.background.checks.idle_turns import AFTER_S, IdleTurns
from appliance.system.detached import detached

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.abilities.rows import Row
    from appliance.abilities.suite import Offered
    from appliance.gateway.clients.traffic import Traffic  # for the name only: it takes half a second to import
    from appliance.plan import Plan
    from appliance.serve.model.served_model import ServedModel

CHAT = "/v1/chat/completions"
LIMIT_S = 600.0  # of all rows in one start, interrupted ones included: the next start continues
LEAST_CONTEXT = 2048  # prompt and answer of the longest row, with a token for two characters


def is_wanted(served: ServedModel) -> bool:
    """True if the settings allow checks, and the model answers chats."""
    settings = served.settings
    may_check = settings.check_abilities and settings.tune != "off" and not served.inputs.model.is_embedding_model
    return may_check and any(route.path == CHAT for route in served.start.engine.routes)


class AbilityCheck:
    """Writes `ServedModel.abilities`. A request ends the row that runs, which is asked again in a later pause."""

    def __init__(
        self, served: ServedModel, *, alone: asyncio.Lock, after_s: float = AFTER_S, limit_s: float = LIMIT_S
    ) -> None:
        self._served = served
        self._turns = IdleTurns(served, alone=alone, after_s=after_s, limit_s=limit_s)
        self._is_told = False

    @property
    def _kept(self) -> KeptAbilities:
        served = self._served
        return KeptAbilities(
            served.settings.profiles_dir, served.key.id, lambda words: served.report.warning("abilities", words)
        )

    async def run(self, traffic: Traffic) -> None:
        """Check the rows that are left; returns when all are checked, or when the time for them is used up."""
        served = self._served
        if not is_wanted(served):
            return
        from appliance.abilities.rows import ROWS  # here: no start needs it

        known = set((await self.load()).by_name())
        left = [row for row in ROWS if row.name not in known]
        if not left:
            return
        while left and self._turns.left_s > 0:
            await self._turns.until_idle(traffic)
            plan, socket_path = served.host.plan, served.host.socket_path
            if plan is None or socket_path is None or plan.context < LEAST_CONTEXT:
                return
            ability = await self._unless_asked(left[0], plan, socket_path, traffic)
            if ability is None:
                continue
            left.pop(0)
            await self._keep(ability)
        self._tell(len(left))

    async def load(self) -> Abilities:
        """Return the results so far, from the volume if there are none in memory."""
        served = self._served
        if served.abilities is None or served.abilities.of != served.start.abilities_digest:
            served.abilities = await detached(self._kept.load, served.start.abilities_digest)
            self._is_told = False
        return served.abilities

    async def _unless_asked(self, row: Row, plan: Plan, socket_path: Path, traffic: Traffic) -> Ability | None:
        """Check one row. None if a request came, another model is loaded, or the engine was taken away meanwhile."""
        try:
            return await self._turns.take(self._check(row, plan, socket_path), traffic)
        except EngineNotReadyError:
            reason, then = "the engine ended while it answered", "leave such requests out: they end every answer"
            return Ability(name=row.name, whole=Result.FAILED, streamed=Result.FAILED, reason=reason, then=then)

    async def _check(self, row: Row, plan: Plan, socket_path: Path) -> Ability:
        from appliance.abilities.suite import check  # here, both: no start needs an HTTP client
        from appliance.engines.json_socket import JsonSocket

        command = self._served.command(plan, socket_path)
        async with JsonSocket(command, doing="checking abilities", keeps_connections=False) as engine:
            return await check(engine, row, plan.alias, self._offered(plan))

    def _offered(self, plan: Plan) -> Offered:
        from appliance.abilities.suite import Offered  # here: no start needs it

        model, settings = self._served.inputs.model, self._served.settings
        no_tools = "the chat template has no tools" if not model.calls_tools else ""
        no_reasoning = "the chat template has no reasoning" if not model.reasons else ""
        if settings.reasoning_format in ("none", "deepseek-legacy"):
            no_reasoning = f"reasoning_format '{settings.reasoning_format}' leaves reasoning in the text"
        if settings.thinking == "off":
            no_reasoning = "thinking 'off' turns reasoning off"
        return Offered(
            why_no_tools=no_tools or ("" if plan.launch.calls_tools else "the engine has no parser for its tool calls"),
            why_no_reasoning=no_reasoning
            or ("" if plan.launch.splits_reasoning else "the engine has no parser for its reasoning"),
        )

    async def _keep(self, ability: Ability) -> None:
        found = await self.load()
        self._served.abilities = found = replace(found, rows=(*found.rows, ability))
        if ability.result is Result.FAILED:
            self._served.report.warning("ability_failed", ability.describe(), ability=ability.name)
        try:
            await detached(self._kept.save, found)
        except VolumeError as error:  # serving goes on, and the next start checks again
            if not self._is_told:
                self._served.report.warning("abilities", error.message)
            self._is_told = True

    def _tell(self, left: int) -> None:
        found = self._served.abilities
        if found is not None and found.rows:
            later = f"; {left} are left for the next start" if left else ""
            self._served.report.info("abilities", f"{found.describe()}{later}", abilities=found.by_name())
