"""The ways from a client to the fake engine of `benchmarks/gateway.py`, each a process: ours, vllm-router, nginx."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.console.progress import Phase, Progress  # noqa: E402 - found through the line above
from appliance.engines.llama.api.client_errors import ERRORS  # noqa: E402
from appliance.engines.llama.api.routes import DROPPED_HEADERS, ROUTES  # noqa: E402
from appliance.settings import resolve_settings  # noqa: E402

if TYPE_CHECKING:
    from appliance.serve.gateway.slot import ModelSlot

KEY = "sk-appliance-benchmark"
NGINX = """daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
events {{ worker_connections 2048; }}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
client_max_body_size 64m; client_body_buffer_size 1m;
server {{ listen 127.0.0.1:{port} backlog=2048; location / {{ proxy_pass http://unix:{engine}; proxy_http_version 1.1;
proxy_buffering off; proxy_set_header Connection close; proxy_read_timeout 600s; }} }} }}
"""


# The fake engine


class _Engine(asyncio.Protocol):
    """One connection: reads a request, and streams as many chunks as its `max_tokens` at its `pace` (tokens/s). A pace
    of 0 sends the first chunk and then nothing."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        self._pace = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < _length_of(head):
            return
        self._received.clear()
        if not head.startswith(b"POST"):
            self._write(_whole(b'{"object":"list","data":[{"id":"m","object":"model"}]}'))
            return
        asked = json.loads(body)
        self._left, self._pace = int(asked["max_tokens"]), float(asked.get("pace", 50))
        self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._next()

    def _next(self) -> None:
        self._left -= 1
        self._write(_CHUNK if self._left else _LAST)
        if self._left and self._pace:
            self._timer = asyncio.get_running_loop().call_later(1 / self._pace, self._next)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


def _length_of(head: bytes | bytearray) -> int:
    for line in bytes(head).split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def _chunk(**more: object) -> bytes:
    event = {
        "choices": [{"finish_reason": None, "index": 0, "delta": {"content": " token"}}],
        "created": 1795800000,
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "model": "m",
        "system_fingerprint": "b11312-0c1e57098",
        "object": "chat.completion.chunk",
        **more,
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


_CHUNK = _framed(_chunk())
_LAST = _framed(_chunk(timings={"prompt_n": 9, "prompt_ms": 1, "predicted_n": 9, "predicted_ms": 9})) + _framed(
    b"data: [DONE]\n\n"
)
_LAST += b"0\r\n\r\n"


async def engine(path: str, port: int) -> None:
    """Serve as the fake engine on a unix socket and on a port."""
    loop = asyncio.get_running_loop()
    servers = (
        await loop.create_unix_server(_Engine, path, backlog=2048),
        await loop.create_server(_Engine, "127.0.0.1", port, backlog=2048),
    )
    await asyncio.gather(*(server.serve_forever() for server in servers))


# Our gateway, as `appliance serve` opens it, but for the fleet


async def ours(path: str, port: int) -> None:
    """Serve as our gateway in front of the fake engine: with named keys, usage and receipts, as shipped."""
    from appliance.gateway.accounts.accounts import Accounts
    from appliance.gateway.accounts.usage import Usage
    from appliance.gateway.accounts.usage_store import UsageStore
    from appliance.gateway.app import create_app
    from appliance.gateway.clients.auth import Keys
    from appliance.gateway.engine.backend import Backend
    from appliance.gateway.server import Gateway
    from appliance.serve.gateway.insight import SlotInsight

    ready = Progress(phase=Phase.READY)
    folder = Path(path).parent
    backend = Backend(
        name="m",
        socket_path=Path(path),
        routes=ROUTES,
        errors=ERRORS,
        dropped_headers=DROPPED_HEADERS,
        progress=lambda: ready,
        documents={},
        insight=SlotInsight(_slot(ready)),
    )
    app = create_app(
        [backend],
        keys=Keys(frozenset({KEY})),
        accounts=Accounts(folder / "keys.json"),
        usage=Usage(UsageStore(folder / "usage.sqlite3")),
    )
    await Gateway.open(app, "127.0.0.1", port)
    await asyncio.Event().wait()


def _slot(progress: Progress) -> ModelSlot:
    """Return a stand-in for the slot of a served and measured model, with all that watching a request reads."""
    from appliance.probe.load.meter import EnergyUse, Meter
    from tests import builders  # here: its models are made at import, which only this process needs

    profile = builders.profile()
    served = SimpleNamespace(
        host=SimpleNamespace(plan=profile.plan, restarts=0),
        ready=None,
        report=SimpleNamespace(progress=progress),
        tuning=SimpleNamespace(is_busy=False, drift=None),
        gpus_at_first=(),
        slow_beside=None,
        losses=(),
        meter=Meter(builders.machine(), {}),
        energy_use=EnergyUse(),
        profile=profile,
    )
    settings = SimpleNamespace(receipts=resolve_settings({}, {}).receipts)
    return cast("ModelSlot", SimpleNamespace(served=served, settings=settings))


# The ways


@dataclass(frozen=True)
class Way:
    """How the client reaches the engine; no process is a gateway on the direct way."""

    name: str
    port: int
    pid: int | None

    def cpu_s(self) -> float:
        if self.pid is None:
            return 0.0
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in threads) / 1e9

    def rss_kib(self) -> int:
        if self.pid is None:
            return 0
        return _field(self.pid, "VmRSS")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def _field(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@contextmanager
def _running(*argv: str) -> Iterator[int]:
    # End with this program, however it ends.
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)
    try:
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def until_open(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


@asynccontextmanager
async def open_ways(names: Sequence[str], router: str | None) -> AsyncIterator[list[Way]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway")))
        path, engine_port = str(folder / "engine.sock"), _free_port()
        me = (sys.executable, "-m", "benchmarks.gateway", "--be")
        stack.enter_context(_running(*me, "engine", "--socket", path, "--port", str(engine_port)))
        await until_open(engine_port)
        found = [Way("direct", engine_port, None)] if "direct" in names else []
        for name in [name for name in names if name != "direct"]:
            port = _free_port()
            argv: tuple[str, ...]
            if name == "ours":
                argv = (*me, "ours", "--socket", path, "--port", str(port))
            elif name == "nginx":
                (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, engine=path))
                argv = (shutil.which("nginx") or "", "-c", str(folder / "nginx.conf"))
            else:
                urls = ("--worker-urls", f"http://127.0.0.1:{engine_port}", "--policy", "round_robin")
                ports = ("--port", str(port), "--prometheus-port", str(_free_port()))
                argv = (router or "", *urls, "--host", "127.0.0.1", *ports, "--log-level", "error")
            pid = stack.enter_context(_running(*argv))
            await until_open(port)
            found.append(Way(name, port, pid))
        yield found
