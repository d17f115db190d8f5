"""HTTP to one appliance: its health, its documents, its answers."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from appliance.documents import load
from appliance.errors import ConfigError, EngineNotReadyError, FatalError
from appliance.values import dataclass

ASK_S = 5.0
ANSWER_S = 600.0  # time limit of a chat answer: the prefill of a long prompt on a CPU takes minutes
READY = "/health/ready"
GAUGE = re.compile(r"^(\w+) ([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)$", re.MULTILINE)


class NoAnswerError(Exception):
    """The address does not answer with HTTP and JSON, not yet or not any more."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int
    document: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """The address of an appliance. `key` is "" if none is required; the repr does not show it."""

    host: str
    port: int
    key: str = ""

    def __repr__(self) -> str:
        return f"Gateway({self.base})"

    @property
    def base(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.base}/v1"

    def get(self, path: str, *, timeout_s: float = ASK_S) -> Reply:
        """Send a GET. Raises NoAnswerError."""
        return self.ask("GET", path, timeout_s=timeout_s)

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = ASK_S) -> Reply:
        """Send a request. Raises NoAnswerError."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            return _asked(connection, method, path, self._headers(), body)
        finally:
            connection.close()

    def document(self, name: str, *, timeout_s: float = ASK_S) -> dict[str, Any]:
        """Return one document of /appliance/v1. Raises NoAnswerError, and FatalError for a refusal."""
        reply = self.get(f"/appliance/v1/{name}", timeout_s=timeout_s)
        if reply.status != 200:
            raise refusal(reply)
        return reply.document

    def gauges(self, *, timeout_s: float = ASK_S) -> dict[str, float]:
        """Return the values in /metrics that have no labels. Raises NoAnswerError."""
        return _gauges(self.metrics(timeout_s=timeout_s))

    def metrics(self, *, timeout_s: float = ASK_S) -> str:
        """Return /metrics as text. Raises NoAnswerError."""
        return self._raw("GET", "/metrics", timeout_s=timeout_s)[1].decode(errors="replace")

    def post_raw(self, path: str, body: object, *, timeout_s: float) -> tuple[int, bytes]:
        """Post and return status and body, whatever they are. Raises NoAnswerError."""
        return self._raw("POST", path, body, timeout_s=timeout_s)

    def requests(self, *, timeout_s: float = ASK_S) -> list[dict[str, Any]]:
        """Return the latest requests as numbers, from the first event of the pages. Raises NoAnswerError."""
        with self._response("GET", "/appliance/v1/events", timeout_s=timeout_s) as response:
            data = (row.removeprefix(b"data:") for row in response if row.startswith(b"data:"))
            rows = _parsed(next(data, b"{}")).get("requests")
        return rows if isinstance(rows, list) else []

    def _raw(self, method: str, path: str, body: object = None, *, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            return exchange(connection, method, path, self._headers(), body)
        finally:
            connection.close()

    @contextmanager
    def stream(self, path: str, body: object) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield the events of an answer. Raises NoAnswerError, and FatalError for a refusal at the start or within the
        stream."""
        with self._response("POST", path, json.dumps(body), timeout_s=ANSWER_S) as response:
            if response.status != 200:
                raise refusal(Reply(status=response.status, document=_parsed(response.read())))
            yield _events(response)

    @contextmanager
    def _response(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer that is read in the block. Raises NoAnswerError, also for what fails there."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, dict(self._headers()))
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            message = f"{type(error).__name__}: {error}"
            raise NoAnswerError(message) from error
        finally:
            connection.close()

    def _headers(self) -> Mapping[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}


class ReadyPoll:
    """Asks for readiness repeatedly, on one connection as long as it lasts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=ASK_S)

    def ask(self) -> dict[str, Any]:
        """Return the document; empty while the appliance does not answer."""
        try:
            return _asked(self._connection, "GET", READY, {}, None).document
        except NoAnswerError:
            self._connection.close()
            return {}

    def close(self) -> None:
        self._connection.close()


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str], body: object = None
) -> tuple[int, bytes]:
    """Send one request and return status and body. Raises NoAnswerError."""
    try:
        connection.request(method, path, None if body is None else json.dumps(body), dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        message = f"{type(error).__name__}: {error}"
        raise NoAnswerError(message) from error


def _asked(
    connection: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str], body: object
) -> Reply:
    status, data = exchange(connection, method, path, headers, body)
    return Reply(status=status, document=_parsed(data))


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        return load(body)
    except ValueError as error:
        message = f"the answer is not a JSON object: {said_in(body)!r}"
        raise NoAnswerError(message) from error


def _gauges(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in GAUGE.findall(text)}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield events until [DONE]. Raises NoAnswerError if the stream ends before: http.client takes a broken stream for
    a complete one."""
    for row in response:
        line = row.strip()
        if not line.startswith(b"data:"):
            continue
        if line.endswith(b"[DONE]"):
            return
        document = _parsed(line.removeprefix(b"data:"))
        if "error" in document:
            raise refusal(Reply(status=200, document=document))
        yield document
    message = "the connection closed before its end"
    raise NoAnswerError(message)


def refusal(reply: Reply) -> FatalError:
    words = said(reply.document) or f"HTTP {reply.status} without a reason"
    if reply.status == 401:
        hint = "the key on the volume changed since the appliance started: restart it"
        return ConfigError(f"the appliance refuses its key: {words}", hint=hint)
    return EngineNotReadyError(f"the appliance refuses: {words}", hint="see `appliance logs` or `docker logs`")


def unanswered(error: NoAnswerError) -> EngineNotReadyError:
    """Return the error for an appliance that was asked and does not answer."""
    message = f"the appliance does not answer: {error}"
    return EngineNotReadyError(message, hint="see its log: `appliance logs` or `docker logs`")


def said(document: Mapping[str, Any]) -> str:
    """Return the message of an error, in OpenAI's form or a similar one; empty if there is none."""
    error = document.get("error") or document.get("message") or document.get("detail")
    words = error.get("message") if isinstance(error, dict) else error
    return words[:300] if isinstance(words, str) else ""


def said_in(body: bytes) -> str:
    """Return the message of an error, or the beginning of the body."""
    with suppress(ValueError):
        document = load(body)
        return said(document) or f"an object with {', '.join(document) or 'nothing in it'}"[:200]
    return body[:200].decode(errors="replace").strip() or "nothing"
