"""How likely a model is wanted again: what a history learns, and what holds for every history."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.fleet.use import HORIZONS_S, NEVER_USED, UseHistory, use_chance
from tests.builders import examples

every = settings(max_examples=examples(200), deadline=None)
intervals = st.lists(st.floats(0, 1e7), min_size=0, max_size=80)
seconds = st.floats(0, 1e7)


def history(intervals_s: Iterable[float], at_s: float = 1000.0) -> UseHistory:
    """Return a history of requests, the first at `at_s`, the others after these intervals."""
    found = UseHistory()
    for time_s in accumulate(intervals_s, initial=at_s):
        found.note(time_s)
    return found


def test_a_model_that_was_never_asked_has_a_small_chance() -> None:
    assert use_chance(UseHistory(), 5.0) == pytest.approx(NEVER_USED)
    assert UseHistory().chance(5.0, 1e6) == NEVER_USED < use_chance(history([]), 1000.0) < 1


def test_a_steady_beat_is_learned() -> None:
    """Every 100 s: hardly ever sooner, nearly always by then."""
    beat = history([100.0] * 30)
    last_s = 1000.0 + 30 * 100
    assert beat.chance(last_s, 30) < 0.1
    assert beat.chance(last_s, 130) > 0.95
    assert beat.chance(last_s + 60, 60) > 0.9


def test_a_beat_that_was_missed_is_no_longer_expected() -> None:
    beat = history([100.0] * 30)
    last_s = 1000.0 + 30 * 100
    assert beat.chance(last_s + 10_000, 100) < 0.05 < beat.chance(last_s + 50, 100)


def test_short_pauses_do_not_wash_out_the_nights() -> None:
    """After a hundred requests of a chat it is still known that a pause of an hour means the night."""
    day = [30.0] * 100 + [50_000.0]
    worker = history(day * 5 + [30.0] * 100)
    last_s = 1000.0 + 5 * sum(day) + 100 * 30
    assert worker.chance(last_s, 60) > 0.9
    assert worker.chance(last_s + 3600, 3600) < 0.2
    assert worker.chance(last_s + 3600, 70_000) > 0.6


def test_a_new_habit_replaces_the_old_one() -> None:
    changed = history([10.0] * 200 + [1000.0] * 100)
    assert changed.chance(1000.0 + 2000 + 100_000, 20) < 0.1


def test_the_more_often_asked_is_the_likelier() -> None:
    often, seldom = history([60.0] * 40, at_s=0.0), history([1200.0] * 2, at_s=0.0)
    assert use_chance(often, 2430.0) > use_chance(seldom, 2430.0)


def test_a_clock_that_goes_back_is_no_interval() -> None:
    back = history([100.0, 100.0])
    back.note(5.0)
    assert back.chance(1200.0, 50.0) == history([100.0, 100.0, 0.0]).chance(1200.0, 50.0)


@every
@given(intervals, seconds, seconds, seconds)
def test_a_chance_is_one_and_grows_with_the_time_given(
    intervals_s: list[float], since_s: float, within_s: float, more_s: float
) -> None:
    now_s = 1000.0 + sum(intervals_s) + since_s
    found = history(intervals_s)
    less, more = found.chance(now_s, within_s), found.chance(now_s, within_s + more_s)
    assert 0 <= less <= more + 1e-12
    assert more <= 1
    assert 0 <= use_chance(found, now_s) <= 1


@every
@given(intervals, seconds, seconds)
def test_asking_changes_nothing_and_the_clock_may_start_anywhere(
    intervals_s: list[float], since_s: float, within_s: float
) -> None:
    now_s = 1000.0 + sum(intervals_s) + since_s
    found = history(intervals_s)
    before = found.chance(now_s, within_s)
    for horizon_s in HORIZONS_S:
        found.chance(now_s, horizon_s)
    assert found.chance(now_s, within_s) == before
    whole = [float(int(each)) for each in intervals_s]  # whole seconds: sums are exact
    early, late = history(whole, at_s=0.0), history(whole, at_s=4096.0)
    assert early.chance(sum(whole) + 7, 64.0) == late.chance(sum(whole) + 4096 + 7, 64.0)


def test_memory_is_bounded() -> None:
    few, many = history([5.0] * 3), history([float(each % 1000) for each in range(5000)])

    def size(found: UseHistory) -> int:
        return sum(len(value) for value in vars(found).values() if isinstance(value, list))

    assert size(few) == size(many) < 64
