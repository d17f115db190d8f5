"""One connection of a client: uvicorn parses and answers; `Connections` is told what the connection waits for."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
import time
from email.utils import formatdate
from functools import lru_cache
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from appliance.gateway.clients.connections import (
    BUSY,
    BYTES_PER_S,
    KNOWN,
    LEFT,
    WRITE_NOW,
    Closed,
    Connections,
    Place,
    Wait,
)
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.http_answers import HEADER_BYTES_MAX, HttpProtocol

PIECE_BYTES = 16 * 2**10  # largest piece given to the parser at once, so that a header's size is counted as it arrives
PIPELINED = 16  # most pipelined requests; each takes some kilobytes before a key was checked
# Most pipelined bytes read ahead, as many as uvicorn allows to small bodies: the client's leaving is read after them.
PIPELINED_BYTES = PIPELINED * HIGH_WATER_LIMIT


@lru_cache(maxsize=1)
def _date_header(second: int) -> list[tuple[bytes, bytes]]:
    return [(b"date", formatdate(second, usegmt=True).encode())]


class Connection(HttpProtocol):
    """One connection of a client. uvicorn parses and answers; this class tells `Connections` what the connection waits
    for."""

    def __init__(self, *, config: Config, server_state: ServerState, connections: Connections) -> None:
        super().__init__(config=config, server_state=server_state, app_state={})
        self.place: Place = (Wait.HEADER, False)
        self.socket: socket.socket | None = None  # set a moment after the connection is made
        self._all = connections
        # the request being answered; `cycle` is the one that was parsed last
        self._running: RequestResponseCycle | None = None
        self._left: asyncio.Future[None] = self.loop.create_future()  # done if the client of that request has left
        self._is_in_message = False  # True while the parser is between the beginning and the end of a request
        self._is_in_header = False
        # True if the current piece contains neither the beginning of a request nor a part of a body
        self._is_bare = False
        # length of consecutive bare pieces within a request: its header, or what follows its last chunk
        self._bare_bytes = 0
        self._body_bytes = 0  # bytes of the body since the connection was put into its row
        self._unsent = 0  # unsent bytes when the connection was put into its row

    @property
    def _wait(self) -> Wait | None:
        return self.place[0]

    @property
    def _read_ahead(self) -> int:
        return sum(len(cycle.body) for cycle, _ in self.pipeline)

    @property
    def has_unread(self) -> bool:
        """True if the client has sent something that was not read yet."""
        if self.socket is None:
            return False
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.put(self, self.place)
        self._all.coming(-1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._leave()
        super().connection_lost(exc)
        # The scopes hold this connection: the circle would stay until the garbage collector comes.
        self._running = None
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            self._take(data[at : at + PIECE_BYTES])
        self._settle()

    def _take(self, piece: bytes) -> None:
        self._is_bare = True
        super().data_received(piece)
        self._bare_bytes = self._bare_bytes + len(piece) if self._is_bare and self._is_in_message else 0
        if self._bare_bytes > HEADER_BYTES_MAX and not self.transport.is_closing():
            self._end_with(api_error.header_too_large(HEADER_BYTES_MAX), Closed.TOO_LARGE)
        if self._wait is Wait.BODY:
            self._body_bytes += len(piece)
            if self._body_bytes >= BYTES_PER_S * self._all.limits.body_s:
                self._put(Wait.BODY)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._settle()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            message = "too many requests at once"
            raise httptools.HttpParserError(message)
        super().on_message_begin()
        self._is_in_message, self._is_in_header, self._is_bare = True, True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_header:  # headers after the last chunk are ignored: nothing reads or counts them
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._is_bare = False
        super().on_body(body)
        if self.cycle is not self._running and len(self.pipeline) < PIPELINED and self._read_ahead <= PIPELINED_BYTES:
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        self.scope[KNOWN] = self._know  # type: ignore[literal-required]
        if self._all.is_busy:
            self.scope[BUSY] = self._all.is_too_many  # type: ignore[literal-required]
        is_paused = self.flow.read_paused
        super().on_headers_complete()
        if not is_paused and len(self.pipeline) < PIPELINED:
            self.flow.resume_reading()  # uvicorn stops reading here and would not notice that the client leaves

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_message = self.parser.should_upgrade()  # an offered protocol upgrade: the body follows
        if self.cycle is self._running:
            self.flow.resume_reading()  # a large body has paused it, and the client's leaving is read, too

    # Called by the application.

    def _know(self) -> None:
        if not self.place[1] and self._all.has(self):  # else the client left while its key was looked for
            self._all.put(self, (self._wait, True))

    def _write_now(self, frames: bytes) -> bool:
        """Write whole chunks of the begun stream at once, without a task's turn. False if nothing was written: the
        client is slow or gone, or its answer is not in chunks. The application's `send` does that better."""
        cycle = self._running
        if cycle is None or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if self.flow.write_paused:
            return False
        self.transport.write(frames)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - uvicorn's own type
        self._running = cycle
        self._left = self.loop.create_future()
        cycle.scope[LEFT] = self._left  # type: ignore[literal-required]
        cycle.default_headers = _date_header(int(time.time()))
        cycle.scope[WRITE_NOW] = self._write_now  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    # Called by `Connections`.

    def begin_end(self) -> None:
        self._put(Wait.END)

    def expire(self) -> None:
        """Handle the end of the time limit of the connection's row."""
        if self._wait is Wait.HEADER:
            if self._is_in_header:
                self._end_with(api_error.too_slow(), Closed.HEADER)
            else:  # no request is open: the client would take an answer now for that of its next request
                self._all.closed(Closed.HEADER)
                self._close()
        elif self._wait is Wait.IDLE:
            self._close()
        elif self._wait is Wait.BODY:
            if self.flow.read_paused:  # the gateway itself has paused reading
                self._put(Wait.BODY)
            elif self._running is not None and self._running.response_started:
                self._all.closed(Closed.BODY)
                self._abort()
            else:
                self._end_with(api_error.too_slow(), Closed.BODY)
        elif self._unsent - self._unsent_now() >= BYTES_PER_S * self._all.limits.unread_s:
            self._put(self._wait)  # the client reads, though slowly
        else:
            self._all.closed(Closed.UNREAD)
            self._abort()

    def _settle(self) -> None:
        """Put the connection into the row of what it waits for now. Its time continues if the row stays the same."""
        wait = self._now()
        if wait is not self._wait and self._wait is not Wait.END and not self.transport.is_closing():
            self._put(wait)

    def _now(self) -> Wait | None:
        running = self._running
        if self.flow.write_paused:
            return Wait.UNREAD
        if running is None:
            return Wait.HEADER
        if running.response_complete:
            return Wait.HEADER if self._is_in_message else Wait.IDLE
        return Wait.BODY if running.more_body else None

    def _put(self, wait: Wait | None) -> None:
        self._body_bytes = 0
        if wait in (Wait.UNREAD, Wait.END):
            self._unsent = self._unsent_now()
        self._all.put(self, (wait, self.place[1]))

    def _unsent_now(self) -> int:
        """Return the bytes here and in the kernel that the client has not taken. The kernel's buffer holds megabytes,
        and lets a third of them go before it takes more: our own buffer alone would look unread meanwhile."""
        here = self.transport.get_write_buffer_size()
        if self.socket is None or self.socket.fileno() < 0:
            return here
        queued = fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, bytes(4))
        return here + int.from_bytes(queued, sys.byteorder)

    def _end_with(self, error: ApiError, reason: Closed) -> None:
        self._all.closed(reason)
        self.end_with(error)
        self._put(Wait.END)

    def end_with(self, error: ApiError) -> None:
        """Send the error and close. Close without a message if an answer has begun, or was given before its whole
        request came: the client would take the error for a part of that answer, or for the answer to its next
        request."""
        running = self._running
        is_later = running is not None and running.response_complete and (self._is_in_header or not self._is_in_message)
        if running is None or not running.response_started or is_later:
            super().end_with(error)
        else:
            self.transport.abort()
        self._leave()

    def _leave(self) -> None:
        """Tell the application that the client of the request being answered is gone. uvicorn tells only the request
        that was parsed last."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if not self._left.done():
                self._left.set_result(None)

    def _close(self) -> None:
        self.transport.close()
        self._put(Wait.END)

    def _abort(self) -> None:
        self._all.remove(self)
        self.transport.abort()
