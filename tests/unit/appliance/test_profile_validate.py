"""Requests compared with a profile's curve: what counts, what does not, and when a profile no longer holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile

from appliance.engines.llama_timings import Served
from appliance.profile.validate import (
    GOOD_ENOUGH,
    MIN_DECODE_STEPS,
    MIN_PREFILL_TOKENS,
    PROBES_MAX,
    TOLERANCE,
    Baseline,
    Holds,
    Verdict,
    baseline_of,
    compare,
    should_probe,
)
from appliance.tune.curve import Curve, Point
from appliance.tune.measurement import Measurement

# The knee that was seen on a CPU; 2 ms a token of prefill, whatever the depth.
TIMES = ((32, 14.5), (512, 17.7), (1024, 25.6), (2048, 55.5))
CURVE = Curve(points=tuple(Point(depth=d, decode_ms=ms, prefill_ms=2.0, prefill_tokens=d) for d, ms in TIMES))
BASELINE = Baseline(curve=CURVE, ubatch=256)
OPEN = Holds(baseline=BASELINE)


def request(
    depth: int = 600, *, made: int = 65, slower: float = 1.0, read: int = 0, prefill: float = 1.0, **more: int
) -> Served:
    """That took `slower` times as long to decode as the curve says, and `prefill` times as long to read."""
    read = read or 1
    return Served(
        cached_tokens=depth - read,
        prompt_tokens=read,
        prefill_ms=prefill * 1000 * CURVE.prefill_s(depth - read, depth),
        decode_tokens=made,
        decode_ms=slower * 1000 * CURVE.decode_s(depth, made - 1),
        was_alone=True,
        **more,
    )


def after(*served: Served, holds: Holds = OPEN) -> Holds:
    for one in served:
        holds = holds.heard(one)
    return holds


def test_two_in_a_row_that_are_slower_are_stale_with_figures() -> None:
    """1/0.76 of the time is 24 % less speed."""
    once = after(request(slower=1 / 0.76))
    assert once.verdict is Verdict.OPEN
    twice = after(request(slower=1 / 0.74), holds=once)
    assert twice.verdict is Verdict.STALE
    speed = 64 / CURVE.decode_s(600, 64)
    assert twice.words == f"decoded {0.76 * speed:.1f} tok/s at 632 tokens, {speed:.1f} measured: 24 % slower, twice"
    assert after(*[request()] * 20, holds=twice) == twice


def test_one_good_request_between_two_slow_ones_is_no_row() -> None:
    slow = request(slower=1.5)
    assert after(slow, request(), slow, request(), slow).verdict is Verdict.OPEN
    assert after(slow, request(), slow, slow).verdict is Verdict.STALE


def test_enough_good_requests_hold_and_that_is_final() -> None:
    holds = after(*[request()] * (GOOD_ENOUGH - 1))
    assert (holds.verdict, holds.good) == (Verdict.OPEN, GOOD_ENOUGH - 1)
    holds = after(request(), holds=holds)
    assert holds.verdict is Verdict.HOLDS
    assert f"{GOOD_ENOUGH} requests" in holds.words
    assert after(*[request(slower=3)] * 3, holds=holds) == holds


@pytest.mark.parametrize("slower", [1.0, 1 / (1 - TOLERANCE) - 0.001, 1 / (1 + TOLERANCE) + 0.001])
def test_what_is_within_the_tolerance_is_good(slower: float) -> None:
    holds = after(*[request(slower=slower)] * GOOD_ENOUGH)
    assert (holds.verdict, holds.note) == (Verdict.HOLDS, "")


def test_faster_than_measured_twice_is_noted_and_holds() -> None:
    holds = after(request(slower=0.8), request(slower=0.5))
    assert holds.verdict is Verdict.OPEN
    assert holds.note.startswith("decoded ")
    assert holds.note.endswith("measured: 25 % faster, twice")
    assert after(*[request()] * 3, holds=holds).verdict is Verdict.HOLDS
    assert after(request(slower=0.8), request(), request(slower=0.5)).note == ""


def test_what_was_disturbed_or_not_alone_counts_for_nothing() -> None:
    slow = request(slower=2.0)
    once = after(slow)
    for _ in range(10):
        once = once.heard(slow, "another process took 40 % of the CPU").heard(replace(slow, was_alone=False))
        once = once.heard(request(), "steal")
    assert once == after(slow)
    assert after(slow, holds=once).verdict is Verdict.STALE


@pytest.mark.parametrize(
    "served",
    [
        request(made=MIN_DECODE_STEPS, slower=3.0),
        request(made=1),
        request(made=2, slower=3.0, read=MIN_PREFILL_TOKENS - 1, prefill=3.0),
        replace(request(), decode_ms=0.0),
        replace(request(), decode_tokens=0, decode_ms=0.001),
    ],
)
def test_what_is_too_short_says_nothing(served: Served) -> None:
    assert compare(BASELINE, served) == ()
    assert after(*[served] * 20) == OPEN


def test_reading_is_compared_on_its_own() -> None:
    slow = request(made=2, read=512, prefill=1.4)
    assert after(slow).verdict is Verdict.OPEN
    found = after(slow, slow)
    assert found.verdict is Verdict.STALE
    assert found.words == "read 357.1 tok/s at 344 tokens, 500.0 measured: 29 % slower, twice"
    both = request(read=512, prefill=1.4)  # decoded as measured: not a good request, and no row of decoding
    assert after(both, request(slower=1.5)).verdict is Verdict.OPEN
    assert after(both).good == 0
    assert after(both, both).verdict is Verdict.STALE


def test_a_batch_that_is_not_full_may_take_as_long_as_a_full_one() -> None:
    """300 tokens may cost as much as 512, or as 2,048: then nothing can be said of what takes longer than 300."""
    wide = Holds(baseline=replace(BASELINE, ubatch=2048))
    found = request(2000, made=2, read=300, prefill=1.9)
    assert after(*[found] * 9) == OPEN
    slow = request(2000, made=2, read=300, prefill=2.1)
    assert after(slow, found, slow).verdict is Verdict.STALE
    assert after(*[slow] * 9, holds=wide) == wide
    assert after(*[request(2000, made=2, read=300)] * GOOD_ENOUGH, holds=wide).verdict is Verdict.HOLDS
    very = request(2000, made=2, read=300, prefill=8.2)
    assert after(very, very, holds=wide).verdict is Verdict.STALE


def doubtful(depth: int) -> Holds:
    """The same curve, where the figure at this depth is of so few tokens that it is said to be "within 24 %"."""
    points = [replace(point, noisier=3.4 if point.depth == depth else 1.0) for point in CURVE.points]
    return Holds(baseline=replace(BASELINE, curve=Curve(points=tuple(points))))


def test_a_figure_of_few_tokens_is_doubted_as_much_as_is_said_of_it() -> None:
    """600 to 664 lies between 512 and 1,024: either may be the doubtful one."""
    for depth in (512, 1024):
        holds = doubtful(depth)
        slow, fast = request(slower=1 / 0.83), request(slower=1 / 1.17)
        assert after(slow, slow).verdict is Verdict.STALE
        assert after(fast, fast).note
        assert after(*[slow] * 9, holds=holds) == holds  # within the doubt: neither slow nor good
        assert after(fast, fast, holds=holds).note == ""
        very = request(slower=1 / 0.83 * 1.24)
        stale = after(very, very, holds=holds)
        least = 64 / CURVE.decode_s(600, 64) / 1.238
        expected = f"{least:.1f} at least to be expected (measured within 24 %: few tokens): 17 % slower, twice"
        assert (stale.verdict, stale.words.split(", ", 1)[1]) == (Verdict.STALE, expected)
        found = after(*[request(slower=1 / 1.25 / 1.238)] * 2, holds=holds)
        assert "at most to be expected (measured within 24 %: few tokens): 25 % faster, twice" in found.note
        assert after(*[request()] * GOOD_ENOUGH, holds=holds).verdict is Verdict.HOLDS


def test_doubt_of_other_depths_is_none_of_its_business() -> None:
    slow = request(slower=1 / 0.83)
    for depth in (32, 2048):
        assert after(slow, slow, holds=doubtful(depth)).verdict is Verdict.STALE
    reading = request(2000, made=2, read=512, prefill=1.4)  # what is doubted is the time to decode
    assert after(reading, reading, holds=doubtful(2048)).verdict is Verdict.STALE


def test_beyond_the_deepest_the_doubt_comes_on_top() -> None:
    ratio = CURVE.decode(4128).high_ms / CURVE.decode(4128).ms
    slow = request(4096, slower=1.3 * ratio)
    assert after(slow, slow).verdict is Verdict.STALE
    assert after(slow, slow, holds=doubtful(2048)).verdict is Verdict.OPEN
    slower = request(4096, slower=1.6 * ratio)
    found = after(slower, slower, holds=doubtful(2048))
    assert "at least to be expected (extrapolated, measured within 24 %: few tokens): 23 % slower" in found.words


def test_beyond_the_deepest_only_worse_than_all_that_could_be_expected_counts() -> None:
    """From 2,048 on a token may cost half again what the last stretch added, or twice it less the one before."""
    (found,) = compare(BASELINE, request(4096))
    assert found.is_extrapolated
    assert not found.is_good
    assert not found.is_slow
    assert after(*[request(4096)] * 10).good == 0
    ratio = CURVE.decode(4128).high_ms / CURVE.decode(4128).ms
    assert after(*[request(4096, slower=ratio)] * 2).verdict is Verdict.OPEN
    assert after(*[request(4096, slower=0.3)] * 3) == OPEN
    found_stale = after(*[request(4096, slower=1.3 * ratio)] * 2)
    assert found_stale.verdict is Verdict.STALE
    assert "at least to be expected (extrapolated): 23 % slower, twice" in found_stale.words
    # One between them that can tell nothing ends no row.
    assert after(request(slower=2.0), request(4096), request(slower=2.0)).verdict is Verdict.STALE


def test_reading_beyond_the_deepest_may_take_half_again_as_long() -> None:
    far = request(4096, made=2, read=1024, prefill=1.7)
    assert after(far, far).verdict is Verdict.OPEN
    farther = request(4096, made=2, read=1024, prefill=1.8)
    assert after(farther, farther).verdict is Verdict.STALE


def test_guessed_tokens_are_compared_only_where_their_cost_was_measured() -> None:
    """60 guesses, 40 accepted: 24 steps instead of 64, and at 0.5 of a step each 30 more."""
    plain_ms = 1000 * CURVE.decode_s(600, 64) / 64
    served = replace(request(), drafted_tokens=60, accepted_tokens=40, decode_ms=54 * plain_ms)
    assert compare(BASELINE, served) == ()
    (found,) = compare(replace(BASELINE, draft_cost=0.5), served)
    assert found.slower == pytest.approx(0.0, abs=1e-9)
    assert found.faster == pytest.approx(0.0, abs=1e-9)
    assert found.speed == pytest.approx(64_000 / (54 * plain_ms))
    (slow,) = compare(replace(BASELINE, draft_cost=0.5), replace(served, decode_ms=1.5 * 54 * plain_ms))
    assert slow.slower == pytest.approx(1 / 3)


def test_the_baseline_is_of_the_plan_that_was_measured() -> None:
    found = profile()
    serving = replace(found.plan, threads=4, threads_batch=4, ubatch=512)
    found = replace(found, plan=serving)
    baseline = baseline_of(found, serving)
    assert baseline is not None
    assert baseline.curve.points == found.measurements[0].points
    assert baseline.ubatch == 512
    for changed in ({"context": 4096}, {"kv_type": "q8_0"}, {"threads": 3}, {"ubatch": 256}, {"load_mode": "dio"}):
        assert baseline_of(found, replace(serving, **changed)) is None
    failed = replace(found.plan, threads=64)
    only_failed = replace(found, measurements=(Measurement(key=failed.key, error="engine exited with code 1"),))
    assert baseline_of(only_failed, failed) is None


def test_we_ask_ourselves_when_nobody_does_and_not_for_ever() -> None:
    assert should_probe(Verdict.OPEN, idle_s=60, after_s=60, probes=0)
    assert not should_probe(Verdict.OPEN, idle_s=59.9, after_s=60, probes=0)
    assert not should_probe(Verdict.HOLDS, idle_s=600, after_s=60, probes=0)
    assert not should_probe(Verdict.STALE, idle_s=600, after_s=60, probes=0)
    assert not should_probe(Verdict.OPEN, idle_s=600, after_s=60, probes=PROBES_MAX)


numbers = st.integers(0, 10_000)
times = st.one_of(st.just(0.0), st.floats(0.01, 1e7))  # the log has two decimals
anything = st.builds(
    Served,
    cached_tokens=numbers,
    prompt_tokens=numbers,
    prefill_ms=times,
    decode_tokens=numbers,
    decode_ms=times,
    drafted_tokens=numbers,
    accepted_tokens=numbers,
    was_alone=st.booleans(),
)
curves = st.lists(
    st.builds(
        Point,
        depth=numbers,
        decode_ms=st.floats(0.01, 1e4),
        prefill_ms=st.one_of(st.just(0.0), st.floats(0.001, 1e3)),
        prefill_tokens=numbers,
        noisier=st.floats(1, 10),
    ),
    min_size=1, max_size=4, unique_by=lambda point: point.depth,
).map(lambda points: Curve(points=tuple(points)))  # fmt: skip


@given(curves, st.lists(anything, max_size=12), st.integers(1, 4096), st.one_of(st.none(), st.floats(0, 2)))
def test_any_requests_give_figures_that_are_numbers(
    curve: Curve, served: list[Served], ubatch: int, draft_cost: float | None
) -> None:
    holds = Holds(baseline=Baseline(curve=curve, ubatch=ubatch, draft_cost=draft_cost))
    for one in served:
        before, holds = holds, holds.heard(one)
        assert before.verdict in (Verdict.OPEN, holds.verdict)
        assert (holds.verdict is Verdict.OPEN) == (holds.words == "")
        assert len(holds.slow) <= 4
        for found in compare(holds.baseline, one):
            assert 0 < found.low <= found.high * (1 + 1e-9)
            assert math.isfinite(found.speed)
            assert 0 <= found.slower <= 1
            assert not (found.is_slow and found.is_good)
            assert not (found.is_slow and found.is_fast)


@given(st.integers(33, 1900), st.integers(MIN_DECODE_STEPS + 1, 140), st.floats(0.87, 1.13))
def test_a_machine_as_it_was_is_never_called_stale(depth: int, made: int, slower: float) -> None:
    assert after(*[request(depth, made=made, slower=slower)] * GOOD_ENOUGH).verdict is Verdict.HOLDS


@given(st.integers(33, 1900), st.integers(MIN_DECODE_STEPS + 1, 140), st.floats(1.2, 50.0))
def test_a_machine_that_is_slower_is_found_after_two(depth: int, made: int, slower: float) -> None:
    assert after(*[request(depth, made=made, slower=slower)] * 2).verdict is Verdict.STALE
