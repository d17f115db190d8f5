"""Limits of named keys, on a clock of the test."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.accounts.limits import Meter, Window
from appliance.gateway.accounts.named_keys import NamedKey
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.wire.api_error import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(**limits: int) -> NamedKey:
    return NamedKey(name="ci", sha256="0" * 64, created="2026-01-01", **limits)  # type: ignore[arg-type]


def row(**more: Any) -> FinishedRequest:
    known: dict[str, Any] = {
        "id": "1", "time": 0.0, "model": "m", "route": "/v1/chat/completions", "key": "ci", "stream": True,
        "tokens_in": 10, "tokens_cached": 4, "tokens_out": 20, "waited_s": 0.0, "ttft_s": 1.0, "seconds": 3.0,
        "tokens_per_s": 10.0, "ending": "stop", "status": 200,
    }  # fmt: skip
    return FinishedRequest(**{**known, **more})


def refused(meter: Meter, wanted: NamedKey) -> ApiError:
    with pytest.raises(ApiError) as caught, meter.admitted(wanted):
        pass
    return caught.value


def test_requests_are_counted_over_any_minute() -> None:
    clock = Clock()
    meter, ci = Meter(clock), key(requests_per_minute=2)
    for _ in range(2):
        with meter.admitted(ci):
            clock.now += 10
    error = refused(meter, ci)
    assert (error.status, error.code, dict(error.headers)) == (429, "requests_per_minute", {b"retry-after": b"40"})
    assert error.detail == "the key 'ci' is limited to 2 requests a minute (requests_per_minute): try again in 40 s"
    clock.now += 40
    with meter.admitted(ci):
        clock.now += 0.5
    assert refused(meter, ci).headers == ((b"retry-after", b"10"),), "rounded up: 9.5 s"


def test_streams_are_those_that_run() -> None:
    meter, ci = Meter(Clock()), key(streams=2)
    with ExitStack() as running:
        running.enter_context(meter.admitted(ci))
        running.enter_context(meter.admitted(ci))
        assert (refused(meter, ci).code, meter.running) == ("streams", 2)
    with meter.admitted(ci):
        assert meter.running == 1


def test_tokens_are_those_of_requests_that_ended() -> None:
    clock = Clock()
    meter, ci = Meter(clock), key(tokens_per_minute=50)
    meter.note(row(), 0.0)
    with meter.admitted(ci):
        clock.now += 20
    meter.note(row(), 0.0)
    error = refused(meter, ci)
    assert (error.code, error.headers) == ("tokens_per_minute", ((b"retry-after", b"40"),))
    clock.now += 40
    with meter.admitted(ci):
        assert meter.running == 1


def test_a_client_that_leaves_before_the_counts_does_not_go_free() -> None:
    clock = Clock()
    meter, ci = Meter(clock), key(tokens_per_minute=100)
    meter.note(row(tokens_in=None, tokens_out=None, ending="client_left"), 50.0)
    assert refused(meter, ci).code == "tokens_per_minute", "two seconds at 50 tokens a second"
    other = Meter(clock)
    other.note(row(tokens_in=None, tokens_out=None, ttft_s=None, status=503, ending="error"), 50.0)
    with other.admitted(ci):
        assert other.running == 1


def test_limits_that_change_count_what_was_used() -> None:
    meter = Meter(Clock())
    with meter.admitted(key(requests_per_minute=5)):
        pass
    assert refused(meter, key(requests_per_minute=1)).code == "requests_per_minute"
    with meter.admitted(key()):
        assert meter.running == 1


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 100)), max_size=60), st.integers(1, 300))
def test_a_window_never_lets_more_pass_in_a_minute(steps: list[tuple[float, int]], most: int) -> None:
    window, now = Window(), 0.0
    seen: list[tuple[float, int]] = []
    for pause, amount in steps:
        now += pause
        wait_s = window.wait_s(now, most)
        last_minute = sum(each for at, each in seen if at > now - 60)
        assert (wait_s > 0) == (last_minute >= most)
        assert wait_s <= 60
        if wait_s == 0:
            window.add(now, amount)
            seen.append((now, amount))
