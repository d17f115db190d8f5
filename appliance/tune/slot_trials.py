"""Choice of the number of slots for several concurrent users: each candidate is measured and the best is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.console.report import Report
from appliance.errors import EngineError
from appliance.plan import Plan
from appliance.tune.checkpoint import PartialResults, SlotsTrial
from appliance.tune.figures.slots import Concurrency, choose, counts, with_slots
from appliance.tune.figures.workload import Mix, Workload, scaled
from appliance.tune.trials.concurrency import measure_slots
from appliance.tune.trials.engine import Bench


class SlotTrials:
    """Trials of numbers of slots for one plan. `left_s` returns how long a trial may take now."""

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        *,
        users: int,
        mix: Mix,
        results: PartialResults,
        report: Report,
        left_s: Callable[[], float],
    ) -> None:
        self._plan, self._bench, self._users = plan, bench, users
        self._workload = scaled(max(mix.parts, key=lambda part: part[1])[0], plan.context)
        self._key = plan.key + (f", {plan.speculation.describe()}" if plan.speculation else "")
        self._results, self._report, self._left_s = results, report, left_s
        self._seen: list[Concurrency] = []

    async def choose(self) -> tuple[Plan, tuple[str, ...]]:
        """Return the plan with the best number of slots, and notes. Unchanged if nothing was measured."""
        wanted = counts(self._plan, self._users)
        if len(wanted) == 1:  # nothing to compare with
            return self._plan, ()
        unmeasured = await self._measure_all(wanted)
        notes = [unmeasured] if unmeasured else []
        if unmeasured:
            self._report.warning("slots_not_measured", unmeasured)
        if not self._seen:
            return self._plan, tuple(notes)
        chosen = choose(self._seen)
        self._report.info("slots", f"{chosen.slots} slots for {self._users} users: {chosen.why}")
        return with_slots(self._plan, chosen), (f"{self._users} users: {chosen.why}", *notes)

    async def _measure_all(self, wanted: tuple[int, ...]) -> str:
        """Measure all candidates. Returns which one was not measured and why; empty if all were tried."""
        for count in wanted:
            why_not = await self._measure(count)
            if why_not:  # the rest have fewer slots and would take even longer
                return f"{count} slots for {self._users} users were not measured: {why_not}"
        return ""

    async def _measure(self, count: int) -> str:
        """Measure one number of slots. Returns why there was no time, else "". If the engine fails, the failure is kept
        and "" is returned, so that the next candidate is measured."""
        kept = self._results.slots_of(self._key, count, self._job)
        if kept is not None:
            self._seen += [kept.found] if kept.found else []
            return ""
        left_s = self._left_s()
        if left_s <= 0 or (self._seen and left_s < self._seen[-1].worst_s + self._seen[-1].load_s):
            return "the time was up"
        try:
            found = await measure_slots(
                replace(self._plan, parallel=count),
                self._bench,
                users=self._users,
                workload=self._job or self._workload,
                left_s=left_s,
                on_step=self._results.on_step,
                is_exact=bool(self._seen),  # only the same job can be compared
            )
        except EngineError as error:
            self._report.warning("slots_failed", f"{count} slots for {self._users} users: {error.message}")
            self._results.on_slots(SlotsTrial(key=self._key, slots=count, error=error.message))
            return ""
        if isinstance(found, str):
            return found
        self._results.on_slots(SlotsTrial(key=self._key, slots=count, found=found))
        self._seen.append(found)
        return ""

    @property
    def _job(self) -> Workload | None:
        """Workload of the first number of slots that was measured; the others get the same. None before."""
        return self._seen[0].workload if self._seen else None
