"""Main loop of a tuning: choose the next measurement, make it, and stop if none is worth its time or time is up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from appliance.engines.engine import Space
from appliance.plan import SMALLEST_CONTEXT, Allocated, Plan, with_measured
from appliance.system.detached import detached
from appliance.tune.figures.load_times import Compilations, compiles_nothing
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.modes import Chosen, Mode, Scored, choose
from appliance.tune.figures.workload import Mix, cost_s, scaled_mix
from appliance.tune.search.candidates import EMPTY, candidates, trial_of
from appliance.tune.search.cost_terms import Candidate
from appliance.tune.search.search import Ask, Effort, Search, Trial
from appliance.tune.trials.context_search import ContextSearch
from appliance.tune.trials.run_trial import DECODE_TOKENS, FirstSampling, Sampling
from appliance.tune.trials.trials import Trials

SHARE_FOR_SEARCH = 0.7  # of the budget; the rest is for context lengths and for longer measurements of the winner
CLOSER_LOOKS = 3  # at most so many longer measurements at the end
FAILURES_MAX = 3  # for other causes than memory, before anything was measured


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Goal of a tuning. `native` is the largest context that counts: the model's native one, or the user's."""

    mix: Mix
    mode: Mode
    native: int


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The winner `plan` and everything that was measured. `plans` are all measured plans."""

    plan: Plan
    chosen: Chosen
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]
    mix: Mix  # scaled to the contexts that were compared
    seconds: float
    stopped_by: str
    allocated: Allocated | None  # by the winner
    disturbance: str | None

    @property
    def job_s(self) -> float:
        return cost_s(self.chosen.scored.curve, self.mix)


class Tuner:
    """One search over plans. `take`, `on_result`, `kept`, `compilations` and `left_of` are passed to `Trials`."""

    def __init__(
        self,
        space: Space,
        plans: Sequence[Plan],
        take: Callable[[Plan, Sampling | FirstSampling], Awaitable[Measurement]],
        goal: Goal,
        *,
        budget_s: float,
        on_result: Callable[[Measurement], None],
        kept: Sequence[Measurement] = (),
        compilations: Compilations = compiles_nothing,
        left_of: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self._space = space
        self._goal = goal
        self._budget_s = budget_s
        contexts = [plan.context for plan in plans]
        self._mix = scaled_mix(goal.mix, min(max(contexts), max(min(contexts), SMALLEST_CONTEXT)))
        self._trials = Trials(
            plans,
            take,
            depth=self._mix.depth,
            copied_batch=self._copied_batch,
            budget_s=budget_s,
            on_result=on_result,
            kept=kept,
            compilations=compilations,
            left_of=left_of,
        )
        self._candidates = candidates(space, plans, compilations)
        self._stopped_by = ""

    async def run(self) -> Tuned:
        """Measure plans and return the winner. A plan on which the engine fails becomes a Measurement with `error`.

        Raises the first failed plan's EngineError if no plan could be measured, and at once an error that every plan
        would have.
        """
        search = await self._search()
        await self._contexts(search).run()
        await self._look_closely()
        seconds = self._trials.spent_s
        return await detached(self._tuned, seconds)  # in a thread, since the gateway may be serving

    async def widen(self, most: int, context: int | None = None) -> None:
        """Measure at most `most` more plans for another mode, or one plan with this context. At least one plan must
        have been measured; the time of kept measurements does not count."""
        self._trials.begin_anew()
        contexts = self._contexts(self._new_search())
        if context is None:
            await contexts.run(most)
        else:
            await contexts.measure(context)

    async def measure_serving(self, plan: Plan) -> None:
        """Measure the plan that serves, unless that was done."""
        if all(m.key != plan.key for m in self._trials.seen):
            await self._trials.measure(plan, is_long=False)

    @property
    def measured(self) -> tuple[Plan, ...]:
        return self._trials.measured

    async def _search(self) -> Search:
        trials, search = self._trials, self._new_search()
        while isinstance(ask := search.ask(self._seen, left_s=self._left_for_search_s), Ask):
            plan = self._unlike_the_failed() or trials.plans[ask.candidate.key]
            await trials.measure(plan, is_long=ask.is_long)
            self._end_if_hopeless()
            if search.effort != self._effort():  # the first measurement has decided the depths for all plans
                search = self._new_search()
        if not trials.has_figures:
            raise trials.failures[0]
        self._stopped_by = ask.why
        return search

    @property
    def _seen(self) -> list[Trial]:
        return [trial_of(m) for m in self._trials.seen]

    @property
    def _left_for_search_s(self) -> float:
        """Time left for the search: the time left in total minus the fixed part for context lengths. In mode `speed`
        nothing is subtracted, since it searches no context length."""
        share = 1.0 if self._goal.mode == "speed" else SHARE_FOR_SEARCH
        return self._trials.left_s - self._budget_s * (1 - share)

    def _new_search(self) -> Search:
        effects = self._space.knob_effects
        return Search(self._candidates, self._mix, self._effort(), knob_effects=effects)

    def _effort(self) -> Effort:
        depths = self._trials.depths[:2] or (EMPTY, self._mix.depth)
        return Effort(depths=depths, tokens_each=DECODE_TOKENS)

    def _copied_batch(self, plan: Plan) -> int:
        return self._space.costs(plan).batch if plan.placement.copies_weights else 0

    def _end_if_hopeless(self) -> None:
        """Raise the first failure if FAILURES_MAX plans failed for other causes than memory and none was measured: the
        next plan would fail too."""
        others = [error for error in self._trials.failures if not error.was_memory]
        if len(others) >= FAILURES_MAX and not self._trials.has_figures:
            raise others[0]

    def _unlike_the_failed(self) -> Plan | None:
        """Return the plan that differs most from the failed ones, as long as every plan has failed and not all for lack
        of memory; else None. Similar plans would probably fail in the same way, whatever their prediction."""
        trials = self._trials
        if trials.has_figures or not any(not error.was_memory for error in trials.failures):
            return None
        failed = {m.key for m in trials.seen}
        knobs = [candidate.by_knob for candidate in self._candidates if candidate.key in failed]

        def unlike(candidate: Candidate) -> int:
            return min(sum(of[name] != value for name, value in candidate.knobs) for of in knobs)

        left = [candidate for candidate in self._candidates if candidate.key not in failed]
        return trials.plans[max(left, key=unlike).key] if left and knobs else None

    def _contexts(self, search: Search) -> ContextSearch:
        def best(context: int) -> str | None:
            found = search.best(self._seen, context)
            return found.key if found else None

        goal = self._goal
        return ContextSearch(self._space, self._trials, best, mode=goal.mode, mix=self._mix, native=goal.native)

    def _winner(self, found: Sequence[Scored]) -> Chosen:
        return choose(self._goal.mode, found, self._mix, native=self._goal.native)

    async def _look_closely(self) -> None:
        """Measure the winner longer and at every depth. That may make another plan the winner, so it is repeated up to
        CLOSER_LOOKS times. Ends if the winner was measured so, time is up, or the engine failed.

        The winner was not always measured long in the search: between equally fast plans the larger context wins.
        """
        trials = self._trials
        for _ in range(CLOSER_LOOKS):
            plan = trials.plans[self._winner(trials.scored()).scored.key]
            if trials.is_seen_closely(plan) or trials.expected_s(plan, is_long=True, is_deep=True) > trials.left_s:
                return
            if not (await trials.measure(plan, is_long=True, is_deep=True)).points:
                return

    def _tuned(self, seconds: float) -> Tuned:
        trials, found = self._trials, self._trials.scored()
        winner = self._winner(found)
        looks = [m for m in trials.seen if m.key == winner.scored.key]
        return Tuned(
            plan=with_measured(trials.plans[winner.scored.key], _why(winner, found, self._mix), trials.measured),
            chosen=winner,
            plans=trials.measured,
            measurements=tuple(trials.seen),
            mix=self._mix,
            seconds=seconds,
            stopped_by=self._stopped_by,
            allocated=next((look.allocated for look in looks if look.allocated), None),
            disturbance=_disturbance(looks),
        )


def _disturbance(looks: Sequence[Measurement]) -> str | None:
    """Return what disturbed the winner's measurements; None if at least one was undisturbed."""
    seen = [m for m in looks if m.points]
    return None if any(m.disturbance is None for m in seen) else seen[-1].disturbance


def _why(winner: Chosen, found: Sequence[Scored], mix: Mix) -> str:
    took = f"{cost_s(winner.scored.curve, mix):.1f} s for a {mix.name} job"
    others = [cost_s(each.curve, mix) for each in found if each.key != winner.scored.key]
    if not others:
        return f"the only one measured: {took}"
    return f"{winner.why}; {len(others) + 1} compared: {took}, the next {min(others):.1f} s"
