"""What a tuning that was broken off had found, and what of it is measured again."""

from __future__ import annotations

import io
from dataclasses import replace

from appliance.console.report import Report
from appliance.tune.checkpoint import Partial, PartialResults, SlotsTrial
from appliance.tune.figures.measurement import TRIES

FAILED = SlotsTrial(key="a", slots=2, error="the engine died")


class Kept:
    def __init__(self, *slots: SlotsTrial) -> None:
        self.partial = Partial(slots=slots)

    def load(self) -> Partial:
        return self.partial

    def save(self, partial: Partial) -> None:
        self.partial = partial


def results(*slots: SlotsTrial) -> PartialResults:
    found = PartialResults(Kept(*slots), Report("text", io.StringIO()), shows_phase=False)
    found.load()
    return found


def test_slots_that_failed_are_tried_once_more_and_no_oftener() -> None:
    assert results().slots_of("a", 2, None) is None
    for failures in range(1, TRIES + 2):
        found = results(*[FAILED] * failures).slots_of("a", 2, None)
        assert found == (FAILED if failures >= TRIES else None)


def test_of_another_plan_or_number_nothing_is_known() -> None:
    known = results(FAILED, FAILED)
    assert known.slots_of("b", 2, None) is None
    assert known.slots_of("a", 3, None) is None
    assert results(FAILED, replace(FAILED, slots=3)).slots_of("a", 2, None) is None


def test_what_is_told_is_kept_at_once() -> None:
    kept = Kept()
    PartialResults(kept, Report("text", io.StringIO()), shows_phase=False).on_slots(FAILED)
    assert (kept.partial.slots, kept.partial.count, kept.partial.describe()) == ((FAILED,), 1, "1 trial of slots")
