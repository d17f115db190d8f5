"""Spans of finished requests, and the thread that sends them to a collector."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.clients.traces import KEPT, Traces, document_of, span_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROW: dict[str, Any] = {
    "id": "a1b2c3d4e5f60718",
    "time": 1795800000.5,
    "model": "demo",
    "route": "/v1/chat/completions",
    "key": "ci",
    "stream": True,
    "tokens_in": 30,
    "tokens_cached": 12,
    "tokens_out": 60,
    "waited_s": 0.0,
    "ttft_s": 0.25,
    "seconds": 2.0,
    "tokens_per_s": 118.0,
    "ending": "stop",
    "status": 200,
}


def row(**fields: Any) -> FinishedRequest:
    return FinishedRequest(**{**ROW, **fields})


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


@contextmanager
def collector(*statuses: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a collector and what it got. It answers with `statuses`, the last one for ever."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append({"path": self.path, "type": self.headers["content-type"], "body": json.loads(body)})
            self.send_response(statuses[min(len(got), len(statuses)) - 1])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def spans_of(got: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for each in got for span in each["body"]["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def test_a_span_has_the_fields_of_the_conventions_and_no_key() -> None:
    span = span_of(row(slowed_by=("restart",)))
    assert (span["name"], span["kind"], span["spanId"]) == ("chat demo", 2, ROW["id"])
    assert len(span["traceId"]) == 32
    assert "parentSpanId" not in span
    assert int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) == 2 * 10**9
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == ("30", "60")
    assert found["gen_ai.response.finish_reasons"] == {"values": [{"stringValue": "stop"}]}
    assert found["appliance.slowed_by"] == {"values": [{"stringValue": "restart"}]}
    assert span["status"] == {}
    assert "ci" not in json.dumps(span)


def test_unknown_values_are_left_out() -> None:
    found = attributes(span_of(row(tokens_in=None, tokens_out=None, ttft_s=None, tokens_per_s=None)))
    assert not {"gen_ai.usage.input_tokens", "appliance.time_to_first_token", "error.type"} & {*found}


@pytest.mark.parametrize(
    ("route", "operation"),
    [
        ("/v1/completions", "text_completion"),
        ("/v1/messages", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/embeddings", "embeddings"),
    ],
)
def test_the_operation_follows_from_the_route(route: str, operation: str) -> None:
    assert attributes(span_of(row(route=route)))["gen_ai.operation.name"] == operation


def test_an_error_is_one() -> None:
    span = span_of(row(ending="error", status=503))
    assert span["status"] == {"code": 2}
    assert attributes(span)["error.type"] == "503"


def test_the_clients_trace_goes_on() -> None:
    span = span_of(row(parent=PARENT))
    assert (span["traceId"], span["parentSpanId"]) == (PARENT.split("-")[1], PARENT.split("-")[2])


@pytest.mark.parametrize("parent", ["", "00-xyz", PARENT + "\n", "x" * 5000, PARENT.upper()])
def test_a_parent_that_is_none_begins_a_trace(parent: str) -> None:
    assert "parentSpanId" not in span_of(row(parent=parent))


def test_requests_are_sent_in_batches() -> None:
    with collector(200) as (address, got):
        traces = Traces(address, send_every_s=0.05)
        for number in range(5):
            traces.note(row(id=f"{number:016x}"))
        until(lambda: len(spans_of(got)) == 5)
        assert (got[0]["path"], got[0]["type"]) == ("/v1/traces", "application/json")
        traces.note(row(parent=PARENT[:-2] + "00"))  # its client's trace is not sampled
        traces.note(row(id="f" * 16))
        traces.close()
        assert [span["spanId"] for span in spans_of(got)][5:] == ["f" * 16]


def test_a_collector_that_is_away_gets_them_later(caplog: pytest.LogCaptureFixture) -> None:
    traces = Traces("http://127.0.0.1:9", send_every_s=0.01, again_s=0.05)
    traces.note(row())
    until(lambda: "does not answer" in traces.problem)
    with collector(200) as (address, got):
        traces._address = address + "/v1/traces"
        until(lambda: got)
        until(lambda: not traces.problem)
    traces.close()
    assert [span["spanId"] for span in spans_of(got)] == [ROW["id"]]
    assert sum("traces are not sent" in line for line in caplog.messages) == 1


def test_a_refused_batch_is_not_sent_again() -> None:
    with collector(400, 200) as (address, got):
        traces = Traces(address, send_every_s=0.01, again_s=0.01)
        traces.note(row(id="0" * 16))
        until(lambda: "refuses traces: 400" in traces.problem)
        traces.note(row(id="1" * 16))
        until(lambda: len(got) == 2)
        traces.close()
    assert [span["spanId"] for span in spans_of(got)] == ["0" * 16, "1" * 16]


def test_not_more_wait_than_fit() -> None:
    traces = Traces("http://127.0.0.1:9", send_every_s=60)
    for _ in range(KEPT + 10):
        traces.note(row())
    assert len(traces._waiting) == KEPT


def test_the_document_names_the_service() -> None:
    (resource,) = document_of([])["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "appliance"}} in resource["resource"]["attributes"]


def test_what_came_meanwhile_goes_before_what_was_not_taken() -> None:
    """The oldest go first if not all fit."""
    traces = Traces("http://127.0.0.1:9", send_every_s=60)
    old = [span_of(row(id="0" * 16))]
    for _ in range(KEPT):
        traces.note(row(id="1" * 16))
    assert "does not answer" in traces._sent(old)
    assert {span["spanId"] for span in traces._waiting} == {"1" * 16}
