from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from appliance.tune.search import (
    CHAT,
    NOISE,
    Measurement,
    Point,
    Workload,
    best,
    job_s,
    next_plan,
    plan_of,
    scaled,
)
from facts import ENGINE, IMAGE, SMALL, machine
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import EngineNotReadyError
from appliance.plan import Plan, plan
from appliance.settings import resolve_settings
from appliance.tune.candidates import DEEPEST, EMPTY, MIDDLE, deep_depth, empty_depth, middle_depth
from appliance.tune.measure import DECODE_TOKENS, common_depths, parse_timings


def point(depth: int, decode: float, prefill: float = 1.0, read: int = 512) -> Point:
    return Point(depth=depth, decode_ms=decode, prefill_ms=prefill, prefill_tokens=read)


def measured(threads: int, ubatch: int, decode: float = 10.0, prefill: float = 1.0) -> Measurement:
    points = tuple(
        point(depth, decode * (1 + depth / 2048), prefill, read) for depth, read in ((32, 32), (512, 480), (2048, 1536))
    )
    return Measurement(threads=threads, ubatch=ubatch, points=points)


def failed(threads: int, ubatch: int) -> Measurement:
    return Measurement(threads=threads, ubatch=ubatch, error="engine exited with code 1")


PLANS = plan(resolve_settings({}, {}), IMAGE, ENGINE, machine(), SMALL)
GRID = [(t, u) for u in (512, 256) for t in (4, 8, 2)]


def test_the_plans_of_the_made_up_machine_are_the_whole_grid() -> None:
    assert [(p.threads, p.ubatch) for p in PLANS] == GRID


def test_a_job_is_its_prefill_and_the_integral_of_the_curve() -> None:
    flat = Measurement(threads=1, ubatch=1, points=(point(32, 20.0, 2.0, 32), point(512, 20.0, 2.0, 480)))
    assert job_s(flat, CHAT) == pytest.approx(512 * 0.002 + 256 * 0.020)
    rising = Measurement(threads=1, ubatch=1, points=(point(512, 20.0, 2.0), point(768, 40.0, 2.0, 256)))
    assert job_s(rising, CHAT) == pytest.approx(512 * 0.002 + 256 * 0.030)  # the mean of a straight line
    assert job_s(failed(1, 1), CHAT) == float("inf")


@pytest.mark.parametrize(("gain", "wins"), [(NOISE / 2, False), (NOISE * 2, True)])
def test_a_challenger_must_be_better_by_more_than_the_noise(gain: float, wins: bool) -> None:
    first, second = measured(4, 512), measured(8, 512, decode=10.0 * (1 - gain), prefill=1 - gain)
    assert best([first, second], CHAT) is (second if wins else first)
    assert best([second, first], CHAT) is second


def test_failures_never_win_and_without_any_success_there_is_no_best() -> None:
    slow = measured(2, 512, decode=1000.0)
    assert best([failed(4, 512), slow], CHAT) is slow
    assert best([failed(4, 512)], CHAT) is None
    assert best([], CHAT) is None


def walk(speeds: dict[tuple[int, int], Measurement], plans: list[Plan] = PLANS) -> list[Measurement]:
    """The search from its beginning to its end; fails when it asks for a plan twice."""
    done: list[Measurement] = []
    while (chosen := next_plan(plans, done, CHAT)) is not None:
        assert (chosen.threads, chosen.ubatch) not in {(m.threads, m.ubatch) for m in done}
        done.append(speeds[chosen.threads, chosen.ubatch])
    return done


def test_threads_are_measured_at_the_predicted_ubatch_and_then_ubatches_at_the_best_threads() -> None:
    speeds = {(t, u): measured(t, u, decode=5.0 if t == 8 else 10.0) for t, u in GRID}
    assert [(m.threads, m.ubatch) for m in walk(speeds)] == [(4, 512), (8, 512), (2, 512), (8, 256)]


def test_a_first_plan_that_fails_does_not_end_the_search() -> None:
    speeds = {(t, u): measured(t, u) if t != 4 else failed(t, u) for t, u in GRID}
    done = walk(speeds)
    assert best(done, CHAT) is speeds[8, 512]
    assert len(done) == 4


def test_when_every_plan_fails_the_search_ends_all_the_same() -> None:
    done = walk({(t, u): failed(t, u) for t, u in GRID})
    assert best(done, CHAT) is None
    assert len(done) == 4


def test_a_single_plan_is_measured_once() -> None:
    only = [replace(PLANS[0], threads=3, ubatch=64)]
    assert walk({(3, 64): measured(3, 64)}, only) == [measured(3, 64)]


@pytest.mark.parametrize("optimum", GRID)
def test_the_known_optimum_of_a_synthetic_machine_is_found(optimum: tuple[int, int]) -> None:
    """Threads decide decoding and ubatch decides prefill: each value is a fifth slower than the optimum's."""

    def speed(threads: int, ubatch: int) -> Measurement:
        return measured(
            threads,
            ubatch,
            decode=10.0 if threads == optimum[0] else 12.0,
            prefill=5.0 if ubatch == optimum[1] else 6.0,
        )

    done = walk({(t, u): speed(t, u) for t, u in GRID})
    chosen = best(done, CHAT)
    assert chosen is not None
    assert (chosen.threads, chosen.ubatch) == optimum
    assert plan_of(PLANS, chosen) == PLANS[GRID.index(optimum)]
    assert len(done) == 4


times = st.floats(1.0, 200.0)


@given(st.fixed_dictionaries({(t, u): st.tuples(times, times) for t, u in GRID}))
def test_the_winner_is_within_the_noise_of_everything_measured(speeds: dict[Any, tuple[float, float]]) -> None:
    """On any machine at all: the best threads at the predicted ubatch, and then the best ubatch at those threads."""
    table = {(t, u): measured(t, u, decode, prefill) for (t, u), (decode, prefill) in speeds.items()}
    done = walk(table)
    chosen = best(done, CHAT)
    assert chosen is not None
    assert len(done) == 4
    assert job_s(chosen, CHAT) * (1 - NOISE) <= min(job_s(m, CHAT) for m in done) + 1e-9
    assert {m.ubatch for m in done if m.threads == chosen.threads} == {512, 256}


@pytest.mark.parametrize(("context", "tokens_in", "tokens_out"), [(8192, 512, 256), (768, 512, 256), (384, 256, 128)])
def test_a_job_keeps_its_proportions_in_a_smaller_window(context: int, tokens_in: int, tokens_out: int) -> None:
    job = scaled(CHAT, context)
    assert (job.tokens_in, job.tokens_out) == (tokens_in, tokens_out)
    assert (job == CHAT) == (context >= 768)


@given(st.integers(256, 20_000), st.integers(1, 4000), st.integers(1, 4000))
def test_a_scaled_job_fits_its_window(context: int, tokens_in: int, tokens_out: int) -> None:
    job = scaled(Workload(name="w", tokens_in=tokens_in, tokens_out=tokens_out), context)
    assert 0 < job.tokens_in + job.tokens_out <= context


def test_depths_are_empty_middle_and_what_the_time_allows() -> None:
    assert empty_depth(8192, 24) == EMPTY
    assert middle_depth(8192, 24, prefill_ms=1.0, seconds=60) == MIDDLE
    assert deep_depth(8192, 24, prefill_ms=1.0, seconds=60, middle=MIDDLE) == DEEPEST
    assert deep_depth(8192, 24, prefill_ms=10.0, seconds=5, middle=MIDDLE) == MIDDLE + 500
    assert deep_depth(8192, 24, prefill_ms=10.0, seconds=1, middle=MIDDLE) is None  # too near to be worth it


def test_a_very_slow_machine_is_measured_at_what_it_can_carry() -> None:
    assert middle_depth(8192, 24, prefill_ms=100.0, seconds=10) == EMPTY + 100
    assert middle_depth(8192, 24, prefill_ms=10_000.0, seconds=10) is None
    assert middle_depth(8192, 24, prefill_ms=10.0, seconds=-5) is None


def test_a_tiny_context_has_room_for_all_depths() -> None:
    assert empty_depth(256, 24) == 32
    assert middle_depth(256, 24, prefill_ms=0.1, seconds=60) == 115
    assert deep_depth(256, 24, prefill_ms=0.1, seconds=60, middle=115) == 231


@given(st.integers(256, 2**20), st.integers(1, 64), st.floats(0.001, 10_000), st.floats(-100, 1000))
def test_depths_rise_and_leave_room_to_decode(context: int, tokens: int, prefill_ms: float, seconds: float) -> None:
    found = [empty_depth(context, tokens)]
    middle = middle_depth(context, tokens, prefill_ms=prefill_ms, seconds=seconds)
    if middle:
        deep = deep_depth(context, tokens, prefill_ms=prefill_ms, seconds=seconds, middle=middle)
        found += [middle, *([deep] if deep else [])]
    assert found[0] >= 1
    assert found == sorted(set(found))
    assert found[-1] + tokens < context
    assert found[-1] <= DEEPEST


def test_later_plans_are_measured_at_the_depths_of_the_first_good_one() -> None:
    assert common_depths([]) is None
    assert common_depths([failed(1, 1)]) is None
    assert common_depths([failed(1, 1), measured(2, 512)]) == (32, 512, 2048)
    two = Measurement(threads=1, ubatch=1, points=(point(32, 1.0), point(512, 1.0)))
    assert common_depths([two, measured(2, 512)]) == (32, 512)  # never at more: level and slanted ends do not compare


def reply(**changes: Any) -> dict[str, Any]:
    timings = {"prompt_n": 480, "cache_n": 32, "predicted_n": 24, "prompt_ms": 960.0, "predicted_ms": 230.0}
    return {"timings": {**timings, **changes}}


def test_timings_become_a_point() -> None:
    found = parse_timings(reply(), 512, DECODE_TOKENS)
    assert found == Point(depth=512, decode_ms=10.0, prefill_ms=2.0, prefill_tokens=480)  # 24 tokens are 23 steps


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
        parse_timings(reply(**changes), 512, DECODE_TOKENS)


@pytest.mark.parametrize("document", [{}, {"timings": {}}, {"error": {"message": "no"}}])
def test_a_reply_without_timings_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match="other work than asked"):
        parse_timings(document, 512, DECODE_TOKENS)
