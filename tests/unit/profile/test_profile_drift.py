"""Probes compared with the measurements: which count, which do not, and when a profile becomes stale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import Kind, Speculation, with_launch
from appliance.profile import Profile
from appliance.profile.drift import (
    DRAFT_SHARE,
    MIN_PREFILL_TOKENS,
    TOKENS,
    TOLERANCE,
    Baseline,
    Compared,
    Drift,
    DriftState,
    baseline_of,
)
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.trials.run_trial import DECODE_TOKENS
from tests.builders import measured, profile

DEPTH = 512
POINT = Point(depth=DEPTH, decode_ms=20.0, prefill_ms=2.0, prefill_tokens=480)
PLAIN = Baseline(point=POINT, prefill_ms=2.5)
DRAFTING = replace(PLAIN, draft_slack=1 + DRAFT_SHARE)
OPEN = Drift()
# Times as long as measured; what is within a hair of a limit is left to the other tests.
AS_MEASURED = st.floats(0.9, 1 / (1 - TOLERANCE) - 0.001)
SLOW = st.floats(1 / (1 - TOLERANCE) + 0.001, 1000.0)
ANY = st.floats(0.001, 1000.0)


def probed(decode: float = 1.0, prefill: float = 1.0, *, baseline: Baseline = PLAIN) -> tuple[Compared, ...]:
    """Compare a probe with the baseline: its decode and prefill took `decode` and `prefill` times as long as
    measured."""
    seen = Point(depth=DEPTH, decode_ms=20.0 * decode, prefill_ms=2.5 * prefill, prefill_tokens=DEPTH)
    return baseline.compare(seen)


def after(*probes: tuple[Compared, ...], drift: Drift = OPEN) -> Drift:
    for found in probes:
        drift = drift.observe(found)
    return drift


def test_the_second_probe_finds_an_engine_at_half_its_speed_and_says_so_with_figures() -> None:
    once = after(probed(2.0))
    assert once.state is DriftState.UNDECIDED
    twice = after(probed(1.25), drift=once)
    assert twice.state is DriftState.STALE
    assert twice.words == "decoded 40.0 tok/s at 512 tokens, 50.0 measured: 20 % slower, twice"
    assert after(*[probed()] * 9, drift=twice) == twice


def test_two_that_are_as_fast_make_it_valid_and_that_is_final() -> None:
    assert after(probed()).state is DriftState.UNDECIDED
    valid = after(probed(), probed(1.1))
    assert (valid.state, valid.note) == (DriftState.VALID, "")
    assert valid.words == "two probes were no slower than measured, within 15 %"
    assert after(*[probed(9.0)] * 9, drift=valid) == valid


def test_neither_is_decided_while_slow_and_good_take_turns() -> None:
    assert after(*[probed(2.0), probed()] * 5).state is DriftState.UNDECIDED
    assert after(probed(2.0), probed(), probed(2.0), probed(2.0)).state is DriftState.STALE


def test_reading_is_compared_on_its_own() -> None:
    assert after(probed(1.0, 2.0), probed(2.0, 1.0)).state is DriftState.UNDECIDED
    found = after(probed(1.0, 2.0), probed(1.0, 2.5))
    assert (found.state, found.words) == (
        DriftState.STALE,
        "read 200.0 tok/s at 512 tokens, 400.0 measured: 50 % slower, twice",
    )
    short = replace(PLAIN, prefill_ms=None)
    assert [one.did for one in probed(baseline=short)] == ["decoded"]
    assert after(*[probed(1.0, 9.0, baseline=short)] * 2).state is DriftState.VALID


def test_faster_than_measured_twice_is_noted_beside_that_it_holds() -> None:
    found = after(probed(0.5), probed(0.8))
    assert (found.state, found.note) == (
        DriftState.VALID,
        "decoded 62.5 tok/s at 512 tokens, 50.0 measured: 25 % faster, twice",
    )
    assert after(probed(0.8), probed()).note == ""
    assert after(probed(1.0, 0.2), probed(1.0, 0.2)).note == ""  # fewer batches read it at once


def test_a_figure_of_few_tokens_is_doubted_as_much_as_is_said_of_it() -> None:
    doubtful = replace(PLAIN, point=replace(POINT, noise_factor=3.4))  # "within 24 %"
    assert after(*[probed(1.25, baseline=doubtful)] * 9).state is DriftState.UNDECIDED
    assert after(*[probed(1.5, baseline=doubtful)] * 2).state is DriftState.STALE
    assert after(*[probed(0.8, baseline=doubtful)] * 2) == replace(
        after(*[probed(baseline=doubtful)] * 2), last=probed(0.8, baseline=doubtful)
    )
    assert after(*[probed(0.6, baseline=doubtful)] * 2).note


def test_a_draft_that_reads_along_is_not_taken_for_drift_and_half_the_speed_is() -> None:
    for decode in (1.2, 1 + DRAFT_SHARE):
        assert after(*[probed(decode, decode, baseline=DRAFTING)] * 9).state is DriftState.UNDECIDED
    for decode in (2.0, 2.4):
        assert after(*[probed(decode, baseline=DRAFTING)] * 2).state is DriftState.STALE
        assert after(*[probed(1.0, decode, baseline=DRAFTING)] * 2).state is DriftState.STALE
    assert after(*[probed(1.1, baseline=DRAFTING)] * 2).state is DriftState.VALID


@given(st.lists(st.tuples(ANY, ANY, st.booleans()), max_size=12), st.sampled_from((PLAIN, DRAFTING)))
def test_what_is_decided_stays_and_disturbed_probes_might_as_well_not_have_been(
    probes: list[tuple[float, float, bool]], baseline: Baseline
) -> None:
    drift = undisturbed = OPEN
    for decode, prefill, is_disturbed in probes:
        before, found = drift, probed(decode, prefill, baseline=baseline)
        drift = drift.observe(found, "other programs took 40 % of the CPU" if is_disturbed else None)
        undisturbed = undisturbed if is_disturbed else undisturbed.observe(found)
        assert before.state in (DriftState.UNDECIDED, drift.state)
        assert (drift.state is DriftState.UNDECIDED) == (drift.words == "")
        assert not any(one.is_slow and (one.is_good or one.is_fast) for one in found)
    assert drift == undisturbed


@given(st.tuples(AS_MEASURED, AS_MEASURED), st.tuples(AS_MEASURED, AS_MEASURED))
def test_a_machine_as_it_was_is_valid_after_two(first: tuple[float, float], second: tuple[float, float]) -> None:
    assert after(probed(*first), probed(*second)).state is DriftState.VALID


@given(st.lists(st.tuples(SLOW, ANY), min_size=2, max_size=2))
def test_one_that_is_slower_is_stale_after_two_whatever_else(probes: list[tuple[float, float]]) -> None:
    for baseline, more in ((PLAIN, 1.0), (DRAFTING, 1 + DRAFT_SHARE)):
        decoding = [probed(more * slow, other, baseline=baseline) for slow, other in probes]
        reading = [probed(other, more * slow, baseline=baseline) for slow, other in probes]
        assert after(*decoding).state is after(*reading).state is DriftState.STALE


def looked(*points: tuple[int, int]) -> Profile:
    """Return a profile whose best plan has these points: depth, and the tokens that were read for it."""
    made = profile()
    of_best = tuple(Point(depth=d, decode_ms=10.0 + d, prefill_ms=d / 100, prefill_tokens=n) for d, n in points)
    return replace(made, measurements=(replace(measured(made.plan), points=of_best),))


def test_what_is_repeated_is_the_middle_depth_that_the_context_holds() -> None:
    found = looked((32, 32), (512, 480), (2048, 1536))
    baseline = baseline_of(found, found.plan)
    assert baseline is not None
    assert (baseline.point.depth, baseline.point.decode_ms) == (512, 522.0)
    assert baseline.prefill_ms == pytest.approx((32 * 0.32 + 480 * 5.12) / 512)
    assert baseline.draft_slack == 1.0
    assert TOKENS == 2 * DECODE_TOKENS
    deep = looked((32, 32), (found.plan.context - TOKENS, 512))
    baseline = baseline_of(deep, deep.plan)
    assert baseline is not None
    assert baseline.point.depth == 32
    full = looked((found.plan.context - TOKENS, 512))
    assert baseline_of(full, full.plan) is None


@pytest.mark.parametrize("points", [((512, 480),), ((512, 0),), ((MIN_PREFILL_TOKENS - 1, MIN_PREFILL_TOKENS - 1),)])
def test_reading_that_was_not_measured_from_its_beginning_is_not_compared(points: tuple[tuple[int, int], ...]) -> None:
    found = looked(*points)
    baseline = baseline_of(found, found.plan)
    assert baseline is not None
    assert baseline.prefill_ms is None


@pytest.mark.parametrize(("kind", "slack"), [("ngram", 1.0), ("draft", 1 + DRAFT_SHARE), ("mtp", 1 + DRAFT_SHARE)])
def test_only_a_draft_takes_time_of_its_own(kind: Kind, slack: float) -> None:
    found = looked((512, 512))
    baseline = baseline_of(found, replace(found.plan, speculation=Speculation(kind=kind, tokens=3)))
    assert baseline is not None
    assert baseline.draft_slack == slack


def test_the_baseline_is_of_the_plan_that_was_measured() -> None:
    found = profile()
    baseline = baseline_of(found, found.plan)
    assert baseline is not None
    assert baseline.point == found.measurements[0].points[1]
    for changed in ({"context": 4096}, {"kv_type": "q8_0"}):
        assert baseline_of(found, replace(found.plan, **changed)) is None
    for launched in ({"threads": 3}, {"ubatch": 256}, {"load_mode": "dio"}):
        assert baseline_of(found, with_launch(found.plan, **launched)) is None
    failed = with_launch(found.plan, threads=64)
    only_failed = replace(found, measurements=(Measurement(key=failed.key, error="engine exited with code 1"),))
    assert baseline_of(only_failed, failed) is None
