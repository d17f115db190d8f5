from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import AGENT_CONTEXT, QUICK_TOKENS_PER_S, SPEED_KEPT, speed_kept
from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.modes import (
    Mode,
    Scored,
    choose,
    is_readable,
    measured_deepest,
    next_context,
    readable_context,
    wanted_context,
)
from appliance.tune.figures.workload import CHAT, cost_s, only, parse_mix, scaled_mix

CHATS = only(CHAT)


def scored(context: int, ms: float, *, per_1000: float = 0.0, key: str = "") -> Scored:
    """Return a plan that decodes a token in `ms` at an empty context, and `per_1000` more for every thousand tokens."""
    points = tuple(
        Point(depth=depth, decode_ms=ms + per_1000 * depth / 1000, prefill_ms=0.1, prefill_tokens=depth)
        for depth in (32, 640, 8000)
    )
    return Scored(key=key or f"{context}", context=context, curve=Curve(points=points))


PLANS = (scored(8192, 20.0), scored(16384, 27.0), scored(32768, 36.0, per_1000=0.2), scored(65536, 55.0, per_1000=1.0))


@pytest.mark.parametrize(("mode", "context"), [("speed", 8192), ("balanced", 16384), ("context", 32768)])
def test_each_mode_takes_its_plan_from_the_same_measurements(mode: Mode, context: int) -> None:
    assert choose(mode, PLANS, CHATS, native=131072).scored.context == context


def test_balanced_compares_at_the_workloads_depth_not_at_an_empty_context() -> None:
    """At an empty context both plans are equally fast; at 640 tokens the second is half as fast."""
    plans = (scored(8192, 10.0), scored(65536, 10.0, per_1000=20.0))
    assert choose("balanced", plans, CHATS, native=131072).scored.context == 8192


def test_two_plans_are_never_compared_at_two_depths() -> None:
    """A workload longer than the smaller context is scaled to that context for both plans. Otherwise the plan with the
    larger context would look slower."""
    plans = (scored(8192, 20.0, per_1000=1.0, key="small"), scored(131072, 19.0, per_1000=1.0, key="large"))
    found = choose("speed", plans, parse_mix("document"), native=131072)
    assert found.scored.key == "large"
    assert found.at < 8192
    assert "scaled to 8192" in found.why


def test_when_no_window_is_readable_the_largest_says_its_speed() -> None:
    plans = (scored(8192, 100.0), scored(16384, 200.0))
    found = choose("context", plans, CHATS, native=16384)
    assert found.scored.context == 16384
    largest = "the largest that fits: 5.0 tok/s (extrapolated: 5.0 to 5.0)"
    assert found.why == f"no context decodes 15 tok/s when full; {largest}"


def test_no_mode_goes_below_8192_unless_memory_forbids_or_the_model_is_smaller() -> None:
    fast_and_small = scored(4096, 5.0)
    assert choose("speed", (fast_and_small, scored(8192, 20.0)), CHATS, native=131072).scored.context == 8192
    assert choose("speed", (fast_and_small, scored(8192, 20.0)), CHATS, native=4096).scored.context == 4096
    forbidden = choose("speed", (fast_and_small, scored(2048, 1.0)), CHATS, native=131072)
    assert forbidden.scored.context == 4096
    assert forbidden.why.endswith("; memory forbids a context of 8,192")


def test_of_plans_as_fast_but_for_noise_the_larger_window_serves() -> None:
    assert choose("speed", (scored(8192, 20.0), scored(32768, 20.2)), CHATS, native=131072).scored.context == 32768


def test_a_little_more_context_is_not_bought_with_a_quarter_of_the_speed() -> None:
    knee, little, much = scored(35328, 57.0), scored(36608, 75.0), scored(65536, 77.0)
    found = choose("balanced", (scored(8192, 56.5), knee, little), CHATS, native=131072)
    assert found.scored == knee
    assert found.why.endswith("it keeps 99%, 36,608 would cost 24% of that")
    assert choose("balanced", (scored(8192, 56.5), knee, little, much), CHATS, native=131072).scored == much


def test_all_that_the_model_has_keeps_a_little_less_of_the_speed() -> None:
    """The planner predicts such a case: Qwen3-Next-80B on two 4090 has 262,144 tokens at 0.68 of the fastest speed."""
    plans = (scored(8192, 20.0), scored(131072, 26.0), scored(262144, 29.5))
    assert choose("balanced", plans, CHATS, native=262144).scored.context == 262144
    assert choose("balanced", plans, CHATS, native=524288).scored.context == 131072
    slower = (*plans[:2], scored(262144, 30.5))
    assert choose("balanced", slower, CHATS, native=262144).scored.context == 131072
    assert wanted_context("balanced", (8192, 262144), plans[:1], CHATS, native=262144) == 262144
    assert wanted_context("balanced", (8192, 196608, 262144), (plans[0], plans[2]), CHATS, native=262144) is None


def test_balanced_takes_what_agents_work_with_before_speed() -> None:
    fast, agent, more = scored(49152, 6.0), scored(65536, 20.0), scored(81920, 23.0)
    assert choose("balanced", (fast, agent), CHATS, native=131072).scored == agent
    assert choose("balanced", (fast, agent, more), CHATS, native=131072).scored == agent
    slow_when_half_full = scored(65536, 20.0, per_1000=0.5)
    assert choose("balanced", (fast, slow_when_half_full), CHATS, native=131072).scored == fast
    assert choose("speed", (fast, agent), CHATS, native=131072).scored == fast


def test_balanced_counts_the_prompt_as_a_planner_does() -> None:
    """Both plans answer equally fast, but one takes as long for the prompt as for the answer."""
    fast, slow = scored(8192, 40.0), scored(65536, 40.0)
    reads = tuple(replace(point, prefill_ms=20.0) for point in slow.curve.points)
    assert choose("balanced", (fast, slow), CHATS, native=131072).scored.context == 65536
    assert choose("balanced", (fast, replace(slow, curve=Curve(points=reads))), CHATS, native=131072).scored == fast


plans = st.lists(
    st.builds(scored, st.integers(1, 64).map(lambda n: n * 2048), st.floats(1, 500), per_1000=st.floats(0, 50)),
    min_size=1,
    max_size=8,
)


@given(plans, st.integers(1, 64).map(lambda n: n * 2048))
def test_what_a_mode_promises_holds_on_any_machine(found: list[Scored], native: int) -> None:
    floor = min(native, 8192)
    usable = [p for p in found if p.context >= floor] or [
        p for p in found if p.context == max(q.context for q in found)
    ]
    speed, balanced, context = (choose(mode, found, CHATS, native=native) for mode in ("speed", "balanced", "context"))
    assert all(chosen.scored in usable for chosen in (speed, balanced, context))
    job = scaled_mix(CHATS, min(plan.context for plan in usable))
    costs = {p.key: cost_s(p.curve, job) for p in usable}
    best, own = min(costs.values()), cost_s(balanced.scored.curve, job)
    half_ms = balanced.scored.curve.decode_ms(balanced.scored.context / 2)
    is_quick = balanced.scored.context <= min(native, AGENT_CONTEXT) and half_ms <= 1000 / QUICK_TOKENS_PER_S
    assert is_quick or best / own >= speed_kept(balanced.scored.context, native)
    larger = [cost_s(p.curve, job) for p in usable if p.context > balanced.scored.context]
    assert not any(own >= 0.9 * cost for cost in larger if best / cost >= SPEED_KEPT)  # but at a price
    assert context.speed.ms == context.scored.curve.decode_ms(context.at)


@given(st.lists(st.integers(1, 100), min_size=1, unique=True), st.integers(0, 100))
def test_bisection_finds_the_largest_window_that_holds_in_a_few_steps(contexts: list[int], threshold: int) -> None:
    held: list[tuple[int, bool]] = []
    while (context := next_context(contexts, held)) is not None:
        held.append((context, context <= threshold))
        assert len(held) <= len(contexts).bit_length()
    kept = [context for context, is_met in held if is_met]
    assert max(kept, default=0) == max((w for w in contexts if w <= threshold), default=0)


def test_of_several_plans_with_one_window_it_is_enough_that_one_holds() -> None:
    held = [(8192, False), (16384, True), (16384, False)]
    assert next_context([8192, 16384, 32768, 65536], held) == 65536
    assert next_context([8192, 16384, 32768, 65536], [*held, (65536, False)]) == 32768
    assert next_context([8192, 16384], held) is None


@given(st.floats(1, 66), st.floats(0.1, 50), st.integers(1, 64).map(lambda n: n * 2048), st.integers(256, 8192))
def test_the_readable_part_of_a_window_is_the_largest(ms: float, per_1000: float, context: int, least: int) -> None:
    curve = scored(context, ms, per_1000=per_1000).curve
    size = readable_context(curve, context, least=least)
    smaller = range(256, context, 256)
    readable = [each for each in smaller if each >= least and is_readable(curve, each, spare=0.07)]
    assert size == max(readable, default=None)


def wanted(mode: Mode, *plans: Scored, failed: tuple[int, ...] = (), native: int = 131072) -> int | None:
    return wanted_context(mode, (8192, 16384, 32768, 65536), plans, CHATS, native=native, failed=failed)


def test_a_mode_wants_the_middle_of_the_windows_that_may_be_the_largest_to_meet_its_condition() -> None:
    fast = scored(8192, 40.0)
    assert wanted("speed", fast) is None
    assert wanted("balanced", fast) == wanted("context", fast) == 32768
    assert wanted("balanced", fast, scored(32768, 54.0)) == 65536
    assert wanted("balanced", fast, scored(32768, 60.0)) == 16384, "slower than seven tenths of the best"
    assert wanted("context", fast, scored(32768, 60.0)) == 65536, "but still read along with"
    assert wanted("context", fast, failed=(32768,)) == 16384
    assert wanted("balanced", fast, failed=(16384,)) is None
    assert wanted("context", fast, scored(65536, 60.0)) is None


def test_for_context_a_part_of_a_window_is_wanted_where_all_of_it_is_too_slow_when_full() -> None:
    """10 ms and 5 more with every 1,000 tokens: 15 tok/s are reached at 11,333, with 7 % to spare at 10,461."""
    slow = scored(16384, 10.0, per_1000=5.0)
    assert wanted("context", slow) == 8192
    assert wanted("context", slow, failed=(8192,)) == 10496
    assert wanted("context", slow, scored(8192, 10.0)) == 10496
    assert wanted("context", slow, scored(8192, 10.0), scored(10496, 10.0)) is None
    assert wanted("context", slow, scored(8192, 10.0), scored(10496, 90.0)) is None, "one look at a part is enough"
    assert wanted("context", slow, failed=(8192, 10496)) is None
    assert wanted("context", scored(8192, 90.0)) is None, "no mode goes below that"
    assert wanted("context", scored(8192, 10.0, per_1000=15.0), native=2048) == 3328


@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(0, 20)), min_size=4, max_size=4),
    st.sampled_from(["balanced", "context"]),
)
def test_measuring_what_a_mode_wants_comes_to_an_end(speeds: list[tuple[float, float]], mode: Mode) -> None:
    contexts = (8192, 16384, 32768, 65536)
    plans = [scored(contexts[0], speeds[0][0], per_1000=speeds[0][1])]
    while (context := wanted(mode, *plans)) is not None:
        assert context not in {plan.context for plan in plans}
        ms, per_1000 = speeds[contexts.index(context)] if context in contexts else (90.0, 0.0)
        plans.append(scored(context, ms, per_1000=per_1000))
        assert len(plans) <= 4


@pytest.mark.parametrize("mode", ["speed", "balanced"])
@pytest.mark.parametrize("workload", ["chat", "agent", "document"])
def test_one_that_was_not_followed_to_its_knee_does_not_win_by_that(mode: Mode, workload: str) -> None:
    knee = ((32, 14.5), (640, 17.7), (2048, 55.5))
    points = tuple(Point(depth=at, decode_ms=ms, prefill_ms=1.0, prefill_tokens=at) for at, ms in knee)
    deep = Scored(key="deep", context=32768, curve=Curve(points=points))
    slower = tuple(replace(point, decode_ms=point.decode_ms * 1.5) for point in points[:2])
    shallow = Scored(key="shallow", context=32768, curve=Curve(points=slower), tie_break=3)
    found = choose(mode, [shallow, deep], parse_mix(workload), native=32768)
    assert found.scored is deep
    assert found.speed == deep.curve.decode(found.at)


def test_a_full_window_is_told_by_the_curves_that_go_deepest() -> None:
    """A curve of two points that is flat so far says nothing about deeper contexts."""
    bent = scored(8192, 10.0, per_1000=20.0, key="bent")
    flat = replace(bent, key="flat", curve=Curve(points=scored(8192, 10.0).curve.points[:2]))
    assert measured_deepest([flat, bent]) == [bent]
    found = choose("context", [flat, bent], CHATS, native=8192)
    assert found.scored.key == "bent"
    assert found.why.startswith("no context decodes 15 tok/s when full")


def test_a_lucky_glance_is_neither_the_fastest_nor_what_others_have_to_keep_up_with() -> None:
    seen, larger = scored(8192, 40.0), scored(32768, 56.0)
    glanced = replace(seen, key="glance", curve=scored(8192, 38.4).curve, noise=0.07)
    assert choose("speed", (seen, glanced), CHATS, native=131072).scored.key == seen.key
    assert choose("balanced", (seen, larger), CHATS, native=131072).scored.key == larger.key
    assert choose("balanced", (seen, glanced, larger), CHATS, native=131072).scored.key == larger.key
    assert choose("balanced", (replace(glanced, noise=0.0), larger), CHATS, native=131072).scored.context == 8192
