"""When an unfinished profile is measured further."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from appliance.serve.model.needs import goes_on_after_s, goes_on_now, until_tomorrow_s
from tests.builders import profile


@pytest.mark.parametrize(("days", "is_due"), [(-1, True), (0, True), (1, False)])
def test_it_goes_on_from_its_day_on(days: int, is_due: bool) -> None:
    day = (datetime.now(UTC) + timedelta(days=days)).date().isoformat()
    found = replace(profile(), goes_on_from=day)
    assert goes_on_now(found) is is_due
    after_s = goes_on_after_s(found)
    assert after_s is not None
    assert (after_s == 0.0) is is_due
    assert after_s <= 86400 * max(0, days)


def test_a_whole_profile_never_goes_on() -> None:
    assert goes_on_now(profile()) is False
    assert goes_on_after_s(profile()) is goes_on_after_s(None) is None


def test_a_comparison_goes_on_when_the_next_day_begins() -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
    after_s = goes_on_after_s(replace(profile(), goes_on_from=tomorrow))
    assert until_tomorrow_s() == pytest.approx(after_s, abs=60)
