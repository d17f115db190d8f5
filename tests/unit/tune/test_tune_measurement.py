"""What one look at a plan is taken for, what several come to, and at which depths they are."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.engine import Completion
from appliance.engines.llama.api.client import parse_completion
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.errors import EngineNotReadyError
from appliance.plan import with_launch
from appliance.settings import resolve_settings
from appliance.tune.figures.curve import LONGER, NOISE, Point
from appliance.tune.figures.measurement import Measurement, curve_of, noise_of, scored, tie_break
from appliance.tune.figures.modes import choose
from appliance.tune.figures.workload import CHAT, only
from appliance.tune.search.candidates import (
    EMPTY,
    candidates,
    deep_depth,
    empty_depth,
    reading_s,
    trial_of,
    within,
    work_depth,
)
from appliance.tune.search.search import OutOfMemory, Trial
from appliance.tune.trials.run_trial import (
    AT_LEAST_S,
    DECODE_TOKENS,
    FEWEST_TOKENS,
    WARM_TOKENS,
    FirstSampling,
    Sampling,
    plain_point_of,
    point_of,
    points_of,
    tokens_within,
)
from tests.builders import BUSY, ENGINE, IMAGE, QUIET, SMALL, machine

SPACE = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(), SMALL)
PLANS = SPACE.all()


def point(depth: int, decode: float, prefill: float = 1.0, read: int = 512) -> Point:
    return Point(depth=depth, decode_ms=decode, prefill_ms=prefill, prefill_tokens=read)


def look(*points: Point, key: str = "a", is_long: bool = False, is_busy: bool = False) -> Measurement:
    return Measurement(key=key, points=points, is_long=is_long, conditions=BUSY if is_busy else QUIET)


def test_candidates_have_the_keys_and_the_order_of_the_plans_and_their_knobs() -> None:
    found = candidates(SPACE, PLANS)
    assert [each.key for each in found] == [plan.key for plan in PLANS]
    for each, plan in zip(found, PLANS, strict=True):
        knobs = each.by_knob
        assert (knobs["threads"], knobs["ubatch"], knobs["kv_type"]) == (
            launch_of(plan).threads,
            launch_of(plan).ubatch,
            plan.kv_type,
        )
        assert (each.context, knobs["load_mode"]) == (plan.context, launch_of(plan).load_mode)
        assert each.work.cpu_ms > 0
        assert each.work.gpu_ms == 0
        assert each.needs == ()  # on the host: what is mapped there needs no room


def test_what_failed_of_memory_is_a_trial_that_lacked_it_and_any_other_failure_is_not() -> None:
    lacked = Measurement(key="a", error="out of memory", lacking_device="CUDA1", lacking_mib=12.0, seconds=3.0)
    wanted = Trial(key="a", lacking=OutOfMemory(device="CUDA1", missing_mib=12.0))
    assert trial_of(lacked) == wanted
    assert trial_of(replace(lacked, lacking_device=None, lacking_mib=None)) == Trial(key="a")
    good = replace(look(point(32, 10.0), is_long=True), load_s=2.0)
    assert trial_of(good) == Trial(key="a", points=good.points, is_long=True, load_s=2.0)


def test_several_looks_come_to_their_geometric_mean_and_a_long_one_counts_as_often_as_it_decoded_more() -> None:
    found = curve_of([look(point(32, 10.0)), look(point(32, 20.0), point(512, 40.0), is_long=True)])
    assert found.ordered[0].decode_ms == pytest.approx(math.exp((math.log(10) + LONGER * math.log(20)) / (1 + LONGER)))
    assert found.ordered[1].decode_ms == pytest.approx(40.0)


def test_prefill_is_the_geometric_mean_of_the_looks_that_read_the_most() -> None:
    found = curve_of([look(point(512, 10.0, prefill, read)) for prefill, read in ((2.0, 480), (9.0, 16), (8.0, 480))])
    assert (found.ordered[0].prefill_ms, found.ordered[0].prefill_tokens) == (pytest.approx(4.0), 480)


def test_disturbed_looks_count_only_where_there_is_no_other() -> None:
    busy, calm = look(point(32, 90.0), is_busy=True), look(point(32, 10.0))
    assert curve_of([busy, calm]).ordered[0].decode_ms == pytest.approx(10.0)
    assert curve_of([busy]).ordered[0].decode_ms == pytest.approx(90.0)


def test_plans_are_rated_by_their_own_looks() -> None:
    best, failed, never, *_ = PLANS
    seen = [
        look(point(32, 10.0), key=best.key),
        Measurement(key=failed.key, error="no"),
        look(point(32, 30.0), key="of no plan"),
    ]
    assert [each.key for each in scored([best, failed, never], seen)] == [best.key]


def test_the_noise_of_a_plans_times_is_that_of_all_its_calm_looks() -> None:
    short, longer = look(point(32, 10.0)), look(point(32, 10.0), is_long=True)
    busy = look(point(32, 10.0), is_busy=True)
    few = look(replace(point(32, 10.0), noise_factor=2.0))
    assert noise_of([short]) == noise_of([busy]) == noise_of([short, busy]) == pytest.approx(NOISE)
    assert noise_of([few]) == pytest.approx(2 * NOISE)
    assert noise_of([short, longer]) == pytest.approx(NOISE / math.sqrt(1 + LONGER))


def test_a_glance_wins_against_what_was_looked_at_longer_only_where_it_is_faster_by_more_than_its_noise() -> None:
    best, other = (with_launch(PLANS[0], threads=threads) for threads in (1, 2))
    longer = look(point(32, 10.0, 0.1), point(640, 10.0, 0.1, 608), key=best.key, is_long=True)
    for decode_ms, winner in ((9.8, best), (8.0, other)):
        lucky = look(point(32, decode_ms, 0.1), point(640, decode_ms, 0.1, 608), key=other.key)
        found = choose("speed", scored([best, other], [lucky, longer]), only(CHAT), native=best.context)
        assert found.scored.key == winner.key


def test_what_failed_at_its_last_look_is_no_choice_while_there_is_another() -> None:
    best, other = PLANS[:2]
    good = look(point(32, 10.0), key=best.key)
    failed = Measurement(key=best.key, error="out of memory in a deep context")
    fine = look(point(32, 20.0), key=other.key)
    assert [each.key for each in scored([best, other], [good, fine, failed])] == [other.key]
    assert [each.key for each in scored([best, other], [failed, fine, good])] == [best.key, other.key]
    assert [each.key for each in scored([best, other], [good, failed])] == [best.key]


def test_an_exact_cache_is_worth_more_than_mapped_weights() -> None:
    plan = PLANS[0]
    kinds = [(kv_type, mode) for kv_type in ("q8_0", "f16") for mode in ("none", "mmap")]
    plans = [with_launch(replace(plan, kv_type=kv_type), load_mode=mode) for kv_type, mode in kinds]
    assert [tie_break(each) for each in plans] == [0, 1, 2, 3]


def test_depths_are_empty_the_workloads_and_what_the_time_allows() -> None:
    assert empty_depth(8192, 24) == EMPTY
    assert work_depth(8192, 24, wanted=640, prefill_ms=1.0, seconds=60) == 640
    assert deep_depth(8192, 24, prefill_ms=1.0, seconds=60, work=640) == 8192 - 25
    assert deep_depth(8192, 24, prefill_ms=10.0, seconds=5, work=640) == 640 + 500
    assert deep_depth(8192, 24, prefill_ms=10.0, seconds=1, work=640) is None  # too near to be worth it


def test_a_very_slow_machine_is_measured_at_what_it_can_carry() -> None:
    assert work_depth(8192, 24, wanted=640, prefill_ms=100.0, seconds=10) == EMPTY + 100
    assert work_depth(8192, 24, wanted=640, prefill_ms=10_000.0, seconds=10) is None
    assert work_depth(8192, 24, wanted=640, prefill_ms=10.0, seconds=-5) is None


def test_where_weights_are_copied_for_each_batch_all_of_one_is_read_or_none() -> None:
    """DeepSeek-V3 with its experts in host memory: 32 tokens take 10 s of copies, and 608 more 17 s, not 200."""
    assert work_depth(8192, 24, wanted=640, prefill_ms=330.0, seconds=15, copied_batch=4096) == 640
    too_few = work_depth(8192, 24, wanted=640, prefill_ms=330.0, seconds=6, copied_batch=4096)
    assert too_few is None, "fewer tokens than at an empty context"
    assert reading_s(608, 330.0, first=32, copied_batch=4096) == pytest.approx(21.1, abs=0.1)
    assert reading_s(608, 330.0, first=32, copied_batch=512) == pytest.approx(42.2, abs=0.1)
    assert reading_s(608, 330.0, first=32, copied_batch=0) == pytest.approx(200.6, abs=0.1)


def test_a_tiny_context_has_room_for_all_depths() -> None:
    assert empty_depth(256, 24) == 32
    assert work_depth(256, 24, wanted=640, prefill_ms=0.1, seconds=60) == 115
    assert deep_depth(256, 24, prefill_ms=0.1, seconds=60, work=115) == 231


@given(
    st.integers(256, 2**20), st.integers(1, 64), st.integers(1, 70_000), st.floats(0.001, 10_000), st.floats(-100, 1000)
)
def test_depths_rise_and_leave_room_to_decode(
    context: int, tokens: int, wanted: int, prefill_ms: float, seconds: float
) -> None:
    found = [empty_depth(context, tokens)]
    work = work_depth(context, tokens, wanted=wanted, prefill_ms=prefill_ms, seconds=seconds)
    if work:
        deep = deep_depth(context, tokens, prefill_ms=prefill_ms, seconds=seconds, work=work)
        found += [work, *([deep] if deep else [])]
        assert work <= wanted
    assert found[0] >= 1
    assert found == sorted(set(found))
    assert found[-1] + tokens < context
    assert within(found, context, tokens) == tuple(found)
    assert within(found, found[-1] + tokens, tokens) == tuple(found[:-1])


def reply(**changes: Any) -> dict[str, Any]:
    timings = {"prompt_n": 480, "cache_n": 32, "predicted_n": 24, "prompt_ms": 960.0, "predicted_ms": 230.0}
    return {"timings": {**timings, **changes}}


def replied(**changes: Any) -> Completion:
    return parse_completion(reply(**changes))


def test_timings_become_a_point() -> None:
    found = point_of(replied(), 512, DECODE_TOKENS)
    assert found == Point(depth=512, decode_ms=10.0, prefill_ms=2.0, prefill_tokens=480)  # 24 tokens are 23 steps


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(-10, 1000), st.integers(1, 32))
def test_a_first_point_ends_in_time_or_in_a_second_or_is_not_begun(
    decode_ms: float, prefill_ms: float, left_s: float, depth: int
) -> None:
    warmed = Point(depth=32, decode_ms=decode_ms, prefill_ms=prefill_ms, prefill_tokens=32)
    tokens = tokens_within(warmed, depth, left_s)
    room_ms = 1000 * max(left_s, AT_LEAST_S)
    if tokens is None:
        assert depth * prefill_ms + (FEWEST_TOKENS - 1) * decode_ms > room_ms * (1 - 1e-9)
    else:
        assert FEWEST_TOKENS <= tokens <= DECODE_TOKENS
        assert depth * prefill_ms + (tokens - 1) * decode_ms <= room_ms * (1 + 1e-9)
        assert tokens == DECODE_TOKENS or depth * prefill_ms + tokens * decode_ms > room_ms * (1 - 1e-9)


def test_a_point_says_in_which_batches_weights_were_copied_for_it() -> None:
    class Running:
        async def warm(self) -> Point:
            return await self.run(32, 3)

        async def run(self, depth: int, tokens: int) -> Point:
            return Point(depth=depth, decode_ms=100.0, prefill_ms=1.0, prefill_tokens=tokens)

    plan = replace(PLANS[0], context=8192)
    first = FirstSampling(wanted=640, work_s=10, deep_s=10, copied_batch=2048)
    looks: tuple[Sampling | FirstSampling, ...] = (first, Sampling(depths=(32, 640), copied_batch=2048))
    for look in looks:
        points = asyncio.run(points_of(Running(), plan, look, lambda _: None))
        assert [point.depth for point in points][:2] == [32, 640]
        assert {point.copied_batch for point in points} == {2048}


@pytest.mark.parametrize("before", [0, 1, 2])
def test_depths_that_were_measured_before_an_interruption_are_not_measured_again(before: int) -> None:
    class Running:
        def __init__(self) -> None:
            self.asked: list[tuple[int, int]] = []

        async def warm(self) -> Point:
            return Point(depth=32, decode_ms=100.0, prefill_ms=1.0, prefill_tokens=32)

        async def run(self, depth: int, tokens: int) -> Point:
            self.asked.append((depth, tokens))
            return Point(depth=depth, decode_ms=100.0, prefill_ms=1.0, prefill_tokens=depth)

    plan = replace(PLANS[0], context=8192)
    for look in (FirstSampling(wanted=640, work_s=10, deep_s=10), Sampling(depths=(32, 640, 2048))):
        whole, again, told = Running(), Running(), list[tuple[Point, ...]]()
        points = asyncio.run(points_of(whole, plan, look, lambda _: None))
        known = points[:before]
        found = asyncio.run(points_of(again, plan, look, lambda _: None, known=known, on_points=told.append))
        assert found == points
        assert told == [points[:count] for count in range(before + 1, len(points) + 1)]
        measured = [asked for asked in again.asked if asked[1] == DECODE_TOKENS]
        assert measured == whole.asked[before:]
        # What is not in the new engine's cache is read first, so that a step is the same as without the interruption.
        assert again.asked[: len(again.asked) - len(measured)] == [(point.depth, WARM_TOKENS) for point in known[-1:]]


def test_a_machine_with_half_a_token_a_second_is_looked_at_for_a_quarter_of_a_minute() -> None:
    warmed = Point(depth=32, decode_ms=2000.0, prefill_ms=60.0, prefill_tokens=32)
    assert tokens_within(warmed, 32, 15.0) == 7
    assert tokens_within(warmed, 32, 120.0) == DECODE_TOKENS
    assert tokens_within(warmed, 32, 5.0) is None


def test_a_point_of_few_tokens_says_how_far_it_may_be_off_and_counts_less() -> None:
    few = point_of(replied(predicted_n=4, predicted_ms=6000.0), 512, 4)
    assert few.noise_factor == pytest.approx((23 / 3) ** 0.5)
    assert few.speed.describe() == "0.5 tok/s (within 19 %: few tokens)"
    assert "0.5 tok/s (within 19 %: few tokens) at 512" in Measurement(key="a", points=(few,)).describe()
    usual = replace(few, decode_ms=1000.0, noise_factor=1.0)
    (mean,) = curve_of([Measurement(key="a", points=(p,)) for p in (few, usual)]).points
    assert mean.noise_factor == 1.0
    assert mean.decode_ms == pytest.approx(2000 ** (3 / 26) * 1000 ** (23 / 26))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_n": 479},
        {"prompt_n": 0, "cache_n": 511},
        {"cache_n": 0},
        {"predicted_n": 23},
        {"predicted_n": 0},
        {"predicted_ms": 0.0},
        {"prompt_ms": 0.0},
    ],
)
def test_other_work_than_asked_is_refused_and_never_becomes_a_figure(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match=r"other work than asked|gave no times"):
        point_of(replied(**changes), 512, DECODE_TOKENS)


def test_what_was_decoded_with_guesses_is_no_figure_of_plain_steps() -> None:
    assert plain_point_of(replied(draft_n=0), 512, DECODE_TOKENS) == point_of(replied(draft_n=9), 512, DECODE_TOKENS)
    with pytest.raises(EngineNotReadyError, match="engine made 9 draft tokens while plain decode steps"):
        plain_point_of(replied(draft_n=9), 512, DECODE_TOKENS)


@pytest.mark.parametrize(
    "document", [{"timings": 3}, {"timings": {"prompt_n": "many"}}, {"timings": {"prompt_n": []}}, {"tokens": 5}]
)
def test_timings_that_are_no_numbers_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match="engine gave no timings"):
        parse_completion(document)


@pytest.mark.parametrize("document", [{}, {"timings": None}, {"timings": {}}, {"error": {"message": "no"}}])
def test_a_reply_without_timings_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match="other work than asked"):
        point_of(parse_completion(document), 512, DECODE_TOKENS)
