"""A fault of our own in the middle of an answer: the client, the request log, usage, metrics and traces all tell it."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from appliance.console.progress import Phase, Progress
from appliance.engines.llama.api.routes import ROUTES
from appliance.gateway.accounts.usage import used_by
from appliance.gateway.accounts.usage_store import Used
from appliance.gateway.app import create_app
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.clients.traces import span_of
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend, ListedModel

PATH = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
BEGIN = b'data: {"choices":[{"delta":{"content":"one"}}]}\n\n'
END = b'data: {"choices":[{"finish_reason":"stop","delta":{}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
REST = END + b"data: [DONE]\n\n"


class Faulty:
    """What the appliance knows of the machine, with a fault in one of its parts."""

    receipts = "always"

    def __init__(self, part: str, error: Exception) -> None:
        self._part, self._error = part, error

    def _reach(self, part: str) -> None:
        if part == self._part:
            raise self._error

    def watch(self, body: bytes, traffic: Traffic, *, load_s: float = 0.0, loaded: str = "") -> Faulty:
        self._reach("watch")
        return self

    async def receipt(self, row: FinishedRequest) -> Mapping[str, Any]:
        self._reach("receipt")
        return {}

    def end(self, row: FinishedRequest) -> tuple[str, ...]:
        self._reach("end")
        return ()

    def watts(self) -> float | None:
        return None

    def joules(self) -> float | None:
        return None

    def losses(self) -> tuple[str, ...]:
        return ()

    async def refresh(self) -> None:
        return


class Run:
    """What one request left behind."""

    def __init__(self) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.rows: list[FinishedRequest] = []
        self.metrics = ""
        self.error: BaseException | None = None
        self.has_begun = asyncio.Event()  # set once the client has a part of the body

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.has_begun.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_ended(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)

    @property
    def used(self) -> Used:
        return used_by(self.rows[0])

    def counted(self, name: str, *labels: str) -> float:
        lines = [line for line in self.metrics.splitlines() if line.startswith(f"{name}{{")]
        return sum(float(line.split()[-1]) for line in lines if all(label in line for label in labels))


def run(part: str, error: Exception) -> Run:
    """One streamed request through the whole application, whose `part` raises `error`. The engine sends the end of its
    answer only after the client has its beginning."""
    return asyncio.run(_run(Faulty(part, error)))


async def _run(insight: Faulty) -> Run:
    found = Run()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + BEGIN)
        await found.has_begun.wait()
        writer.write(REST)
        await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        socket_path = Path(folder) / "e"
        async with await asyncio.start_unix_server(serve, socket_path):
            backend = Backend(
                name="small",
                socket_path=socket_path,
                routes=ROUTES,
                progress=lambda: Progress(phase=Phase.READY),
                documents={},
                listed=lambda: ListedModel(id="small", phase=Phase.READY),
                insight=insight,
            )
            app = create_app([backend], keys=None)
            app.requests.listen(found.rows.append)
            try:
                await app(_scope("POST", PATH), _client(b'{"stream":true}'), found.send)
            except Exception as error:
                found.error = error
            scrape = Run()
            await app(_scope("GET", "/metrics"), _client(b""), scrape.send)
            found.metrics = scrape.body.decode()
    return found


def _scope(method: str, path: str) -> dict[str, Any]:
    kind = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": b""}
    return {**kind, "headers": [(b"host", b"a"), (b"content-type", b"application/json")]}


def _client(body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def check_told(found: Run, status: int) -> None:
    """Check that everything that counts requests says `status`."""
    (row,) = found.rows
    assert (row.ending, row.status) == ("error", status)
    assert (found.used.requests, found.used.errors) == (1, 1)
    assert found.counted("appliance_requests_finished_total", 'ending="error"') == 1
    assert found.counted("appliance_requests_finished_total", 'ending="stop"') == 0
    assert found.counted("appliance_requests_total", PATH, f'status="{status}"') == 1
    assert found.counted("appliance_requests_total", PATH, 'status="200"') == 0
    span = span_of(row)
    assert span["status"] == {"code": 2}
    (kind,) = (each["value"] for each in span["attributes"] if each["key"] == "error.type")
    assert kind == {"stringValue": str(status)}


def test_a_fault_in_mid_stream_is_a_failed_request() -> None:
    fault = KeyError("a fault")
    found = run("receipt", fault)
    assert found.error is fault, "the server logs it"
    check_told(found, 500)
    assert BEGIN in found.body
    assert b'"code":"internal_error"' in found.body.rpartition(b"data: ")[2]
    assert b"[DONE]" not in found.body
    assert b"a fault" not in found.body
    assert found.is_ended


def test_a_lack_in_mid_stream_is_told_as_one() -> None:
    found = run("receipt", OSError(errno.EMFILE, "too many open files"))
    check_told(found, 503)
    assert b'"code":"out_of_resources"' in found.body


def test_a_fault_before_the_answer_is_a_failed_request() -> None:
    found = run("watch", ValueError("a fault"))
    check_told(found, 500)
    assert found.sent[0]["status"] == 500


def test_a_fault_after_the_answer_loses_no_row() -> None:
    """The client has its whole answer by then, so it counts as what it is."""
    found = run("end", ValueError("a fault"))
    (row,) = found.rows
    assert (row.ending, row.status, row.tokens_in, row.tokens_out) == ("stop", 200, 3, 2)
    assert found.used.tokens_out == 2
    assert found.counted("appliance_requests_finished_total", 'ending="stop"') == 1


def test_without_a_fault_it_is_a_good_request() -> None:
    found = run("nothing", ValueError())
    assert found.error is None
    assert [row.ending for row in found.rows] == ["stop"]
    assert b"[DONE]" in found.body
