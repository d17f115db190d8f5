"""Traces of finished requests for a collector, as OTLP over HTTP in JSON: numbers and names, never text.

A trace is one span a request, with the attributes of OpenTelemetry's conventions for generative AI (`gen_ai.*`,
semantic conventions 1.37). Sent in batches by a thread; a collector that does not answer ends and delays nothing.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from appliance import __version__
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.system.background_writer import BackgroundWriter

SEND_EVERY_S = 2.0
AGAIN_S = 30.0  # until the next try if the collector does not answer
TIMEOUT_S = 5.0
END_S = 1.0  # most time that a stop waits for the last batch
KEPT = 2048  # spans that wait; the oldest go first
PATH = "/v1/traces"
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1  # bit of `traceparent`
_SERVER = 2  # the span's kind
_ERROR = 2  # the span's status
_OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "embeddings": "embeddings"}

_log = logging.getLogger(__name__)


class Traces:
    """The spans that wait for the collector at `endpoint`, and the thread that sends them."""

    def __init__(self, endpoint: str, *, send_every_s: float = SEND_EVERY_S, again_s: float = AGAIN_S) -> None:
        """`endpoint` is the collector's address without the path, as in http://collector:4318."""
        self._address = endpoint.rstrip("/") + PATH
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._writer = BackgroundWriter("traces", self._write, every_s=send_every_s, again_s=again_s)

    @property
    def problem(self) -> str:
        """Why the collector gets nothing; empty if it does."""
        return self._writer.problem

    def note(self, row: FinishedRequest) -> None:
        """Take a request that ended, unless its client's trace is not sampled."""
        parent = _PARENT.fullmatch(row.parent)
        if parent and not int(parent[3], 16) & _SAMPLED:
            return
        self._waiting.append(span_of(row))
        self._writer.wake()

    def close(self) -> None:
        """Send the rest. Waits for END_S at most."""
        self._writer.close(END_S)

    def _write(self, before: str) -> str:
        spans = [self._waiting.popleft() for _ in range(len(self._waiting))]
        problem = self._sent(spans) if spans else before
        if problem != before:
            _log.warning("traces are not sent: %s", problem) if problem else _log.warning("traces are sent again")
        return problem

    def _sent(self, spans: list[dict[str, Any]]) -> str:
        """Send the spans. Returns why the collector did not take them; empty if it did."""
        import urllib.error  # both here: no start needs them
        import urllib.request

        body = json.dumps(document_of(spans)).encode()
        headers = {"content-type": "application/json", "user-agent": f"appliance/{__version__}"}
        request = urllib.request.Request(self._address, body, headers, method="POST")  # noqa: S310 - checked setting
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - as above
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            # A batch that is refused will be refused again.
            return f"the collector refuses traces: {error.code} {error.reason}"
        except (OSError, ValueError) as error:
            room = KEPT - len(self._waiting)
            self._waiting.extendleft(reversed(spans[max(0, len(spans) - room) :]))
            self._writer.wake()
            return f"the collector does not answer: {error}"


def span_of(row: FinishedRequest) -> dict[str, Any]:
    """Return the span of a request. The client's `traceparent` is its parent; without one it begins a trace."""
    parent = _PARENT.fullmatch(row.parent)
    operation = _operation(row.route)
    begin_ns = int(row.time * 1e9)
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "appliance",
        "gen_ai.request.model": row.model,
        "gen_ai.response.model": row.model,
        "gen_ai.usage.input_tokens": row.tokens_in,
        "gen_ai.usage.output_tokens": row.tokens_out,
        "gen_ai.usage.cache_read.input_tokens": row.tokens_cached,
        "gen_ai.response.finish_reasons": [row.ending],
        "http.request.method": "POST",
        "http.route": row.route,
        "http.response.status_code": row.status or None,
        "error.type": str(row.status or row.ending) if row.ending in ("error", "stopped") else None,
        "appliance.time_to_first_token": row.ttft_s,
        "appliance.waited": row.waited_s,
        "appliance.tokens_per_second": row.tokens_per_s,
        "appliance.stream": row.stream,
        "appliance.slowed_by": list(row.slowed_by) or None,
    }
    return {
        "traceId": parent[1] if parent else secrets.token_hex(16),
        "spanId": row.id,
        **({"parentSpanId": parent[2]} if parent else {}),
        "name": f"{operation} {row.model}",
        "kind": _SERVER,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(begin_ns + int(row.seconds * 1e9)),
        "attributes": [{"key": key, "value": _value(value)} for key, value in attributes.items() if value is not None],
        "status": {"code": _ERROR} if row.ending in ("error", "stopped") else {},
    }


def document_of(spans: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return the body of a request to the collector."""
    resource = {"service.name": "appliance", "service.version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": key, "value": _value(value)} for key, value in resource.items()]},
                "scopeSpans": [{"scope": {"name": "appliance", "version": __version__}, "spans": spans}],
            }
        ]
    }


def _operation(route: str) -> str:
    return next((name for part, name in _OPERATIONS.items() if part in route), "text_completion")


def _value(value: object) -> dict[str, Any]:
    """Return a value in OTLP's JSON, where whole numbers are strings."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
