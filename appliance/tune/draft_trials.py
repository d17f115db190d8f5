"""Choice of speculative decoding for the best plan: on or off, and the number of draft tokens, by measuring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.console.report import Report
from appliance.engines.engine import Space
from appliance.errors import EngineError, ModelDoesNotFitError
from appliance.plan import SPECULATION_GOALS, Choice, Plan, with_choice
from appliance.tune.checkpoint import PartialResults
from appliance.tune.speculate import choose_speculation, least_s
from appliance.tune.trials.engine import Bench
from appliance.tune.tuner import Tuned


class DraftTrials:
    """Trials of speculative decoding for the plan that `tuned` chose."""

    def __init__(self, tuned: Tuned, space: Space, bench: Bench, *, results: PartialResults, report: Report) -> None:
        self._tuned, self._space, self._bench = tuned, space, bench
        self._results, self._report = results, report
        self._kept = results.drafts_of(tuned.plan.key)

    async def choose(
        self, *, requested: str, left_s: Callable[[], float], ask_s: float
    ) -> tuple[Plan, tuple[str, ...]]:
        """Return the plan, with speculative decoding if it was measured to be faster, and notes on what was tried.

        `requested` is the setting. If it is one of SPECULATION_GOALS and the engine fails, the plan stays without
        speculative decoding; if it is a kind, the error is raised.
        """
        plan = self._tuned.plan
        try:
            found, why, tried = await choose_speculation(
                plan,
                self._bench,
                self._space,
                requested=requested,
                left_s=left_s,
                ask_s=ask_s,
                on_step=self._results.on_step,
                kept=self._kept,
                on_result=self._results.on_draft(plan.key),
            )
            words = Choice(name="speculation", value="off", reason=why, source="measured")
            chosen = with_choice(plan, words)
            if found is not None:
                chosen = self._space.speculating(plan, found, replace(words, value=found.describe()))
        except (EngineError, ModelDoesNotFitError) as error:
            if requested not in SPECULATION_GOALS:
                raise
            self._report.warning("speculation_failed", f"speculative decoding is off: {error.message}")
            return plan, (f"speculative decoding failed: {error.message}",)
        value = "off" if found is None else found.describe()
        self._report.info("speculation", f"speculative decoding: {value}: {why}")
        return chosen, tuple(each.describe() for each in tried)

    @property
    def least_s(self) -> float:
        """Shortest time for a comparison."""
        return least_s(self._tuned) * self.least_loads

    @property
    def least_loads(self) -> int:
        """Fewest loads for a comparison: one without draft tokens and one with, or only the latter if the former is
        kept."""
        has_base = any(tried.kind is None and not tried.error for tried in self._kept)
        return 1 if has_base else 2


def can_speculate(space: Space) -> bool:
    return any(offer.is_tried for offer in space.offers())
