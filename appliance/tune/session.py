"""One tuning from beginning to end: KV cache types, plans, speculative decoding, slots.

This file has the order of the parts and each part's share of the time. It is imported only if something is measured,
not by a start from a profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

from appliance.console.report import Report
from appliance.engines.engine import Inputs, Space
from appliance.plan import KvCheck, Plan
from appliance.probe.load.watch import Watch
from appliance.system.detached import detached
from appliance.tune.budget import Budget, Patience, day_after, utc_day
from appliance.tune.checkpoint import PartialResults, PartialStore
from appliance.tune.draft_trials import DraftTrials, can_speculate
from appliance.tune.figures.measurement import MARGIN, Measurement
from appliance.tune.figures.modes import Mode
from appliance.tune.figures.workload import parse_mix
from appliance.tune.search.search import OUT_OF_BUDGET
from appliance.tune.slot_trials import SlotTrials
from appliance.tune.speculate import ROUNDS, measure_speculation
from appliance.tune.trials import kv_quality as quality
from appliance.tune.trials.engine import Bench
from appliance.tune.trials.loader import refined
from appliance.tune.trials.run_trial import FirstSampling, Sampling, is_long, measure
from appliance.tune.tuner import Goal, Tuned, Tuner

# Shares of the budget. A part without anything to measure leaves its time to the next parts.
SHARE_FOR_KV = 0.25
SHARE_FOR_SPECULATION = 0.25  # of the time, and of the loads of a day
SHARE_FOR_SLOTS = 0.15
SHARE_FOR_LOADER = 0.1
MORE_PLANS = 2  # at most so many further plans are measured for another mode


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """Result of a tuning. `plan` is the best of `tuned` with speculative decoding and slots; `notes` say what was tried
    for these."""

    plan: Plan
    tuned: Tuned
    kv_checks: tuple[KvCheck, ...]  # on types of the KV cache below q8_0
    notes: tuple[str, ...]
    native: int  # the largest context that counts
    seconds: float
    goes_on_from: str | None  # day of UTC from which more is measured, in idle time; None: everything was


@dataclass(frozen=True, kw_only=True)
class MeasuredPlans:
    """Plans with their measurements, of an earlier session or of this one."""

    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]
    kv_checks: tuple[KvCheck, ...]


class TuningSession:
    """One tuning. `space` makes the space of plans from the results on KV cache types. `beside` is the space in the
    memory that a serving engine leaves free; None if no engine serves. `patience` has the limits in idle time; None if
    no engine serves.

    Every result is kept at once. A session that was interrupted by a stop, a request or a kill is resumed with a new
    budget. It loses at most the work of one engine start; while reading text for a KV cache type, it loses only the
    current chunk, unless it was killed by SIGKILL.
    """

    def __init__(
        self,
        inputs: Inputs,
        bench: Bench,
        *,
        space: Callable[[Sequence[KvCheck]], Space],
        store: PartialStore,
        watch: Callable[[], Watch],
        report: Report,
        shows_phase: bool = True,
        beside: Space | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._settings = inputs.settings
        self._has_draft = inputs.draft is not None
        self._make_space = space
        self._watch = watch
        self._report = report
        self._beside = beside
        self._results = PartialResults(store, report, shows_phase=shows_phase)
        self._bench = replace(bench, on_load=self._results.on_load)
        self._patience = patience
        self._budget = Budget(
            self._settings.budget_s,
            is_timed=patience is None or not patience.waits,
            loads_left=lambda: math.inf if patience is None else patience.loads_a_day - self._results.loads_today,
        )
        self._mix = parse_mix(self._settings.workload)
        self._lacks_drafts = False  # True if no time was left to compare speculative decoding

    @property
    def measurements(self) -> Sequence[Measurement]:
        """Measurements so far, including those of the checkpoint."""
        return self._results.measurements

    @property
    def gained(self) -> int:
        """Number of results beyond those of the checkpoint. Each depth of a measurement counts."""
        return self._results.gained

    async def run(self) -> TuningResult:
        """Run the tuning. Raises the engine's error if nothing could be measured."""
        self._budget.begin()
        self._results.phase("starting")
        await detached(self._results.load)  # from the volume, while the gateway may be serving
        if words := self._results.kept.describe():
            self._report.info("tune_goes_on", f"resuming an interrupted tuning with {words}")
        kv_checks = await self._check_kv_types(self._make_space(()))
        space = self._make_space(kv_checks)
        tuned = await self._choose_plan(space)
        plan, notes = await self._choose_speculation(space, tuned)
        plan, of_slots = await self._choose_slots(plan)
        return TuningResult(
            plan=plan,
            tuned=tuned,
            kv_checks=kv_checks,
            notes=(*notes, *of_slots),
            native=space.native,
            seconds=sum(m.spent_s for m in tuned.measurements) if self._patience else self._budget.spent_s,
            goes_on_from=self._goes_on_from(tuned),
        )

    def _goes_on_from(self, tuned: Tuned) -> str | None:
        is_cut = not self._budget.has_loads(1) or self._lacks_drafts or tuned.stopped_by == OUT_OF_BUDGET
        if self._patience is None or not is_cut:
            return None
        may_load = not self._patience.waits and self._budget.has_loads(1)
        return utc_day() if may_load else day_after(utc_day())

    async def measure_serving(self) -> None:
        """Measure the plan that serves on its own engine, so that it costs no load: its speed, and its answers without
        draft tokens. What an earlier session has measured is not repeated."""
        serving = self._bench.serving
        if serving is None:
            return
        plan = serving.plan
        await detached(self._results.load)  # from the volume, while the gateway may be serving
        self._results.measurements[:] = self._results.kept.measurements
        space = self._make_space(())
        plans = await detached(space.all)
        if all(each.key != plan.key for each in plans):
            return  # a plan that the search does not know
        await self._tuner(space, plans, self._settings.budget_s).measure_serving(plan)
        has_base = any(tried.kind is None and not tried.error for tried in self._results.drafts_of(plan.key))
        if can_speculate(space) and not has_base:
            on_step = self._results.on_step
            base = await measure_speculation(plan, self._bench, ask_s=self._ask_s, like=None, on_step=on_step)
            self._results.on_draft(plan.key)(base)

    @property
    def _share_for_drafts(self) -> float:
        """Share of the time for speculative decoding: more than usual if one load of this engine takes longer, and half
        at most."""
        load_s = max((m.load_s for m in self._results.kept.measurements if m.points), default=0.0)
        return max(SHARE_FOR_SPECULATION, min(0.5, MARGIN * load_s / self._settings.budget_s))

    @property
    def _ask_s(self) -> float:
        """Seconds that the answers of one start take, to compare speculative decoding."""
        return self._settings.budget_s * SHARE_FOR_SPECULATION / ROUNDS

    async def widen(self, before: MeasuredPlans, context: int | None = None) -> MeasuredPlans:
        """Return the measured plans with up to MORE_PLANS more, at context lengths that the present mode needs and that
        no measured plan has; with `context`, with one plan of that length."""
        self._budget.begin()
        await detached(self._results.load)  # from the volume, while the gateway may be serving
        kept = self._results.kept.measurements
        new = (measurement for measurement in kept if measurement not in before.measurements)
        self._results.measurements[:] = (*before.measurements, *new)
        space = self._make_space(before.kv_checks)
        possible = await detached(self._possible, space)
        plans = {plan.key: plan for plan in (*before.plans, *possible)}
        tuner = self._tuner(space, list(plans.values()), self._settings.budget_s)
        await tuner.widen(MORE_PLANS - len({measurement.key for measurement in kept}), context)
        return replace(before, plans=tuner.measured, measurements=tuple(self.measurements))

    async def _check_kv_types(self, space: Space) -> tuple[KvCheck, ...]:
        """Check smaller KV cache types. Returns () unless the space names types: memory must be too small for the
        wanted context at q8_0, and the smaller type must allow a much longer one."""
        types = space.kinds_to_check()
        if not types:
            return ()
        best = space.best
        found = await quality.check(
            best,
            types,
            self._bench.reader,
            budget_s=self._settings.budget_s * SHARE_FOR_KV,
            prefill_tokens_per_s=best.speed.prefill_tokens_per_s if best.speed else 1.0,
            on_step=self._results.on_step,
            kept=self._results.kept.scored_chunks,
            on_result=self._results.on_chunk,
        )
        for kv_check in found:
            what = "may be used" if kv_check.is_accepted else "is not used"
            words = f"a KV cache of {kv_check.kv_type} {what}: {kv_check.why}"
            self._report.info("kv_checked", words, **asdict(kv_check))
        return found

    async def _choose_plan(self, space: Space) -> Tuned:
        settings = self._settings
        possible = await detached(self._possible, space)
        plans = await refined(possible, self._bench, budget_s=settings.budget_s * SHARE_FOR_LOADER, report=self._report)
        kept = self._results.kept.measurements
        self._results.measurements[:] = kept
        limit = f"within {settings.budget_s:g} s"
        if self._patience and not self._budget.is_timed:
            limit = f"in idle time, with at most {self._patience.loads_a_day} engine loads a day"
        words = f"measuring the most promising of {len(plans):,} plans {limit}"
        if kept:
            words += f"; {len(kept)} measurements are kept from an interrupted start"
        self._report.info("tune_start", words)
        reserved = self._share_for_drafts * can_speculate(space) + SHARE_FOR_SLOTS * self._chooses_slots
        spent_s = self._budget.spent_s if self._budget.is_timed else 0.0
        budget_s = max(1.0, settings.budget_s * (1 - reserved) - spent_s)
        loads = 0
        if can_speculate(space) and self._patience:  # a comparison takes two
            most = self._patience.loads_a_day
            loads = min(max(2, int(SHARE_FOR_SPECULATION * most)), most // 2)
        return await self._tuner(space, plans, budget_s, reserved_loads=loads).run()

    def _tuner(self, space: Space, plans: Sequence[Plan], budget_s: float, *, reserved_loads: int = 0) -> Tuner:
        """Return a tuner that resumes from the kept measurements. The last `reserved_loads` of a day are not its."""

        async def take(plan: Plan, look: Sampling | FirstSampling) -> Measurement:
            results = self._results
            return await measure(
                plan,
                look,
                bench=self._bench,
                on_step=results.on_step,
                watch=self._watch,
                begun=results.begun(plan.key, is_long=is_long(look)),
                on_depth=results.on_depth,
            )

        return Tuner(
            space,
            plans,
            take,
            Goal(mix=self._mix, mode=cast("Mode", self._settings.mode), native=space.native),
            budget_s=budget_s,
            on_result=self._results.on_measurement,
            kept=self.measurements,
            compilations=self._bench.engine.compilations(self._bench.install),
            left_of=partial(self._budget.left_of, reserved_loads=reserved_loads),
        )

    def _possible(self, space: Space) -> list[Plan]:
        """Return every plan that fits. While another engine serves, only plans that fit into the rest of the memory:
        otherwise the kernel may kill the serving engine."""
        plans = space.all()
        if self._beside is None:
            return plans
        return [plan for plan in plans if not isinstance(self._beside.now(plan), str)] or plans[:1]

    async def _choose_speculation(self, space: Space, tuned: Tuned) -> tuple[Plan, tuple[str, ...]]:
        if not can_speculate(space) and not self._has_draft:
            return tuned.plan, ()
        trials = DraftTrials(tuned, space, self._bench, results=self._results, report=self._report)
        reserved_s = SHARE_FOR_SLOTS * self._settings.budget_s * self._chooses_slots
        has_loads = self._budget.has_loads(trials.least_loads)
        self._lacks_drafts = not has_loads or trials.least_s > self._budget.left_s - reserved_s
        left_s = (lambda: 0.0) if self._lacks_drafts else lambda: self._budget.left_s - reserved_s
        return await trials.choose(requested=self._settings.speculation, left_s=left_s, ask_s=self._ask_s)

    @property
    def _chooses_slots(self) -> bool:
        """True if the number of slots is to be measured: several users, and no number set by the user."""
        return self._settings.users > 1 and not self._settings.is_set("parallel")

    async def _choose_slots(self, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
        if not self._chooses_slots:
            return plan, ()
        load_s = max((m.load_s for m in self.measurements if m.points), default=0.0)
        trials = SlotTrials(
            plan,
            self._bench,
            users=self._settings.users,
            mix=self._mix,
            results=self._results,
            report=self._report,
            left_s=lambda: self._budget.at_most_s(SHARE_FOR_SLOTS, load_s=load_s),
        )
        return await trials.choose()
