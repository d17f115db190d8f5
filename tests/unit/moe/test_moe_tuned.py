"""The tuner takes plans with slots for experts as candidates, and keeps the faster of both."""

from __future__ import annotations

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.plan import Plan
from appliance.tune.figures.curve import Point
from appliance.tune.figures.workload import parse_mix
from appliance.tune.search.candidates import candidates
from appliance.tune.search.search import Ask, Search, Trial
from tests.unit.moe.test_moe_plan import LAPTOP, space

DEAD = 0.0


def tuned(speedup: float) -> tuple[Plan, list[Plan]]:
    """Return the kept plan and the measured ones, on a machine that is as predicted, except that slots make decode
    `speedup` times as fast as the prediction without them. With DEAD the engine dies of them."""
    found = space(*LAPTOP)
    plans = {plan.key: plan for plan in found.all()}
    search = Search(candidates(found, list(plans.values())), parse_mix("chat"), knob_effects=found.knob_effects)
    usual = found.costs(found.best)

    def trial(ask: Ask) -> Trial:
        plan = plans[ask.candidate.key]
        if launch_of(plan).slots and speedup == DEAD:
            return Trial(key=plan.key)
        points = []
        for depth in search.effort.depths:
            costs = found.costs(plan)
            decode_ms = usual.decode_ms(depth) / speedup if launch_of(plan).slots else costs.decode_ms(depth)
            prefill_ms = costs.prefill_ms(depth, depth / 2) / depth
            points.append(Point(depth=depth, decode_ms=decode_ms, prefill_ms=prefill_ms, prefill_tokens=depth))
        return Trial(key=plan.key, points=tuple(points), is_long=ask.is_long, load_s=5.0)

    trials: list[Trial] = []
    while len(trials) < 12 and isinstance(ask := search.ask(trials, left_s=1e4), Ask):
        trials.append(trial(ask))
    return plans[search.rank(trials)[0].candidate.key], [plans[each.key] for each in trials]


@pytest.mark.parametrize(("speedup", "is_kept"), [(1.8, True), (1.3, True), (0.9, False), (0.6, False), (DEAD, False)])
def test_the_faster_plan_is_kept(speedup: float, is_kept: bool) -> None:
    kept, measured = tuned(speedup)
    with_slots = [plan for plan in measured if launch_of(plan).slots]
    assert with_slots
    assert speedup != DEAD or len(with_slots) == 1, "the others would die as well, and their loads take the budget"
    assert any(launch_of(plan).slots is None for plan in measured)
    assert (launch_of(kept).slots is not None) == is_kept
