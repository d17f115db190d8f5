"""How many events a second streams bring now."""

from __future__ import annotations

import pytest

from appliance.gateway.clients.traffic import RATE_S, Rate


@pytest.mark.parametrize("per_s", [1.0, 20.0, 500.0])
def test_a_steady_stream_has_its_own_rate_soon_and_none_when_it_is_over(per_s: float) -> None:
    now = [100.0]
    rate = Rate(clock=lambda: now[0])
    for _ in range(round(per_s * 10)):
        rate.add(b"data: {}\n\n")
        now[0] += 1 / per_s
    assert rate.per_s == pytest.approx(per_s, rel=0.4 if per_s < 2 else 0.02)
    now[0] += RATE_S + 0.01
    assert rate.per_s == 0.0


def test_the_first_events_are_no_speed_beyond_reason() -> None:
    now = [0.0]
    rate = Rate(clock=lambda: now[0])
    for _ in range(3):
        rate.add(b"data: {}\n\n")
    assert rate.per_s == pytest.approx(3 / (RATE_S / 4))


def test_events_are_counted_and_not_chunks() -> None:
    now = [0.0]
    rate = Rate(clock=lambda: now[0])
    rate.add(b"data: {}\n\ndata: {}\n\n" * 10)
    rate.add(b"data: {")
    now[0] = 1.0
    assert rate.per_s == pytest.approx(20.0)
