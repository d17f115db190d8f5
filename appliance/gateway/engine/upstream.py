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

import httptools

from appliance.gateway.engine.link import Link
from appliance.gateway.wire.chunks import content_of
from appliance.gateway.wire.edges import Edges
from appliance.gateway.wire.events import has_content
from appliance.system.lack import is_lack, tell

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


class Response:
    """One answer of the engine. `status` and `headers` are set once `request` has yielded it; header names are as the
    engine spelt them.

    Whole chunks of the body skip the parser if `pass_on` takes them.
    """

    def __init__(self, method: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.method = method
        self._clock = clock
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._named: dict[bytes, bytes] = {}
        self.first_content: float | None = None
        self.last_content: float | None = None
        """When the first and the latest content of the answer came, by the clock. Content is what only a working model
        sends: no error, and no event that may precede it."""
        self.is_stream = False
        """True if one of our events can be inserted into it: an uncompressed event stream."""
        self._first_piece = b""
        self._last_pieces: deque[bytes] = deque(maxlen=LAST_PIECES)
        self._parser = httptools.HttpResponseParser(self)
        self._link: Link | None = None
        self.pass_on: Callable[[bytes, bytes], bool] | None = None
        """Takes whole chunks of the body as they come, framed, and their content, while the reader of `chunks` waits.
        False leaves them to the reader."""
        self._reader_waits = False
        self._is_between_chunks = False
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._is_paused = False
        self._has_head = self._has_begun = False
        self._is_whole = False
        self._broken: BrokenError | None = None
        self._moved: asyncio.Future[None] | None = None
        """Done when data came, the connection ended, or more can be written; None before anyone waited for that."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of that name, given in lower case; None if there is none."""
        return self._named.get(name)

    @property
    def content_length(self) -> int | None:
        """Length of the body; None if the body is framed in another way."""
        value = self.header(b"content-length")
        is_chunked = self.header(b"transfer-encoding") is not None
        return int(value) if value is not None and value.isdigit() and not is_chunked else None

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
    def is_read(self) -> bool:
        """True if the answer is whole and all of it was read."""
        return self._is_whole and not self._chunks

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def give_up(self, why: str) -> None:
        """End the answer: its reader gets a HungError after the data that has come so far."""
        self._break(HungError(why))
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

    def connect(self, socket_path: Path) -> None:
        """Raises OSError."""
        self._link = Link(socket_path, self)

    async def send(self, head: bytes, body: bytes) -> None:
        """Write the request. Returns when all is written, or when the engine has answered before that."""
        link = self._linked()
        for left in (memoryview(head + body[:PIECE_BYTES]), memoryview(body)[PIECE_BYTES:]):
            while left and not self._has_head and self._broken is None:
                if sent := link.send(left[:PIECE_BYTES]):
                    left = left[sent:]
                else:
                    link.on_writable(self._wake)
                    try:
                        await self._until_moved()
                    finally:
                        link.off_writable()

    async def until_head(self) -> None:
        while not self._has_head:
            self._raise_if_broken()
            await self._until_moved()
        self._has_begun = True

    def close(self) -> None:
        self._linked().close()
        # Both hold this answer: the circles would stay until the garbage collector comes.
        self._link = None
        del self._parser

    # Called by the link.

    def data_received(self, data: bytes) -> None:
        if self._reader_waits and self._is_between_chunks and self.pass_on is not None:
            content = content_of(data)
            if content is not None and self.pass_on(data, content):
                self._note(content)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break(BrokenError("it wants another protocol"))
        except httptools.HttpParserError as error:
            self._break(BrokenError(f"it sent something that is not HTTP: {error}"))
        # After a chunk's end more than a line break would be a part of the next one's size.
        self._is_between_chunks = self._is_between_chunks and data.endswith(b"\r\n")
        if self._buffered > BUFFER_BYTES and not self._is_paused:
            self._is_paused = True
            self._linked().pause_reading()
        if self._chunks or self._is_whole or self._broken is not None or not self._has_begun:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        is_framed = self.content_length is not None or self.header(b"transfer-encoding") is not None
        if self._has_head and not is_framed and error is None:
            self._is_whole = True
        if not self._is_whole:
            self._break(BrokenError("the connection ended"))
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
        self._named = {name.lower(): value for name, value in reversed(self.headers)}
        kind = self._named.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self.is_stream = kind == b"text/event-stream" and b"content-encoding" not in self._named
        if self.method == "HEAD":
            self._is_whole = True  # Content-Length counts a body that is not sent

    def on_body(self, body: bytes) -> None:
        # From here to the reader's next wait all pieces are the reader's, so that they stay in order.
        self._reader_waits = False
        self._chunks.append(body)
        self._buffered += len(body)
        self._first_piece = self._first_piece or body[:FIRST_BYTES]
        self._note(body)

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_whole = True

    def _note(self, body: bytes) -> None:
        self._last_pieces.append(body[-LAST_BYTES:])  # cut, since pieces of a quarter of a MiB may come
        if self.status < 400 and has_content(body):
            self.last_content = self._clock()
            if self.first_content is None:
                self.first_content = self.last_content

    def _resume(self) -> None:
        self._buffered = 0
        if self._is_paused:
            self._is_paused = False
            self._linked().resume_reading()

    async def _until_moved(self) -> None:
        self._moved = asyncio.get_running_loop().create_future()
        self._reader_waits = self._has_begun
        await self._moved

    def _wake(self) -> None:
        self._reader_waits = False
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    def _break(self, error: BrokenError) -> None:
        self._broken = self._broken or error

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            # A new one: the traceback of a kept one would hold this answer, and with it the request's body.
            raise type(self._broken)(*self._broken.args)

    def _linked(self) -> Link:
        if self._link is None:
            message = "there is no connection yet"
            raise RuntimeError(message)
        return self._link


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
    response = response or Response(method)
    try:
        response.connect(socket_path)
    except OSError as error:
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
