"""Errors that are retried, and errors that end a download."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import DownloadError
from appliance.weights.download.meter import FetchProgress, Meter
from appliance.weights.download.retry import LONGEST_WAIT_S, UNREACHED_S, Patience, Transient, parse_retry_after
from appliance.weights.show import Lines


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_waits_double_until_the_patience_is_up() -> None:
    clock = Clock()
    patience = Patience(120.0, clock)
    waits = list[float]()

    def fail_for_ever() -> None:
        while True:
            waits.append(patience.wait_s(Transient("it broke"), "a.gguf"))
            clock.now += waits[-1]

    with pytest.raises(DownloadError, match=r"download failed: a.gguf: it broke, after 10 attempts in 92 s") as caught:
        fail_for_ever()
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert "the bytes fetched so far are kept" in str(caught.value.hint)


def test_a_server_that_was_never_reached_is_given_up_soon() -> None:
    clock = Clock()
    patience = Patience(120.0, clock)
    waits = list[float]()

    def fail(failure: Transient) -> None:
        while True:
            waits.append(patience.wait_s(failure, "a.gguf"))
            clock.now += waits[-1]

    with pytest.raises(DownloadError, match="connection refused, after 7 attempts in 16 s"):
        fail(Transient("connection refused", is_unreached=True))
    assert sum(waits) < UNREACHED_S


@pytest.mark.parametrize("by", ["an answer", "progress"])
def test_one_that_was_reached_once_gets_the_whole_patience(by: str) -> None:
    clock = Clock()
    patience = Patience(120.0, clock)
    if by == "progress":
        patience.progressed()
    else:
        clock.now += patience.wait_s(Transient("it answers 503"), "a.gguf")
    clock.now += 3 * UNREACHED_S
    assert patience.wait_s(Transient("connection refused", is_unreached=True), "a.gguf") > 0


def test_progress_starts_it_anew() -> None:
    clock = Clock()
    patience = Patience(1.0, clock)
    for _ in range(50):
        clock.now += patience.wait_s(Transient("it broke"), "a.gguf")
        patience.progressed()
    assert clock.now == 1000.0 + 50 * 0.25


def test_what_the_server_asks_for_is_waited_for_and_not_counted() -> None:
    clock = Clock()
    patience = Patience(1.0, clock)
    for _ in range(20):
        wait = patience.wait_s(Transient("429", retry_after_s=60.0), "a.gguf")
        assert wait == 60.0
        clock.now += wait
    assert patience.wait_s(Transient("429", retry_after_s=0.0), "a.gguf") == 0.25
    with pytest.raises(DownloadError, match="asks to wait 901 s"):
        patience.wait_s(Transient("429", retry_after_s=901.0), "a.gguf")


@given(st.integers(1, 60))
def test_no_wait_is_longer_than_the_longest(failures: int) -> None:
    patience = Patience(1e9, Clock())
    assert max(patience.wait_s(Transient("x"), "a") for _ in range(failures)) <= LONGEST_WAIT_S


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
    ],
)
def test_both_forms_of_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, now=1000.0) == seconds


@given(st.text(max_size=30))
def test_any_header_is_read(value: str) -> None:
    found = parse_retry_after(value, 0.0)
    assert found is None or found >= 0.0


def test_the_rate_is_of_the_last_seconds() -> None:
    clock, told = Clock(), list[FetchProgress]()
    meter = Meter(10_000, told.append, clock)
    meter.begin("a.gguf", 1000)
    for step in range(1, 21):
        clock.now += 1.0
        meter.received(1000 + step * (10 if step <= 8 else 100), 10 if step <= 8 else 100)
    assert told[-1].bytes_per_s == pytest.approx(100.0)
    assert told[-1].seconds_left == pytest.approx((10_000 - 3000) / 100.0)
    assert told[-1].describe() == "a.gguf: 3.0 kB of 10.0 kB, 100 bytes/s, 70 s left"


def test_it_is_told_five_times_a_second_and_whenever_something_is_new() -> None:
    clock, told = Clock(), list[FetchProgress]()
    meter = Meter(None, told.append, clock)
    meter.begin("a.gguf", 0)
    for _ in range(1000):
        clock.now += 0.001
        meter.received(told[-1].bytes_done + 1, 1)
    assert 5 <= len(told) <= 7
    meter.waits("an answer")
    meter.waits("an answer")
    assert [progress.waiting_for for progress in told[-2:]] == [None, "an answer"]
    assert told[-1].bytes_per_s is None
    meter.received(5, 1)
    assert told[-1].waiting_for is None
    assert told[-1].bytes_total is None


def test_files_of_a_set_are_added_up() -> None:
    told = list[FetchProgress]()
    meter = Meter(300, told.append, Clock())
    for name in ("a", "b"):
        meter.begin(name, 0)
        meter.done(100)
    meter.begin("c", 50)
    assert (told[-1].file, told[-1].bytes_done, told[-1].bytes_total) == ("c", 250, 300)


def test_lines_for_a_log_are_few() -> None:
    clock, said = Clock(), list[str]()
    lines = Lines(said.append, clock)
    for second in range(21):
        clock.now = 1000.0 + second
        lines(FetchProgress(file="a.gguf", bytes_done=second * 1_000_000, bytes_total=2_500_000_000))
    lines(FetchProgress(file="a.gguf", bytes_done=0, bytes_total=None, waiting_for="an answer"))
    assert said == [
        "a.gguf: 0 bytes of 2.50 GB",
        "a.gguf: 10.0 MB of 2.50 GB",
        "a.gguf: 20.0 MB of 2.50 GB",
        "a.gguf: 0 bytes, waiting for an answer",
    ]
