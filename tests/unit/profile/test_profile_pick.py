"""Choice of the served plan, for different free memory, modes and cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.plan import NEEDLE_DEPTHS, CacheCheck, Checks, NeedleRow, Plan, SpeculationCheck, Verdict
from appliance.profile import Picked, Profile, context_to_measure, pick, wants_more
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from tests.builders import examples, profile
from tests.unit.engines.llama.planning.test_plan_gpus import shape, space, with_gpus
from tests.unit.engines.llama.planning.test_plan_space import LAPTOP, laptop_plans, with_host

MODEL = "qwen3-30b-a3b"
MODES = ("speed", "balanced", "context")
(CARD,) = LAPTOP.gpus.gpus


def measured(plan: Plan, ms: float, *, per_1000: float = 0.0) -> Measurement:
    points = tuple(
        Point(depth=depth, decode_ms=ms + per_1000 * depth / 1000, prefill_ms=1.0, prefill_tokens=depth)
        for depth in (32, 640, 4096)
    )
    return Measurement(key=plan.key, points=points, is_long=True)


def vram_mib(plan: Plan) -> float:
    return plan.placement.shares[0].memory.total


@cache
def ladder() -> tuple[Plan, ...]:
    """Return up to four plans of one context length; the plan that needs most GPU memory comes first."""
    best = space(LAPTOP, shape(MODEL)).best
    alike = (best.context, best.kv_type, launch_of(best).threads, launch_of(best).load_mode)
    found = [p for p in laptop_plans() if (p.context, p.kv_type, launch_of(p).threads, launch_of(p).load_mode) == alike]
    by_need = {round(vram_mib(plan) / 100): plan for plan in found}  # differing by more than what rounding hides
    return tuple(sorted(by_need.values(), key=vram_mib, reverse=True))[:4]


class Everything:
    """A space in which every plan fits."""

    def now(self, plan: Plan, _: object) -> Plan:
        return plan

    def speculating_as(self, plan: Plan, _: Plan) -> Plan:
        return plan


def of(plans: Sequence[Plan], seen: Sequence[Measurement], **more: object) -> Profile:
    made = replace(
        profile(), plan=plans[0], plans=tuple(plans), measurements=tuple(seen), native=262144, other_modes=()
    )
    return replace(made, **more)  # type: ignore[arg-type]


def tuned() -> Profile:
    """A profile in which a plan is faster the more GPU memory it uses."""
    return of(ladder(), [measured(plan, 10.0 + 2 * at) for at, plan in enumerate(ladder())], mode="speed")


def with_vram(free_mib: float) -> Space:
    held_back_mib = ladder()[0].placement.shares[0].gpu.held_back_mib
    card = replace(CARD, vram_free_mib=int(free_mib + held_back_mib) + 1)
    return space(with_gpus(LAPTOP, card), shape(MODEL))


def test_the_best_is_served_where_it_fits() -> None:
    found = pick(tuned(), "speed", space(LAPTOP, shape(MODEL)))
    assert isinstance(found, Picked)
    assert found.is_best
    assert found.passed_over == ()
    assert (found.plan.key, found.plan.placement) == (ladder()[0].key, ladder()[0].placement)
    assert launch_of(found.plan).cache_ram_mib >= 128


@pytest.mark.parametrize("at", [0, 1, 2])
def test_with_less_memory_the_best_that_fits_is_served_and_each_better_one_says_what_it_lacks(at: int) -> None:
    plans = ladder()
    found = pick(tuned(), "speed", with_vram(vram_mib(plans[at])))
    assert isinstance(found, Picked)
    assert found.plan.key == plans[at].key
    assert found.is_best is (at == 0)
    assert len(found.passed_over) == at
    for words, plan in zip(found.passed_over, plans, strict=False):
        assert words.startswith(f"{plan.key}: it needs {vram_mib(plan):,.0f} MiB of {CARD.name}, and ")
    if at:
        assert {c.reason for c in found.plan.choices if c.source == "measured"} <= {found.why}


def test_where_nothing_fits_each_plan_says_what_it_lacks() -> None:
    found = pick(tuned(), "speed", with_vram(vram_mib(ladder()[-1]) - 500))
    assert not isinstance(found, Picked)
    assert [words.split(": it needs ")[0] for words in found] == [plan.key for plan in ladder()]


def test_host_memory_is_lacked_in_words_too() -> None:
    memory = ladder()[0].memory
    bare_mib = memory.total - memory.cache - memory.checkpoints
    found = pick(tuned(), "speed", space(with_host(LAPTOP, int(bare_mib)), shape(MODEL)))
    lacking = found.passed_over if isinstance(found, Picked) else found
    words = f"it needs {bare_mib:,.0f} MiB of host memory without caches, and {int(bare_mib):,} are usable"
    assert lacking[0] == f"{ladder()[0].key}: {words}, of which 3% stay free"


@cache
def contexts() -> tuple[Plan, ...]:
    best = space(LAPTOP, shape(MODEL)).best
    alike = (best.kv_type, launch_of(best).threads, launch_of(best).load_mode)
    found = {p.context: p for p in laptop_plans() if (p.kv_type, launch_of(p).threads, launch_of(p).load_mode) == alike}
    return tuple(found[size] for size in sorted(found)[:4])


def test_another_mode_takes_another_plan_from_the_same_measurements() -> None:
    """Times rise with the context length. The third plan decodes below reading speed with a full context."""
    small, middle, large, *_ = contexts()
    seen = [measured(small, 20.0), measured(middle, 26.0, per_1000=0.1), measured(large, 40.0, per_1000=2.0)]
    here = space(LAPTOP, shape(MODEL))
    found = {mode: pick(of((small, middle, large), seen), mode, here) for mode in MODES}
    keys = [each.plan.key for each in found.values() if isinstance(each, Picked)]
    assert keys == [small.key, middle.key, middle.key]


def lost(plan: Plan, context: int = 0) -> NeedleRow:
    return NeedleRow(
        context=context or plan.context, share=0.5, verdict="failed", words="not found", kv_type=plan.kv_type
    )


def test_a_mode_prefers_a_context_whose_needles_are_found() -> None:
    small, middle, large, *_ = contexts()
    seen = [measured(small, 20.0), measured(middle, 21.0), measured(large, 22.0)]
    here = space(LAPTOP, shape(MODEL))

    def picked(*rows: NeedleRow) -> Picked:
        found = pick(of((small, middle, large), seen, checks=Checks(needles=rows)), "context", here)
        assert isinstance(found, Picked)
        return found

    assert picked().plan.key == large.key
    found = picked(lost(large))
    assert found.plan.key == middle.key
    assert f"needles were lost in a context of {large.context:,}" in found.why
    assert picked(lost(large), lost(middle)).plan.key == small.key
    assert picked(*(lost(plan) for plan in (small, middle, large))).plan.key == large.key  # none holds
    assert picked(replace(lost(large), kv_type="of another cache")).plan.key == large.key


def test_a_smaller_context_is_measured_if_needles_were_lost_in_every_measured_one() -> None:
    small, middle, large, *_ = contexts()
    seen = [measured(small, 20.0), measured(middle, 21.0), measured(large, 22.0)]

    def wanted(plans: Sequence[Plan], *rows: NeedleRow) -> int | None:
        return context_to_measure(of(plans, seen, checks=Checks(needles=rows)))

    found = [replace(lost(middle, 8192), share=share, verdict="passed") for share in NEEDLE_DEPTHS]
    assert wanted((large,), lost(large)) is None  # none is known to hold
    assert wanted((middle, large), lost(middle), lost(large), *found) == 8192
    assert wanted((middle, large), lost(middle), lost(large), *found[1:]) is None  # not looked through
    assert wanted((small, large), lost(large), *found) is None  # the small one is measured
    assert wanted((middle, large), lost(large), *found) is None


@pytest.mark.parametrize(("verdict", "serves"), [("open", True), ("harmless", True), ("refused", False)])
def test_a_cache_that_changes_answers_serves_only_if_nothing_else_was_measured(verdict: Verdict, serves: bool) -> None:
    quick, other = ladder()[0], replace(ladder()[1], kv_type="f32")
    seen = [measured(quick, 10.0), measured(other, 20.0)]
    checks = Checks(caches=(CacheCheck(kv_type=quick.kv_type, verdict=verdict),))
    found = pick(of((quick, other), seen, checks=checks), "speed", Everything())  # type: ignore[arg-type]
    assert isinstance(found, Picked)
    assert (found.plan.kv_type == quick.kv_type) is serves
    alone = pick(of((quick,), seen, checks=checks), "speed", Everything())  # type: ignore[arg-type]
    assert isinstance(alone, Picked)


@pytest.mark.parametrize(
    ("verdict", "serves"), [("open", True), ("harmless", True), ("asked for", True), ("refused", False)]
)
def test_speculative_decoding_that_was_refused_does_not_serve(verdict: str, serves: bool) -> None:
    plan, here = ladder()[-1], space(LAPTOP, shape(MODEL))
    speculating = here.speculating(plan, here.speculation(plan, "ngram", 8))
    check = SpeculationCheck(of="n-grams", window=16, verdict=verdict)  # type: ignore[arg-type]
    kept = replace(of((plan,), [measured(plan, 20.0)]), plan=speculating, checks=Checks(speculation=check))
    found = pick(kept, "speed", here)
    assert isinstance(found, Picked)
    assert (found.plan.speculation is not None) is serves
    choice = next((each for each in found.plan.choices if each.name == "speculation"), None)
    assert serves or (choice is not None and choice.value == "off" and "is refused" in choice.reason)


@pytest.mark.thorough
def test_a_mode_that_was_not_measured_for_wants_what_may_be_a_larger_context() -> None:
    small, *_, large = contexts()
    found = of((small,), [measured(small, 20.0)], mode="speed")
    here = {mode: space(LAPTOP, shape(MODEL), mode=mode) for mode in MODES}
    assert [mode for mode in MODES if wants_more(found, mode, here[mode], budget_s=120.0)] == ["balanced", "context"]
    widened = replace(found, other_modes=("context",))
    assert [mode for mode in MODES if wants_more(widened, mode, here[mode], budget_s=120.0)] == ["balanced"]
    slow = replace(found, measurements=(replace(found.measurements[0], seconds=100.0),))
    assert not wants_more(slow, "context", here["context"], budget_s=120.0), "no trial would end in that time"
    measured_for_it = replace(found, mode="context")
    assert not wants_more(measured_for_it, "context", here["context"], budget_s=120.0)
    largest = max(plan.context for plan in here["balanced"].all())
    assert largest == large.context
    both = of((small, large), [measured(small, 20.0), measured(large, 25.0)], mode="speed")
    assert not wants_more(both, "balanced", here["balanced"], budget_s=120.0), "there is no larger one"
    assert not wants_more(of((small,), []), "context", here["context"], budget_s=120.0)


def test_a_profile_in_which_nothing_was_measured_gives_nothing() -> None:
    assert pick(of(ladder(), []), "balanced", space(LAPTOP, shape(MODEL))) == ()


@settings(max_examples=examples(25))
@given(st.lists(st.floats(1.0, 500.0), min_size=4, max_size=4), st.integers(0, 9000), st.sampled_from(MODES))
def test_whatever_is_free_what_is_served_fits_and_nothing_that_fits_is_passed_over(
    times: list[float], free_mib: int, mode: str
) -> None:
    plans = ladder()
    here = with_vram(free_mib)
    found = pick(of(plans, [measured(plan, ms) for plan, ms in zip(plans, times, strict=True)]), mode, here)
    fitting = {plan.key for plan in plans if not isinstance(here.now(plan), str)}
    lacking = found.passed_over if isinstance(found, Picked) else found
    assert not {words.split(": it needs ")[0] for words in lacking} & fitting
    assert isinstance(found, Picked) is bool(fitting)
    if isinstance(found, Picked):
        assert found.plan.key in fitting


def test_where_those_that_were_looked_at_longer_do_not_fit_one_that_was_glanced_at_is_served() -> None:
    """A plan that was measured briefly is served rather than one that was only predicted."""
    large, small, *_ = ladder()
    seen = [measured(large, 10.0), replace(measured(small, 12.0), is_long=False)]
    found = pick(of((large, small), seen, mode="speed"), "speed", with_vram(vram_mib(small)))
    assert isinstance(found, Picked)
    assert found.plan.key == small.key
    assert len(found.passed_over) == 1
