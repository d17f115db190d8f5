"""One connection of a client: uvicorn parses and answers, and `Connections` is told what it waits for."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from appliance.gateway.clients.connections import (
    BUSY,
    BYTES_PER_S,
    KNOWN,
    Closed,
    Connections,
    Place,
    Wait,
)
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.http_answers import HEADER_BYTES_MAX, HttpProtocol

PIECE_BYTES = 16 * 2**10  # given to the parser at a time, so that a header is counted as it comes
PIPELINED = 16  # requests that wait for the answer before them: each is some kilobytes before anybody has a key


class Connection(HttpProtocol):
    """One connection. uvicorn parses and answers; this tells `Connections` what is waited for."""

    def __init__(self, *, config: Config, server_state: ServerState, connections: Connections) -> None:
        super().__init__(config=config, server_state=server_state, app_state={})
        self.place: Place = (Wait.HEADER, False)
        self.socket: socket.socket | None = None  # known a moment after the connection is made
        self._all = connections
        self._running: RequestResponseCycle | None = None  # what is answered; `cycle` is what was parsed last
        self._is_in_message = False  # the parser is between the beginning and the end of a request
        self._is_in_header = False
        self._is_bare = False  # the piece that is parsed has no beginning of a request and nothing of a body
        self._bare_bytes = 0  # of such pieces in a row, within a request: its header, or what follows its last chunk
        self._body_bytes = 0  # since the connection was put into its row
        self._unsent = 0  # when it was put into its row

    @property
    def _wait(self) -> Wait | None:
        return self.place[0]

    @property
    def has_unread(self) -> bool:
        """Its client has sent something that was not looked at yet."""
        if self.socket is None:
            return False
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    # asyncio's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.put(self, self.place)
        self._all.coming(-1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._leave()
        super().connection_lost(exc)

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

    # The parser's side.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            message = "too many requests at once"
            raise httptools.HttpParserError(message)
        super().on_message_begin()
        self._is_in_message, self._is_in_header, self._is_bare = True, True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_header:  # and not after the last chunk: nobody reads those, and nobody has counted them
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._is_bare = False
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        self.scope[KNOWN] = self._know  # type: ignore[literal-required]
        if self._all.is_busy:
            self.scope[BUSY] = self._all.is_too_many  # type: ignore[literal-required]
        is_paused = self.flow.read_paused
        super().on_headers_complete()
        if not is_paused and len(self.pipeline) < PIPELINED:
            self.flow.resume_reading()  # uvicorn reads no more, and would not see that the client leaves

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_message = self.parser.should_upgrade()  # an offer, after which the body follows

    # The application's side.

    def _know(self) -> None:
        if not self.place[1]:
            self._all.put(self, (self._wait, True))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401 - uvicorn's own type
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    # What `Connections` does with it.

    def begin_end(self) -> None:
        self._put(Wait.END)

    def expire(self) -> None:
        """The time of the row that it stands in is over."""
        if self._wait is Wait.HEADER:
            if self._is_in_header:
                self._end_with(api_error.too_slow(), Closed.HEADER)
            else:  # nothing was asked, or all was answered: an answer now would be taken for that of the next request
                self._all.closed(Closed.HEADER)
                self._close()
        elif self._wait is Wait.IDLE:
            self._close()
        elif self._wait is Wait.BODY:
            if self.flow.read_paused:  # it is we who do not read
                self._put(Wait.BODY)
            elif self._running is not None and self._running.response_started:
                self._all.closed(Closed.BODY)
                self._abort()
            else:
                self._end_with(api_error.too_slow(), Closed.BODY)
        elif self._unsent - self._unsent_now() >= BYTES_PER_S * self._all.limits.unread_s:
            self._put(self._wait)  # it reads, if slowly
        else:
            self._all.closed(Closed.UNREAD)
            self._abort()

    def _settle(self) -> None:
        """Into the row that it belongs to now. Its time goes on where that is the same as before."""
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
        """Bytes here and in the kernel that the client has not taken. The kernel's are megabytes, of which it lets a
        third go before it takes more: what is here alone would look unread meanwhile."""
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
        """Without a word where an answer has begun, or was given before all of its request came: another one would be
        read as a part of it, or as the answer to the next request."""
        running = self._running
        is_later = running is not None and running.response_complete and (self._is_in_header or not self._is_in_message)
        if running is None or not running.response_started or is_later:
            super().end_with(error)
        else:
            self.transport.abort()
        self._leave()

    def _leave(self) -> None:
        """The client is gone for what is answered. uvicorn tells so to what was parsed last alone."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _close(self) -> None:
        self.transport.close()
        self._put(Wait.END)

    def _abort(self) -> None:
        self._all.remove(self)
        self.transport.abort()
