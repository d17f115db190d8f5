"""One request to the engine and its answer back, byte for byte: no body is parsed, no stream is gathered.

A request ends in one of four ways, whichever comes first: the answer is whole, the client leaves, the engine dies, or
the appliance stops. In every case the connection to the engine is closed before the request is over, which is what
frees the engine's slot.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from appliance.gateway import headers, refusal
from appliance.gateway.progress import Progress
from appliance.gateway.refusal import Refusal
from appliance.gateway.routes import Dialect, EngineRoute
from appliance.gateway.traffic import Traffic

T = TypeVar("T")

# An answer of known length up to here is read whole first, so that an engine that dies in the middle of it becomes a
# 502 and not a torn body. Longer ones (embeddings of a large batch) pass as they arrive.
WHOLE_REPLY_BYTES = 8 * 2**20

# No total limit: the prefill of a long prompt is minutes without a byte.
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=2.0, sock_read=None)


class ClientLeft(Exception):  # noqa: N818 - not an error: nobody is there any more to be told one
    """The client closed its connection before the answer was whole."""


class Engine:
    """The HTTP client of one engine, on its unix socket."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Open while the application runs. The socket itself need not exist yet."""
        # One connection a request: llama-server closes kept ones after 5 s of its own accord, a POST that meets that
        # moment fails on a healthy engine, and a new connection on a unix socket costs some 50 µs.
        connector = aiohttp.UnixConnector(path=str(self._socket_path), force_close=True, limit=0)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=TIMEOUT,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
        ) as self._session:
            yield
        self._session = None

    async def request(self, scope: Scope, upstream: str, body: bytes) -> aiohttp.ClientResponse:
        """The engine's answer as far as its headers; the caller closes it."""
        if self._session is None:
            message = "the application is not running: its lifespan was never entered"
            raise RuntimeError(message)
        query = scope["query_string"].decode("latin-1")
        return await self._session.request(
            scope["method"],
            URL(f"http://engine{upstream}?{query}" if query else f"http://engine{upstream}", encoded=True),
            headers=headers.to_engine(scope["headers"]),
            # A file object is written in pieces; 64 MiB in one piece would stop every other stream meanwhile.
            data=io.BytesIO(body) if body or scope["method"] == "POST" else None,
            allow_redirects=False,
        )


class Reply:
    """What the client has been sent so far, and therefore how an error can still be told."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._last_chunk = b"\n\n"
        self._is_started = False
        self._is_events = False

    async def start(self, response: aiohttp.ClientResponse) -> None:
        self._is_started = True
        self._is_events = response.content_type == "text/event-stream" and "content-encoding" not in response.headers
        head = headers.to_client(response.raw_headers)
        await self._send({"type": "http.response.start", "status": response.status, "headers": head})

    async def write(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": chunk})

    async def refuse(self, error: Refusal) -> None:
        """An answer, or an event of its own in a stream of events. A body that cannot hold one is left unfinished:
        the server then closes the connection, and the client sees a torn answer instead of a short one."""
        if not self._is_started:
            await error.send(self._send)
        elif self._is_events:
            gap = b"" if self._last_chunk.endswith(b"\n\n") else b"\n\n"
            await self.finish(gap + error.event(self._dialect))


class EngineEndpoint:
    """The ASGI application of one route of the engine."""

    def __init__(
        self,
        route: EngineRoute,
        *,
        engine: Engine,
        traffic: Traffic,
        progress: Callable[[], Progress],
        max_body_bytes: int,
    ) -> None:
        self._route = route
        self._engine = engine
        self._traffic = traffic
        self._progress = progress
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._route.dialect)
        try:
            with self._traffic.admitted() as must_end:
                try:
                    await self._exchange(scope, receive, reply, must_end)
                except Refusal as error:
                    # Inside `admitted`: a stop waits until the client has been told.
                    await reply.refuse(error)
        except Refusal as error:
            await reply.refuse(error)
        except ClientLeft:
            return

    async def _exchange(self, scope: Scope, receive: Receive, reply: Reply, must_end: asyncio.Future[None]) -> None:
        progress = self._progress()
        if not progress.is_ready:
            raise refusal.not_ready(progress)
        reading = read_body(receive, _declared_length(scope), self._max_body_bytes)
        body = await first_of(reading, must_end=must_end)
        await first_of(self._forward(scope, body, reply), until_client_left(receive), must_end=must_end)

    async def _forward(self, scope: Scope, body: bytes, reply: Reply) -> None:
        response = None
        try:
            response = await self._engine.request(scope, self._route.upstream, body)
            await relay(response, reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise refusal.engine_died(503, "the engine cannot be reached; try again in a moment") from error
        except (aiohttp.ClientError, OSError) as error:
            raise refusal.engine_died(502, "the engine ended while it worked on this request") from error
        finally:
            if response is not None:
                response.close()


async def relay(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """Chunks pass as they arrive. `write` waits while the client is slow, and then nothing more is read."""
    length = response.content_length
    if response.method != "HEAD" and length is not None and length <= WHOLE_REPLY_BYTES:
        body = await response.read()
        await reply.start(response)
        await reply.finish(body)
        return
    await reply.start(response)
    async for chunk in response.content.iter_any():
        await reply.write(chunk)
    await reply.finish()


async def read_body(receive: Receive, declared_bytes: int, limit_bytes: int) -> bytes:
    """The whole body: the engine needs all of it to begin. Raises Refusal (413) as soon as it is too much."""
    if declared_bytes > limit_bytes:
        raise refusal.body_too_large(limit_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise refusal.body_too_large(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


async def until_client_left(receive: Receive) -> None:
    """Raises ClientLeft when the connection is gone; never returns."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft


async def first_of(
    work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, None], must_end: asyncio.Future[None]
) -> T:
    """The result of `work`, unless a watcher raises or `must_end` is done before; whatever is left is cancelled and
    has ended when this returns."""
    working = asyncio.create_task(work)
    watching = [asyncio.create_task(watcher) for watcher in watchers]
    tasks: list[asyncio.Task[Any]] = [working, *watching]
    try:
        await asyncio.wait([*tasks, must_end], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            # The first of them that came to an end by itself, `work` before the watchers.
            task.result()
    if working.cancelled():
        raise refusal.shutting_down()
    return working.result()


def _declared_length(scope: Scope) -> int:
    """Content-Length as announced, 0 without one: a chunked body is counted while it is read."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
