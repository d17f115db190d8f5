"""The HTTP client of the engine, on its unix socket, which may become another engine's while requests run."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
from starlette.types import Scope
from yarl import URL

from appliance.gateway import headers

# No total limit: the prefill of a long prompt is minutes without a byte.
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=2.0, sock_read=None)


class Engine:
    """Where requests go: to the socket that is the present one when they are sent on. There they also end."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._present: _Line | None = None
        self._past: list[_Line] = []

    @property
    def socket_path(self) -> Path:
        """Where requests go now."""
        return self._socket_path

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Open while the application runs. The socket itself need not exist yet."""
        self._present = _Line(self._socket_path)
        try:
            yield
        finally:
            lines = [*self._past, self._present]
            self._present, self._past = None, []
            for line in lines:
                await line.session.close()

    def switch_to(self, socket_path: Path) -> None:
        """Requests go there from now on; those that run stay where they are."""
        self._socket_path = socket_path
        if self._present is not None:
            self._past.append(self._present)
            self._present = _Line(socket_path)

    async def until_left(self) -> None:
        """Returns once no request is with an engine of the past, however long that takes."""
        while self._past:
            line = self._past[0]
            await line.is_free.wait()
            if line in self._past:
                self._past.remove(line)
            await line.session.close()

    @asynccontextmanager
    async def asked(self, scope: Scope, upstream: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, of which the headers are there; the connection is closed at the end of the block."""
        line = self._present
        if line is None:
            message = "the application is not running: its lifespan was never entered"
            raise RuntimeError(message)
        query = scope["query_string"].decode("latin-1")
        with line.taken():
            response = await line.session.request(
                scope["method"],
                URL(f"http://engine{upstream}?{query}" if query else f"http://engine{upstream}", encoded=True),
                headers=headers.to_engine(scope["headers"]),
                # A file object is written in pieces; 64 MiB in one piece would stop every other stream meanwhile.
                data=io.BytesIO(body) if body or scope["method"] == "POST" else None,
                allow_redirects=False,
            )
            try:
                yield response
            finally:
                response.close()


class _Line:
    """One socket, and whether a request is on it. Made inside the loop."""

    def __init__(self, socket_path: Path) -> None:
        self.session = aiohttp.ClientSession(
            # One connection a request: llama-server closes kept ones after 5 s of its own accord, a POST that meets
            # that moment fails on a healthy engine, and a new connection on a unix socket costs some 50 µs.
            connector=aiohttp.UnixConnector(path=str(socket_path), force_close=True, limit=0),
            timeout=TIMEOUT,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
        )
        self._running = 0
        self.is_free = asyncio.Event()
        self.is_free.set()

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._running += 1
        self.is_free.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self.is_free.set()
