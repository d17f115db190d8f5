"""A real gateway on a real port, in a thread with uvloop as `appliance serve` runs it, before a fake engine program."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvloop

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute, ErrorRule
from appliance.engines.llama.api.client_errors import ERRORS
from appliance.engines.llama.api.routes import DROPPED_HEADERS, ROUTES, SLOTS_PATH, parse_kv_use
from appliance.engines.metric_aliases import METRIC_ALIASES
from appliance.gateway.app import create_app
from appliance.gateway.clients.auth import Keys
from appliance.gateway.clients.connections import Limits
from appliance.gateway.engine.backend import Backend, ListedModel
from appliance.gateway.server import END_S, Gateway
from tests.fakes.quick import program

KEY = "sk-appliance-0123456789abcdef"
ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of OpenAI's or Anthropic's shape, which is checked."""
        document = self.json
        if document.get("type") == "error":
            assert set(document) == {"type", "error"}
            assert set(document["error"]) == {"type", "message", "code"}
        else:
            assert set(document) == {"error"}
            assert set(document["error"]) == ERROR_KEYS
        assert document["error"]["code"] == self.headers["x-appliance-error"]
        return dict(document["error"])


@dataclass(kw_only=True)
class Stage:
    """What a test sees. `progress` and `listed` may be set at any time."""

    engine_socket: Path
    engine: subprocess.Popen[bytes] | None
    progress: Progress = field(default_factory=lambda: Progress(phase=Phase.READY))
    listed: ListedModel | None = None  # None: its name and phase
    port: int = 0
    drain: Callable[..., float] = lambda *_: 0.0
    """Drains for the seconds given; returns those it took. Clients get a minute to hear of it, or `end_s`: on a machine
    that is busy with other tests the gateway's own patience is over before all were told."""

    @property
    def log(self) -> Path:
        """What the engine wrote."""
        return self.engine_socket.with_suffix(".log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = KEY,
    ) -> Answer:
        """One request on a connection of its own. `body` bytes, or something that becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            given = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
            connection.request(method, path, data, given)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(status=response.status, headers=names, body=response.read())
        finally:
            connection.close()

    def raw(self, request: bytes) -> socket.socket:
        """A connection on which `request` was sent as it is; the caller closes it."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(request)
        return connection

    def post(self, path: str, body: Any) -> socket.socket:
        """A connection on which a POST was sent whole; the caller closes it."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.raw(head.encode() + data)

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def engine_saw(self) -> dict[str, Any]:
        """The ledger of the fake engine, asked for behind the gateway's back."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.engine_socket))
            path = b"/fake/requests" if self._is_fake_engine else b"/fake/ledger"
            connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return dict(json.loads(read_all(connection).partition(b"\r\n\r\n")[2]))

    @property
    def _is_fake_engine(self) -> bool:
        assert self.engine is not None
        return any("fake_engine" in str(word) for word in self.engine.args)  # type: ignore[union-attr]


def read_all(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def read_until(connection: socket.socket, mark: bytes, received: bytes = b"") -> bytes:
    """Read until `mark` has come, and return all bytes, those of `received` first."""
    while mark not in received:
        data = connection.recv(65536)
        assert data, f"the connection ended before {mark!r}: {received[-500:]!r}"
        received += data
    return received


def eventually(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> float:
    """Polls until `condition` holds and returns the seconds it took; fails after `timeout_s`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"did not happen within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - began


@contextmanager
def on_stage(
    *engine: str,
    keys: Keys | None = Keys(frozenset({KEY})),  # noqa: B008 - frozen
    documents: Mapping[str, Callable[[], dict[str, Any]]] | None = None,
    tell_every_s: float = 0.1,
    slots: int | None = None,
    routes: tuple[EngineRoute, ...] = ROUTES,
    errors: tuple[ErrorRule, ...] = ERRORS,
    checks_model_name: bool = False,
    limits: Limits | None = None,
) -> Iterator[Stage]:
    """Run a gateway in front of a fake engine. `engine` is the fake's file name and its knobs; if empty, there is no
    engine."""
    folder = Path(tempfile.mkdtemp(prefix="gw", dir="/tmp"))
    stage = Stage(engine_socket=folder / "e.sock", engine=None)
    try:
        gateway = _gateway(stage, keys, documents or {}, tell_every_s, slots, routes, errors, checks_model_name, limits)
        with _engine(stage, engine), gateway:
            yield stage
    finally:
        shutil.rmtree(folder)


@contextmanager
def _engine(stage: Stage, words: tuple[str, ...]) -> Iterator[None]:
    if not words:
        yield
        return
    name, *knobs = words
    before = {"fake_engine.py": ["--host"], "fake_vllm.py": ["serve", "/model", "--uds"]}.get(name, [])
    argv = [*program(name.removesuffix(".py")), *before, str(stage.engine_socket), *knobs]
    with stage.log.open("wb") as log:
        stage.engine = subprocess.Popen(argv, stderr=log, start_new_session=True)
    try:
        eventually(lambda: _listens(stage.engine_socket))
        if name == "fake_engine.py":  # it listens before it is loaded, and refuses requests until then
            eventually(lambda: _is_healthy(stage.engine_socket))
        yield
    finally:
        with suppress(ProcessLookupError):  # a test may have ended all of it
            os.killpg(stage.engine.pid, signal.SIGKILL)
        stage.engine.wait()


def _is_healthy(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return read_all(connection).startswith(b"HTTP/1.1 200 ")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


@contextmanager
def _gateway(
    stage: Stage,
    keys: Keys | None,
    documents: Mapping[str, Callable[[], dict[str, Any]]],
    tell_every_s: float,
    slots: int | None,
    routes: tuple[EngineRoute, ...],
    errors: tuple[ErrorRule, ...],
    checks_model_name: bool,
    limits: Limits | None,
) -> Iterator[None]:
    backend = Backend(
        name="small",
        socket_path=stage.engine_socket,
        routes=routes,
        errors=errors,
        checks_model_name=checks_model_name,
        dropped_headers=DROPPED_HEADERS,
        progress=lambda: stage.progress,
        documents=documents,
        listed=lambda: stage.listed or ListedModel(id="small", phase=stage.progress.phase),
        engine_restarts=lambda: 3,
        aliases=METRIC_ALIASES,
        slots=None if slots is None else lambda: slots,
        kv_use=(SLOTS_PATH, lambda answer: parse_kv_use(answer, 8192)),
    )
    app = create_app([backend], keys=keys, tell_every_s=tell_every_s)
    with running_loop() as loop:
        gateway = asyncio.run_coroutine_threadsafe(Gateway.open(app, "127.0.0.1", 0, limits), loop).result(60)
        stage.port = gateway.port

        def drain(drain_s: float, end_s: float = 60.0) -> float:
            began = time.monotonic()
            asyncio.run_coroutine_threadsafe(gateway.drain(drain_s, end_s=end_s), loop).result(drain_s + end_s + 60)
            return time.monotonic() - began

        stage.drain = drain
        try:
            yield
        finally:
            drain(0.0, end_s=END_S)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A uvloop that runs in a thread."""
    started: list[asyncio.AbstractEventLoop] = []
    is_started = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        started.append(asyncio.get_running_loop())
        is_started.set()
        await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    is_started.wait(60)
    try:
        yield started[0]
    finally:
        started[0].call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()
