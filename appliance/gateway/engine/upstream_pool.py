"""The engine's unix socket that requests are sent to. It can change to another engine's while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.gateway.clients.request_log import OWNER
from appliance.gateway.engine import upstream
from appliance.gateway.engine.waits import Waits
from appliance.gateway.wire import headers

if TYPE_CHECKING:
    from starlette.types import Scope


class UpstreamPool:
    """Sends requests to the current socket. A request stays with its engine if the socket changes."""

    def __init__(self, socket_path: Path, dropped_headers: frozenset[bytes] = frozenset()) -> None:
        """`dropped_headers`, in lower case, are not passed on, in addition to those that never are."""
        self._dropped_headers = dropped_headers
        self._present = _Upstream(socket_path)
        self._past: list[_Upstream] = []
        self.one_by_one = asyncio.Lock()
        """Held by a request that is repeated alone, because parallel requests did not fit into the engine's context."""
        self.sent = 0
        """Number of requests sent so far."""
        self.hangs = 0
        """Number of engines given up because they no longer answered."""

    @property
    def socket_path(self) -> Path:
        """The socket that requests are sent to now. The file itself need not exist yet."""
        return self._present.socket_path

    @property
    def is_free(self) -> bool:
        """True if the current engine has no request."""
        return self._present.is_free.is_set()

    async def wait_free(self) -> None:
        """Wait until the current engine has no request. The caller sees to it that no new one comes."""
        await self._present.is_free.wait()

    def switch_to(self, socket_path: Path) -> None:
        """Send requests to this socket from now on; running ones stay where they are."""
        self._past.append(self._present)
        self._present = _Upstream(socket_path)

    def waits(self, socket_path: Path) -> Waits | None:
        """Return the requests that wait for the engine on this socket. None if no requests are sent there."""
        lines = (line for line in (self._present, *reversed(self._past)) if line.socket_path == socket_path)
        return next((line.waits for line in lines), None)

    def give_up(self, socket_path: Path, why: str) -> None:
        """End the requests of the engine on this socket with an error that says that it hangs and is about to be
        killed."""
        self.hangs += 1
        if waits := self.waits(socket_path):
            waits.give_up(why)

    async def wait_drained(self) -> None:
        """Wait until no request is with a former engine, however long that takes."""
        while self._past:
            line = self._past[0]
            await line.is_free.wait()
            if line in self._past:
                self._past.remove(line)

    @asynccontextmanager
    async def asked(
        self, scope: Scope, path: str, body: bytes, *, needs_model: bool = True
    ) -> AsyncIterator[upstream.Response]:
        """Yield the engine's answer once its headers have come; the connection is closed at the end of the block.

        Each request gets its own connection. An engine closes idle kept-alive connections by itself, so a POST sent at
        that moment would fail on a healthy engine; and a new connection on a unix socket costs only about 50 µs.
        """
        query = scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        line = self._present
        self.sent += 1
        response = upstream.Response(scope["method"])
        with line.taken(), line.waits.waiting(response, len(body), needs_model=needs_model):
            head = headers.to_engine(scope["headers"], self._dropped_headers, owner=scope.get(OWNER))
            async with upstream.request(line.socket_path, scope["method"], target, head, body, response):
                yield response


class _Upstream:
    """One socket and the number of requests on it. Made inside the running loop."""

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
