"""Time and loads that a tuning may spend, and the loads of a day on the volume."""

from __future__ import annotations

import io
import math

import pytest

from appliance.console.report import Report
from appliance.tune.budget import Budget, LoadsOfDay, day_after, utc_day
from appliance.tune.checkpoint import Partial, PartialResults


def test_without_a_time_limit_only_loads_end_it() -> None:
    left = 3.0
    budget = Budget(120.0, is_timed=False, loads_left=lambda: left)
    assert budget.left_s == math.inf
    assert budget.left_of(-5.0, reserved_loads=2) == math.inf
    assert budget.left_of(60.0, reserved_loads=3) == 0.0
    assert budget.at_most_s(0.25, load_s=30.0) == 60.0
    assert (budget.has_loads(3), budget.has_loads(4)) == (True, False)
    left = 0.0
    assert budget.left_s == 0.0


def test_with_a_time_limit_the_rest_of_it_is_left() -> None:
    budget = Budget(120.0)
    assert 119.0 < budget.left_s <= 120.0
    assert budget.at_most_s(0.25, load_s=30.0) == 30.0
    assert Budget(120.0, loads_left=lambda: 0.0).left_s == 0.0


@pytest.mark.parametrize(("day", "next_day"), [("2026-11-28", "2026-11-29"), ("2027-12-31", "2028-01-01")])
def test_the_day_after(day: str, next_day: str) -> None:
    assert day_after(day) == next_day


class Kept:
    def __init__(self, partial: Partial) -> None:
        self.partial = partial

    def load(self) -> Partial:
        return self.partial

    def save(self, partial: Partial) -> None:
        self.partial = partial


@pytest.mark.parametrize(("day", "before"), [("2000-01-01", 0), (utc_day(), 7)])
def test_a_load_is_kept_before_it_begins_and_another_day_counts_from_0(day: str, before: int) -> None:
    kept = Kept(Partial(loads=LoadsOfDay(day=day, count=7)))
    results = PartialResults(kept, Report("text", io.StringIO()), shows_phase=False)
    results.load()
    assert results.loads_today == before
    results.on_load()
    assert kept.partial.loads == LoadsOfDay(day=utc_day(), count=before + 1)
    assert results.gained == 0, "a load alone is no result"
