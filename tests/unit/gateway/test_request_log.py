"""Rows of finished requests: numbers from the engine's answer and from the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from appliance.gateway.clients.request_log import Exchange, FinishedRequest, RequestLog
from appliance.gateway.wire.edges import Edges


@dataclass
class Told:
    """What an engine answered."""

    body: bytes = b""
    status: int = 200
    first_content: float | None = None
    is_stream: bool = False

    @property
    def edges(self) -> Edges:
        return Edges(end=self.body, is_stream=self.is_stream)


def finished(answer: Told | None = None, **failure: Any) -> FinishedRequest:
    exchange = Exchange(model="demo", route="/v1/chat/completions", key="")
    exchange.response = answer
    if failure:
        exchange.fail(**failure)
    return exchange.finished()


def test_a_stream_is_timed_by_the_clock_and_by_the_engine() -> None:
    told = (
        b'data: {"choices":[{"finish_reason":"length"}],'
        b'"timings":{"prompt_n":8,"prompt_ms":100,"predicted_n":11,"predicted_ms":50}}'
    )
    exchange = Exchange(model="demo", route="/v1/chat/completions", key="ci")
    exchange.response = Told(told, first_content=exchange.began + 0.35, is_stream=True)
    row = exchange.finished()
    assert (row.ttft_s, row.waited_s, row.tokens_per_s, row.ending, row.status) == (0.35, 0.25, 200.0, "length", 200)
    assert (row.tokens_in, row.tokens_cached, row.tokens_out, row.key, row.stream) == (8, None, 11, "ci", True)


def test_an_answer_that_tells_nothing_is_unknown_and_not_zero() -> None:
    row = finished(Told(b"{}"))
    assert (row.tokens_in, row.tokens_out, row.ttft_s, row.tokens_per_s) == (None, None, None, None)
    assert (row.ending, row.status) == ("stop", 200)


def test_without_an_answer_it_is_an_error() -> None:
    assert finished().ending == "error"
    row = finished(status=503, is_stopped=True)
    assert (row.ending, row.status) == ("stopped", 503)
    assert finished(Told(status=400)).ending == "error"


def test_the_first_token_of_a_whole_answer_comes_after_its_prefill() -> None:
    told = b'{"timings":{"prompt_n":8,"prompt_ms":40,"predicted_n":3,"predicted_ms":10}}'
    exchange = Exchange(model="demo", route="/v1/completions", key="")
    exchange.began = time.monotonic() - 1
    exchange.response = Told(told)
    row = exchange.finished()
    assert row.ttft_s is not None
    assert 0.98 < row.ttft_s < 1.5
    assert row.waited_s == row.ttft_s - 0.04


def test_the_log_keeps_the_latest() -> None:
    log = RequestLog(kept=3)
    seen: list[str] = []
    log.listen(lambda row: seen.append(row.id))
    rows = [finished(status=400 + number) for number in range(5)]
    for row in rows:
        log.add(row)
    assert seen == [row.id for row in rows]
    assert log.count == 5
    assert [row.status for row in log.since(0)] == [402, 403, 404]
    assert [row.status for row in log.since(4)] == [404]
    assert log.since(5) == ()
    assert log.ttft_s(0.5, "demo") is None


def test_quantiles_are_of_those_with_a_time() -> None:
    log = RequestLog()
    for tenths in range(1, 11):
        exchange = Exchange(model="demo", route="/v1/completions", key="")
        exchange.response = Told(first_content=exchange.began + tenths / 10, is_stream=True)
        log.add(exchange.finished())
    log.add(finished(status=500))
    assert (log.ttft_s(0.5, "demo"), log.ttft_s(0.95, "demo")) == (0.6, 1.0)
    assert log.ttft_s(0.5, "another") is None
