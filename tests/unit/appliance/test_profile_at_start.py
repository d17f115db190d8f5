"""What a start does with what it finds."""

from __future__ import annotations

from itertools import product

import pytest

from appliance.profile.at_start import Act, Found, at_start

STALE = Found(id="0123", stale="decoded 12.1 tok/s at 1,900 tokens, 16.0 measured: 24 % slower, twice")
PINNED = Found(id="0123", stale=STALE.stale, is_pinned=True)
TUNE = ("first", "idle", "off")


@pytest.mark.parametrize(("tune", "may_measure", "is_pinned"), list(product(TUNE, (True, False), (True, False))))
def test_one_that_holds_is_used_without_a_word(tune: str, may_measure: bool, is_pinned: bool) -> None:
    start = at_start(Found(id="0123", is_pinned=is_pinned), tune=tune, may_measure=may_measure)
    assert (start.act, start.words) == (Act.USE, "")


@pytest.mark.parametrize(
    ("found", "tune", "may_measure", "act", "event", "words"),
    [
        (None, "first", True, Act.MEASURE, "", ""),
        (None, "first", False, Act.PREDICT, "tune_elsewhere", "its profile at the next start"),
        (None, "idle", True, Act.PREDICT, "tune_later", "while nobody asks"),
        (None, "idle", False, Act.PREDICT, "tune_elsewhere", "its profile at the next start"),
        (None, "off", True, Act.PREDICT, "tune_off", "measuring is off"),
        (None, "off", False, Act.PREDICT, "tune_off", "measuring is off"),
        (STALE, "first", True, Act.MEASURE, "profile_stale", "24 % slower, twice; measuring again"),
        (STALE, "first", False, Act.USE, "profile_stale", "used until the next start"),
        (STALE, "idle", True, Act.USE, "profile_stale", "used until it is measured again while nobody asks"),
        (STALE, "off", True, Act.USE, "profile_stale", "measuring is off: used all the same"),
        (PINNED, "first", True, Act.USE, "profile_stale", "it is pinned and used all the same"),
        (PINNED, "idle", True, Act.USE, "profile_stale", "it is pinned and used all the same"),
        (PINNED, "off", False, Act.USE, "profile_stale", "it is pinned and used all the same"),
    ],
)
def test_each_case(found: Found | None, tune: str, may_measure: bool, act: Act, event: str, words: str) -> None:
    start = at_start(found, tune=tune, may_measure=may_measure)
    assert (start.act, start.event) == (act, event)
    assert words in start.words
    assert start.is_warning == (found is PINNED or (found is STALE and tune == "off"))
    assert start.act is not Act.PREDICT or found is None


@pytest.mark.parametrize(("found", "tune"), list(product((None, STALE, PINNED), TUNE)))
def test_nobody_measures_while_another_does(found: Found | None, tune: str) -> None:
    assert at_start(found, tune=tune, may_measure=False).act is not Act.MEASURE
