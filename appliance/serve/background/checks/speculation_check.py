"""Compares speculative decoding with an engine without it in idle time, and takes it out of service if it does harm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from appliance.plan import KINDS, Plan, SpeculationCheck
from appliance.serve.model.served_model import ServedModel

if TYPE_CHECKING:
    from appliance.command import Command
    from appliance.engines.engine import Client
    from appliance.serve.background.checks.comparison import RunEngine

DOING = "speculative decoding was compared"
Documents = Literal["plain_documents", "documents"]


class SpeculationSubject:
    """Writes the check of the profile's speculative decoding. It takes three loads."""

    name = "speculation"
    words = "speculative decoding"

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.gained = 0  # prompts and documents that were answered

    def is_open(self, plan: Plan) -> bool:
        return plan.speculation is not None and self._check(plan).verdict == "open"

    def compared_with(self, plan: Plan) -> tuple[Plan, ...]:
        return ()  # without speculative decoding an engine takes less

    def describe(self, plan: Plan) -> str:
        return self._check(plan).describe()

    def _check(self, plan: Plan) -> SpeculationCheck:
        """Return the check of the plan's kind so far."""
        from appliance.tune.harmless import WINDOW  # here: no start needs it

        profile = self._served.profile
        of = plan.speculation.describe() if plan.speculation else ""
        found = profile.checks.speculation if profile else None
        is_same = found is not None and found.of == of and (found.verdict != "open" or found.kv_type == plan.kv_type)
        return found if found and is_same else SpeculationCheck(of=of, window=WINDOW, kv_type=plan.kv_type)

    async def compare(self, plan: Plan, run: RunEngine) -> None:
        """Make the three runs, each as far as an earlier sitting left it, and judge."""
        from appliance.abilities.soak import DOCUMENTS  # here, both: no start needs them
        from appliance.tune.harmless import answer_plainly, continue_windows

        base = replace(plan, speculation=None)

        async def answer(client: Client) -> None:
            await answer_plainly(client, self._check(plan), plan.context, self._keep)

        async def go_on(client: Client, *, speculates: bool) -> None:
            await continue_windows(client, self._check(plan), self._keep, speculates=speculates)

        if not self._check(plan).is_answered:
            await run(base, self._work(answer), doing=DOING)
            self._keep(replace(self._check(plan), is_answered=True))
        if len(self._check(plan).plain_documents) < DOCUMENTS:
            again = self._work(lambda client: go_on(client, speculates=False), asks=(plan, "plain_documents"))
            await run(base, again, doing=DOING)
        if len(self._check(plan).documents) < DOCUMENTS:
            with_it = self._work(lambda client: go_on(client, speculates=True), asks=(plan, "documents"))
            await run(plan, with_it, doing=DOING)
        found = self._check(plan).judged(is_asked_for=self._served.settings.speculation in KINDS)
        self._keep(found)
        told = self._served.report.info if found.verdict == "harmless" else self._served.report.warning
        told("speculation_compared", found.describe(), verdict=found.verdict)

    def _work(
        self, work: Callable[[Client], Awaitable[None]], asks: tuple[Plan, Documents] | None = None
    ) -> Callable[[Command], Awaitable[None]]:
        """Return the work of one engine: that of a client, then documents for a field of the plan's check."""

        async def both(command: Command) -> None:
            async with self._served.start.engine.client(command, doing=DOING) as client:
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
                await ask_documents(engine, serving.alias, len(getattr(self._check(serving), field)), add)

        return both

    def _keep(self, check: SpeculationCheck) -> None:
        profile = self._served.profile
        if profile is not None:
            self.gained += 1
            self._served.keep_checks(replace(profile.checks, speculation=check))
