"""A small HTTP/1.1 client: one request on one new connection to a unix socket; the answer is passed on as it arrives.

httptools parses it, which uvicorn needs anyway. A general client costs a quarter of a second to import, which would
delay the first token (`benchmarks/start.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import httptools

from appliance.gateway.wire.edges import Edges
from appliance.gateway.wire.events import has_content
from appliance.system.lack import is_lack, tell

# a local socket answers at once; on a machine with a load of 30 this program itself was delayed by 2 s
CONNECT_S = 10.0
# Most bytes read ahead of a slow client. Then the engine has to wait, as it would with the client itself.
BUFFER_BYTES = 256 * 2**10
# Writing 64 MiB in one piece would stop every other stream meanwhile.
PIECE_BYTES = 64 * 2**10
# Of an answer's body, the beginning and the last pieces are kept for what they say of tokens and times.
LAST_PIECES = 8
FIRST_BYTES, LAST_BYTES = 4 * 2**10, 64 * 2**10


class UnreachableError(Exception):
    """No connection was made; the request was not sent."""


class LackError(UnreachableError):
    """The gateway itself lacks a descriptor or memory for the connection."""


class BrokenError(Exception):
    """The connection ended before the answer was complete, or the answer is not HTTP."""


class HungError(BrokenError):
    """The engine hangs and is about to be killed."""


class Response(asyncio.Protocol):
    """One answer of the engine. `status` and `headers` are set once `request` has yielded it; header names are as the
    engine spelt them.

    `on_body` is called with each piece of the body as it arrives, unless the answer is an error.
    """

    def __init__(self, method: str, on_body: Callable[[bytes], None] | None = None) -> None:
        self.method = method
        self._on_body = on_body
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.first_content: float | None = None
        """time.monotonic() when the first content of the answer came."""
        self._first_piece = b""
        self._last_pieces: deque[bytes] = deque(maxlen=LAST_PIECES)
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self.pass_on: Callable[[bytes], bool] | None = None
        """Takes a piece of the body as soon as it comes, while the reader of `chunks` waits for it. False leaves the
        piece to the reader."""
        self._reader_waits = False
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._is_paused = False
        self._has_head = self._has_begun = False
        self._is_whole = False
        self._broken: BrokenError | None = None
        self._moved = asyncio.Event()  # set when data came or the connection ended
        self._writable = asyncio.Event()
        self._writable.set()

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of that name, given in lower case; None if there is none."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def content_length(self) -> int | None:
        """Length of the body; None if the body is framed in another way."""
        value = self.header(b"content-length")
        is_chunked = self.header(b"transfer-encoding") is not None
        return int(value) if value is not None and value.isdigit() and not is_chunked else None

    @property
    def is_stream(self) -> bool:
        """True if one of our events can be inserted into it: an uncompressed event stream."""
        kind = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        return kind == b"text/event-stream" and self.header(b"content-encoding") is None

    @property
    def edges(self) -> Edges:
        """The beginning and the end of the body so far."""
        end = b"".join(self._last_pieces)[-LAST_BYTES:]
        has_all = len(self._last_pieces) < LAST_PIECES and len(end) < LAST_BYTES
        begin = b"" if has_all else self._first_piece
        return Edges(begin=begin, end=end, is_stream=self.is_stream, is_whole=self._is_whole)

    @property
    def is_owed(self) -> bool:
        """True while the engine still has to send a part of the answer. False after its end, and while its reader is
        slow."""
        return not (self._is_whole or self._is_paused or self.is_broken)

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def give_up(self, why: str) -> None:
        """End the answer: its reader gets a HungError after the data that has come so far."""
        self._break(HungError(why))
        self._writable.set()
        self._wake()

    async def read(self) -> bytes:
        """Return the whole body. Raises BrokenError."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield pieces of the body as they arrive. Raises BrokenError after the last piece of an incomplete body."""
        while True:
            if self._chunks:
                data = b"".join(self._chunks)
                self._chunks.clear()
                self._resume()
                yield data
                continue
            if self._is_whole:
                return
            self._raise_if_broken()
            await self._until_moved()

    # Called by `request`.

    async def send(self, head: bytes, body: bytes) -> None:
        """Write the request. Returns when all is written, or when the engine has answered before that."""
        transport = self._connected()
        transport.write(head)
        view = memoryview(body)
        for at in range(0, len(body), PIECE_BYTES):
            await self._writable.wait()
            if self._has_head or self._broken is not None:
                return
            transport.write(view[at : at + PIECE_BYTES])

    async def until_head(self) -> None:
        while not self._has_head:
            self._raise_if_broken()
            await self._until_moved()
        self._has_begun = True

    def close(self) -> None:
        self._connected().abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same methods

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break(BrokenError("it wants another protocol"))
        except httptools.HttpParserError as error:
            self._break(BrokenError(f"it sent something that is not HTTP: {error}"))
        if self._buffered > BUFFER_BYTES and not self._is_paused:
            self._is_paused = True
            self._connected().pause_reading()
        if self._chunks or self._is_whole or self._broken is not None or not self._has_begun:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        is_framed = self.content_length is not None or self.header(b"transfer-encoding") is not None
        if self._has_head and not is_framed and error is None:
            self._is_whole = True
        if not self._is_whole:
            self._break(BrokenError("the connection ended"))
        self._writable.set()
        self._wake()

    # Called by httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()  # 100 Continue: the final answer follows
            return
        self.status = status
        self._has_head = True
        if self.method == "HEAD":
            self._is_whole = True  # Content-Length counts a body that is not sent

    def on_body(self, body: bytes) -> None:
        if not (self._reader_waits and self.pass_on is not None and self.pass_on(body)):
            # From here to the reader's next wait all pieces are the reader's, so that they stay in order.
            self._reader_waits = False
            self._chunks.append(body)
            self._buffered += len(body)
        self._first_piece = self._first_piece or body[:FIRST_BYTES]
        self._last_pieces.append(body[-LAST_BYTES:])  # cut, since pieces of a quarter of a MiB may come
        if self.first_content is None and has_content(body):
            self.first_content = time.monotonic()
        if self._on_body is not None and self.status < 400:
            self._on_body(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_whole = True

    def _resume(self) -> None:
        self._buffered = 0
        if self._is_paused:
            self._is_paused = False
            self._connected().resume_reading()

    async def _until_moved(self) -> None:
        self._moved.clear()
        self._reader_waits = self._has_begun
        await self._moved.wait()

    def _wake(self) -> None:
        self._reader_waits = False
        self._moved.set()

    def _break(self, error: BrokenError) -> None:
        self._broken = self._broken or error

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _connected(self) -> asyncio.Transport:
        if self._transport is None:
            message = "there is no connection yet"
            raise RuntimeError(message)
        return self._transport


@asynccontextmanager
async def request(
    socket_path: Path,
    method: str,
    target: str,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    response: Response | None = None,
) -> AsyncIterator[Response]:
    """Yield the answer once its headers have come; the connection is closed at the end of the block. `response`
    receives the answer; None makes a new one.

    There is no total time limit: the prefill of a long prompt takes minutes without a byte. Raises UnreachableError,
    BrokenError.
    """
    loop, taker = asyncio.get_running_loop(), response or Response(method)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, response = await loop.create_unix_connection(lambda: taker, str(socket_path))
    except (OSError, TimeoutError) as error:
        # EAGAIN of connect(2) means that the engine's queue of connections is full, not that we lack anything.
        if is_lack(error) and not isinstance(error, BlockingIOError):
            tell("reaching the engine", error)
            raise LackError from error
        raise UnreachableError(f"{socket_path}: {error}") from error  # noqa: EM102 - for a log, not for a client
    try:
        await response.send(_head(method, target, headers, body), body)
        await response.until_head()
        yield response
    finally:
        response.close()


def _head(method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), b"host: engine", b"connection: close"]
    if body or method == "POST":
        lines.append(b"content-length: %d" % len(body))
    # A value with a line break could add a header of its own, so it is dropped.
    lines += [name + b": " + value for name, value in headers if b"\n" not in value and b"\r" not in value]
    return b"\r\n".join(lines) + b"\r\n\r\n"
