"""Taking connections from the port: no more than may be, and not all of them at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from appliance.gateway.clients.connection import Connection
from appliance.gateway.clients.connections import GRACE_S, Connections, Refused
from appliance.gateway.wire import api_error
from appliance.gateway.wire.http_answers import HEADER_BYTES_MAX, as_response
from appliance.system import lack

BURST = 16  # taken in one go; a connection that makes room is closed a moment later
PAUSE_S = 0.5  # after an accept that failed


class Acceptor:
    """Takes connections from a listening socket, as many as may be. In place of asyncio's server, which takes all that
    wait before it gives the first of them to a protocol: 2,048 descriptors that others need meanwhile."""

    def __init__(self, listener: socket.socket, connections: Connections, make: Callable[[], Connection]) -> None:
        self._listener = listener
        self._connections = connections
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """The port is closed; connections stay."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """uvicorn asks for it."""

    def _accept(self) -> None:
        for _ in range(BURST):
            if self._connections.must_wait:
                self._rest(GRACE_S / 5)
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(PAUSE_S)  # the socket stays readable, and the loop would spin
                if not lack.is_lack(error):
                    raise
                lack.tell("taking connections", error)
                return
            if self._connections.make_room():
                connection.setblocking(False)
                self._connections.coming(1)
                task = self._loop.create_task(self._connect(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._connections.refused(Refused.CONNECTIONS)
                _refuse(connection)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._loop.add_reader, self._listener, self._accept)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            _, protocol = await self._loop.connect_accepted_socket(self._make, connection)
            protocol.socket = connection
        except OSError as error:  # mostly of a client that left in that moment
            self._connections.coming(-1)
            connection.close()
            if lack.is_lack(error):
                lack.tell("taking connections", error)


def _refuse(connection: socket.socket) -> None:
    """Best effort: nothing is waited for."""
    with connection:
        connection.setblocking(False)
        with suppress(OSError):
            connection.recv(HEADER_BYTES_MAX)  # what is not read would tear the answer from the client
        with suppress(OSError):
            connection.send(as_response(api_error.too_busy()))
            connection.shutdown(socket.SHUT_WR)
