"""Accepts connections from the port, at most as many as allowed and a few at a time."""

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

# connections accepted in one turn of the loop; a connection that is closed to make room closes a moment later
BURST = 16
PAUSE_S = 0.5  # pause after a failed accept


class Acceptor:
    """Accepts connections from a listening socket, as many as allowed. It replaces asyncio's server, which accepts all
    waiting connections before it gives the first one to a protocol: 2,048 descriptors that other parts need
    meanwhile."""

    def __init__(self, listener: socket.socket, connections: Connections, make: Callable[[], Connection]) -> None:
        self._listener = listener
        self._connections = connections
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Close the port; open connections stay."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Do nothing; uvicorn calls it."""

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
                self._rest(PAUSE_S)  # without a pause the loop would spin, since the socket stays readable
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
        except OSError as error:  # mostly because the client left at that moment
            self._connections.coming(-1)
            connection.close()
            if lack.is_lack(error):
                lack.tell("taking connections", error)


def _refuse(connection: socket.socket) -> None:
    """Try to send a refusal; does not wait for anything."""
    with connection:
        connection.setblocking(False)
        with suppress(OSError):
            # unread bytes would reset the connection before the client has read the answer
            connection.recv(HEADER_BYTES_MAX)
        with suppress(OSError):
            connection.send(as_response(api_error.too_busy()))
            connection.shutdown(socket.SHUT_WR)
