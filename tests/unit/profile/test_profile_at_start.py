"""What a start does with a profile."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.profile.at_start import AGAIN_AFTER, TRIES, ProfileState, StartAction, at_start, is_due

STALE = ProfileState(id="0123", stale="decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower, twice")
PINNED = ProfileState(id="0123", stale=STALE.stale, is_pinned=True)
TUNE = ("first", "idle", "off")


@pytest.mark.parametrize(("tune", "may_measure", "is_pinned"), list(product(TUNE, (True, False), (True, False))))
def test_one_that_holds_is_used_without_a_word(tune: str, may_measure: bool, is_pinned: bool) -> None:
    start = at_start(ProfileState(id="0123", is_pinned=is_pinned), tune=tune, may_measure=may_measure)
    assert (start.action, start.words) == (StartAction.USE, "")


@pytest.mark.parametrize(
    ("found", "tune", "may_measure", "act", "event", "words"),
    [
        (None, "first", True, StartAction.MEASURE, "", ""),
        (None, "first", False, StartAction.PREDICT, "tune_elsewhere", "its profile at the next start"),
        (None, "idle", True, StartAction.PREDICT, "tune_later", "until it is measured while idle"),
        (None, "idle", False, StartAction.PREDICT, "tune_elsewhere", "its profile at the next start"),
        (None, "off", True, StartAction.PREDICT, "tune_off", "measuring is off"),
        (None, "off", False, StartAction.PREDICT, "tune_off", "measuring is off"),
        (STALE, "first", True, StartAction.WATCH, "", ""),
        (STALE, "first", False, StartAction.USE, "profile_stale", "used until the next start"),
        (STALE, "idle", True, StartAction.USE, "profile_stale", "used until it is measured again while idle"),
        (STALE, "off", True, StartAction.USE, "profile_stale", "measuring is off, so it is still used"),
        (PINNED, "first", True, StartAction.USE, "profile_stale", "it is pinned, so it is still used"),
        (PINNED, "idle", True, StartAction.USE, "profile_stale", "it is pinned, so it is still used"),
        (PINNED, "off", False, StartAction.USE, "profile_stale", "it is pinned, so it is still used"),
    ],
)
def test_each_case(
    found: ProfileState | None, tune: str, may_measure: bool, act: StartAction, event: str, words: str
) -> None:
    start = at_start(found, tune=tune, may_measure=may_measure)
    assert (start.action, start.event) == (act, event)
    assert words in start.words
    assert start.is_warning == (found is PINNED or (found is STALE and tune == "off"))
    assert start.action is not StartAction.PREDICT or found is None


@pytest.mark.parametrize(("found", "tune"), list(product((None, STALE, PINNED), TUNE)))
def test_nobody_measures_while_another_does(found: ProfileState | None, tune: str) -> None:
    assert at_start(found, tune=tune, may_measure=False).action is not StartAction.MEASURE


SPOILT = "the hypervisor took 5 % of the time"
AGAIN = ProfileState(id="0123", provisional=SPOILT)
NOW = datetime(2026, 7, 1, tzinfo=UTC)


def test_a_provisional_one_that_is_due_is_measured_again_where_nothing_else_is_at_work() -> None:
    look = at_start(AGAIN, tune="first", may_measure=True)
    assert (look.action, look.words) == (StartAction.WATCH, "")
    quiet = at_start(replace(AGAIN, busy=""), tune="first", may_measure=True)
    assert (quiet.action, quiet.event, quiet.is_warning) == (StartAction.MEASURE, "profile_provisional", False)
    assert (
        quiet.words
        == f"profile 0123 is provisional: {SPOILT} when it was measured; nothing else is at work: measuring again"
    )
    busy = at_start(replace(AGAIN, busy="others took 40 %"), tune="first", may_measure=True)
    assert (busy.action, busy.event, busy.is_warning) == (StartAction.USE, "profile_provisional", False)
    assert busy.words.endswith("; used for now, because the machine is busy: others took 40 %")


def test_a_stale_one_is_measured_again_only_where_nothing_else_is_at_work() -> None:
    quiet = at_start(replace(STALE, busy=""), tune="first", may_measure=True)
    assert (quiet.action, quiet.event, quiet.is_warning) == (StartAction.MEASURE, "profile_stale", False)
    assert quiet.words == f"profile 0123 is stale: {STALE.stale}; nothing else is at work: measuring again"
    busy = at_start(replace(STALE, busy="others took 40 %"), tune="first", may_measure=True)
    assert (busy.action, busy.event, busy.is_warning) == (StartAction.USE, "profile_stale", True)
    assert busy.words == (
        f"profile 0123 is stale: {STALE.stale}; used for now, because the machine is busy: others took 40 %"
    )


@given(st.text() | st.none(), st.text() | st.none(), st.text(), st.booleans(), st.sampled_from(TUNE), st.booleans())
def test_a_profile_is_never_measured_again_on_a_busy_machine_or_before_anybody_looked(
    stale: str | None, provisional: str | None, busy: str, is_pinned: bool, tune: str, may_measure: bool
) -> None:
    found = ProfileState(id="0123", stale=stale, provisional=provisional, is_pinned=is_pinned)
    unseen = at_start(found, tune=tune, may_measure=may_measure)
    assert unseen.action in {StartAction.USE, StartAction.WATCH}
    looked = at_start(replace(found, busy=busy), tune=tune, may_measure=may_measure)
    assert looked.action is (
        StartAction.MEASURE if unseen.action is StartAction.WATCH and not busy else StartAction.USE
    )
    assert bool(looked.words) == (stale is not None or unseen.action is StartAction.WATCH)


@pytest.mark.parametrize(
    ("found", "tune", "may_measure"),
    [
        (AGAIN, "idle", True),  # then it is measured while idle
        (AGAIN, "off", True),
        (AGAIN, "first", False),
        (replace(AGAIN, is_pinned=True), "first", True),
    ],
)
def test_a_provisional_one_is_used_at_once_where_a_start_may_not_measure_it(
    found: ProfileState, tune: str, may_measure: bool
) -> None:
    for busy in (None, "", "others took 40 %"):
        start = at_start(replace(found, busy=busy), tune=tune, may_measure=may_measure)
        assert (start.action, start.words) == (StartAction.USE, "")


def test_that_it_no_longer_holds_goes_before_that_it_is_provisional() -> None:
    for busy in (None, "", "others took 40 %"):
        stale = replace(STALE, busy=busy)
        both = replace(stale, provisional=SPOILT)
        assert at_start(both, tune="first", may_measure=True) == at_start(stale, tune="first", may_measure=True)


@pytest.mark.parametrize(
    ("times", "age", "expected"),
    [
        (1, AGAIN_AFTER, True),
        (1, AGAIN_AFTER - timedelta(seconds=1), False),
        (0, 10 * AGAIN_AFTER, False),
        (TRIES, 10 * AGAIN_AFTER, False),
        (1, -AGAIN_AFTER, False),  # a clock that jumped back
    ],
)
def test_it_is_due_once_and_not_to_who_starts_again_soon(times: int, age: timedelta, expected: bool) -> None:
    for then in (NOW - age, (NOW - age).replace(tzinfo=None)):
        assert is_due(then.isoformat(), disturbed_times=times, now=NOW) is expected


@given(st.text())
def test_what_is_no_time_is_never_an_error(created: str) -> None:
    assert is_due(created, disturbed_times=0, now=NOW) is False
    assert is_due(created, disturbed_times=1, now=NOW) in (True, False)
