"""Compares a quantized KV cache with an exact one in idle time, and takes it out of service if it changes answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.plan import Checks, Plan
from appliance.serve.model.served_model import ServedModel

if TYPE_CHECKING:
    from appliance.command import Command
    from appliance.plan import CacheCheck
    from appliance.serve.background.checks.comparison import RunEngine

DOING = "KV caches were compared"


class CacheSubject:
    """Writes the checks of the profile's KV cache types. It takes two loads for each type."""

    name = "cache"
    words = "the KV cache"

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.gained = 0  # prompts that were answered

    def is_open(self, plan: Plan) -> bool:
        return self._check(plan).verdict == "open" and self._served.space_of_profile.exact(plan) is not None

    def compared_with(self, plan: Plan) -> tuple[Plan, ...]:
        is_loaded = self.is_open(plan) and not self._check(plan).is_answered
        exact = self._served.space_of_profile.exact(plan) if is_loaded else None
        return () if exact is None else (exact,)

    def describe(self, plan: Plan) -> str:
        return self._check(plan).describe()

    def _check(self, plan: Plan) -> CacheCheck:
        profile = self._served.profile
        return (profile.checks if profile else Checks()).cache(plan.kv_type)

    async def compare(self, plan: Plan, run: RunEngine) -> None:
        from appliance.tune.kv_compared import answer_exactly, compare_likely, judged  # here: no start needs it

        engine, exact = self._served.start.engine, self._served.space_of_profile.exact(plan)
        if exact is None:
            return
        context = min(plan.context, exact.context)

        async def answer(command: Command) -> None:
            async with engine.likely_client(command, doing=DOING) as client:
                await answer_exactly(client, self._check(plan), context, self._keep)

        async def compare(command: Command) -> None:
            async with engine.likely_client(command, doing=DOING) as client:
                await compare_likely(client, self._check(plan), self._keep)

        if not self._check(plan).is_answered:
            await run(exact, answer, doing=DOING)
            self._keep(replace(self._check(plan), is_answered=True))
        await run(replace(plan, speculation=None), compare, doing=DOING)
        found = judged(self._check(plan))
        self._keep(found)
        told = self._served.report.info if found.verdict == "harmless" else self._served.report.warning
        told("cache_compared", f"KV cache: {found.describe()}", kv_type=found.kv_type, verdict=found.verdict)

    def _keep(self, check: CacheCheck) -> None:
        profile = self._served.profile
        if profile is not None:
            self.gained += 1
            self._served.keep_checks(profile.checks.with_cache(check))
