"""Where requests go: the engine's unix socket, which may become another engine's while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.gateway.engine import upstream
from appliance.gateway.engine.waits import Waits
from appliance.gateway.wire import headers

if TYPE_CHECKING:
    from starlette.types import Scope


class UpstreamPool:
    """Requests go to the socket that is the present one when they are sent on. There they also end."""

    def __init__(self, socket_path: Path, dropped_headers: frozenset[bytes] = frozenset()) -> None:
        """`dropped_headers`, lower case, are not passed on beside those that never are."""
        self._dropped_headers = dropped_headers
        self._present = _Upstream(socket_path)
        self._past: list[_Upstream] = []
        self.one_by_one = asyncio.Lock()
        """For requests that did not fit into the engine's context together."""
        self.sent = 0
        """How many requests so far."""
        self.hangs = 0
        """How often an engine was given up that did not answer any more."""

    @property
    def socket_path(self) -> Path:
        """Where requests go now. The socket itself need not exist yet."""
        return self._present.socket_path

    @property
    def is_free(self) -> bool:
        """No request is with the present engine."""
        return self._present.is_free.is_set()

    def switch_to(self, socket_path: Path) -> None:
        """Requests go there from now on; those that run stay where they are."""
        self._past.append(self._present)
        self._present = _Upstream(socket_path)

    def waits(self, socket_path: Path) -> Waits | None:
        """What the engine that listens there owes. None while no request goes there."""
        lines = (line for line in (self._present, *reversed(self._past)) if line.socket_path == socket_path)
        return next((line.waits for line in lines), None)

    def give_up(self, socket_path: Path, why: str) -> None:
        """The engine there hangs and is about to be killed: its requests end with an error that says so."""
        self.hangs += 1
        if waits := self.waits(socket_path):
            waits.give_up(why)

    async def wait_drained(self) -> None:
        """Returns once no request is with an engine of the past, however long that takes."""
        while self._past:
            line = self._past[0]
            await line.is_free.wait()
            if line in self._past:
                self._past.remove(line)

    @asynccontextmanager
    async def asked(
        self, scope: Scope, path: str, body: bytes, *, needs_model: bool = True
    ) -> AsyncIterator[upstream.Response]:
        """The engine's answer, of which the headers are there; the connection is closed at the end of the block.

        One connection a request: an engine closes kept ones of its own accord, a POST that meets that
        moment fails on a healthy engine, and a new connection on a unix socket costs some 50 µs.
        """
        query = scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        line = self._present
        self.sent += 1
        response = upstream.Response(scope["method"], line.waits.note_piece if needs_model else None)
        with line.taken(), line.waits.waiting(response, len(body)):
            head = headers.to_engine(scope["headers"], self._dropped_headers)
            async with upstream.request(line.socket_path, scope["method"], target, head, body, response):
                yield response


class _Upstream:
    """One socket, and whether a request is on it. Made inside the loop."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self._running = 0
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.waits = Waits()

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
