"""The stream of events behind the pages: made once for all watchers, and only while somebody watches."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance import __version__
from appliance.console.progress import Phase
from appliance.gateway.clients.request_log import RequestLog
from appliance.gateway.engine.backend import Backend, Document
from appliance.gateway.engine.gate import FleetDoor
from appliance.gateway.routes.models import Endpoint
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.headers import OF_A_STREAM
from appliance.race import first_of
from appliance.system.detached import detached
from appliance.system.lack import is_lack, tell

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

TICK_S = 1.0
DOCUMENTS_S = 2.0
DOCTOR_S = 300.0
DOCTOR_AGAIN_S = 5.0
KEEP_ALIVE_S = 15.0
WATCHERS_MAX = 100
_HEADERS = (*OF_A_STREAM, (b"cache-control", b"no-store"))
DOCUMENTS = ("status", "plan", "profile", "tuning", "hardware")
_log = logging.getLogger(__name__)


class Feed:
    """What watchers are sent of one model. The newest state of each event is kept; a slow watcher misses older ones.

    `recent` returns the log's latest lines. `doctor` looks at the machine, in a thread.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        requests: RequestLog,
        recent: Callable[[], list[dict[str, Any]]],
        doctor: Document | None = None,
        fleet: FleetDoor | None = None,
    ) -> None:
        self._backend = backend
        self._fleet = fleet
        self._requests = requests
        self._recent = recent
        self._doctor = doctor
        self._began = time.monotonic()
        self._state: dict[str, tuple[int, bytes]] = {}  # by event: how often it changed, and its text
        self._moved = asyncio.Event()
        self._watchers = 0
        self._making: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[dict[str, Any]] | None = None
        self._examined = float("-inf")
        self._failed: set[str] = set()
        requests.listen(lambda _row: self._wake())

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield pieces of the stream until the appliance stops. Raises ApiError if too many watch already."""
        with self._watching() as making:
            seen: dict[str, int] = {}
            count = self._requests.count
            rows = [row.document() for row in reversed(self._requests.since(0))]
            yield _event("requests", _json({"requests": rows}))
            while True:
                moved = self._moved
                # Copied, because the state goes on while a slow watcher is sent a piece.
                for name, (version, text) in tuple(self._state.items()):
                    if seen.get(name) != version:
                        seen[name] = version
                        yield text
                new, count = self._requests.since(count), self._requests.count
                for row in new:
                    yield _event("request", _json(row.document()))
                if making.done():
                    making.result()
                    return
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await moved.wait()
                except TimeoutError:
                    yield b": still here\n\n"

    @contextmanager
    def _watching(self) -> Iterator[asyncio.Task[None]]:
        """Count one watcher while the block runs; yields the task that makes the events, which all share."""
        if self._watchers >= WATCHERS_MAX:
            detail = f"{WATCHERS_MAX} pages watch this appliance already: close some"
            raise ApiError(503, "too_many_watchers", detail, headers=((b"retry-after", b"10"),))
        self._watchers += 1
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make_all(), name="events of the pages")
            self._making.add_done_callback(lambda _task: self._wake())
        making = self._making
        try:
            yield making
        finally:
            self._watchers -= 1
            if not self._watchers and self._making is not None:
                self._making.cancel()
                self._making = None  # its end takes a moment, in which the next watcher may come

    async def _make_all(self) -> None:
        ended = await first_of(self._make(), self._examine())
        for future in ended:
            if not future.cancelled():
                future.result()

    async def _make(self) -> None:
        """Renew what watchers see, until the appliance stops."""
        looked = float("-inf")
        while True:
            is_over = self._backend.traffic.is_closed
            if time.monotonic() - looked >= DOCUMENTS_S:
                looked = time.monotonic()
                for name in DOCUMENTS:
                    if name in self._backend.documents:
                        self._set(name, self._backend.documents[name])
                self._set("log", lambda: {"lines": self._recent()})
                if self._fleet is not None:
                    self._set("fleet", self._fleet.document)
            await self._look_at_load()
            self._set("now", partial(self._now, is_over=is_over))
            self._wake()
            if is_over:
                return
            await first_of(asyncio.sleep(TICK_S), self._backend.traffic.until_closed())

    async def _examine(self) -> None:
        """Look at the machine now and then, between requests. It takes a second or more, so it runs in a thread. A page
        that is opened again does not look anew."""
        while True:
            wait_s = self._examined + DOCTOR_S - time.monotonic()
            if self._doctor is None:
                await asyncio.sleep(DOCTOR_S)
            elif self._examining is not None:
                await self._take_findings(self._examining)
            elif wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self._backend.traffic.working:
                await asyncio.sleep(DOCTOR_AGAIN_S)
            else:
                self._examined = time.monotonic()
                self._examining = asyncio.create_task(detached(self._doctor), name="doctor of the pages")

    async def _take_findings(self, examining: asyncio.Task[dict[str, Any]]) -> None:
        # `wait` does not cancel it: the thread goes on if all watchers leave, and the next ones wait for it.
        await asyncio.wait((examining,))
        self._examining = None
        self._set("doctor", examining.result)
        self._wake()

    async def _look_at_load(self) -> None:
        if self._backend.progress().is_ready:
            for figure in (self._backend.kv_use, self._backend.counts):
                if figure:
                    await figure.refresh()
        if self._backend.insight:
            await self._backend.insight.refresh()

    def _now(self, *, is_over: bool) -> dict[str, Any]:
        backend = self._backend
        progress, load, model = backend.progress(), backend.load(), backend.listed().id
        phase = Phase.STOPPING if is_over else progress.phase
        return {
            "time": round(time.time(), 1),
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._began, 1),
            "phase": str(phase),
            "message": progress.sentence(),
            "elapsed_s": round(max(0.0, time.monotonic() - progress.since), 1),
            "facts": dict(progress.facts),
            "model": model,
            "tokens_per_s": round(backend.traffic.rate.per_s, 1),
            "requests_running": load.running if load else backend.traffic.working,
            "requests_waiting": load.waiting if load else None,
            "kv_use": load.kv_use if load else None,
            "ttft_p50_s": self._requests.ttft_s(0.5, model),
            "ttft_p95_s": self._requests.ttft_s(0.95, model),
            "engine_restarts": backend.engine_restarts() if backend.engine_restarts else None,
            "engine_hangs": backend.upstream.hangs,
            "experts": experts_of((backend.counts.value if backend.counts else None) or {}),
            "watts": backend.insight.watts() if backend.insight else None,
        }

    def _set(self, name: str, make: Document) -> None:
        """Take a document's newest state. If it cannot be made, watchers keep the last one, and all others go on."""
        try:
            text = _event(name, _json(make()))
        except Exception as error:
            if is_lack(error):
                tell(f"making the {name} of a page", error)
            elif name not in self._failed:
                self._failed.add(name)  # logged once: it is made every few seconds
                _log.exception("the %s of a page cannot be made", name)
            return
        self._failed.discard(name)
        version, before = self._state.get(name, (0, b""))
        if text != before:
            self._state[name] = (version + 1, text)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def experts_of(counts: Mapping[str, float]) -> dict[str, float] | None:
    """Return the share of a token's experts that were found in slots on the GPU, and the milliseconds of a layer, since
    the engine's start; None without slots or tokens."""
    hits, layers = counts.get("moe_hits_total"), counts.get("moe_layer_tokens_total")
    if hits is None or not layers:
        return None
    used = hits + counts.get("moe_fetched_total", 0.0) + counts.get("moe_cpu_total", 0.0)
    layer_ms = 1000 * counts.get("moe_measured_seconds_total", 0.0) / layers
    return {"hits": round(hits / used, 3) if used else 0.0, "layer_ms": round(layer_ms, 3)}


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=str).encode()


def _event(name: str, body: bytes) -> bytes:
    """Return one event. JSON has no line breaks outside of its strings, where they are escaped."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), body)


def feed_endpoint(choose: Callable[[Scope], Feed]) -> Endpoint:
    """Return the endpoint of the stream; `choose` returns the feed of a request, or raises ApiError."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        stream = choose(scope).events()
        try:
            first = await anext(stream)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.body", "body": first, "more_body": True})
            sending, _ = await first_of(_send_all(stream, send), _until_left(receive))
            if not sending.cancelled():
                sending.result()
        finally:
            await stream.aclose()

    return answer


async def _send_all(stream: AsyncIterator[bytes], send: Send) -> None:
    async for piece in stream:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
