"""Opens the port and closes it in order. It handles no signals: the code that opens the gateway drains it."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from appliance.errors import ConfigError
from appliance.gateway.app import App
from appliance.gateway.clients.acceptor import Acceptor
from appliance.gateway.clients.connection import Connection
from appliance.gateway.clients.connections import KEEP_ALIVE_S, Connections, Limits, own_limits
from appliance.gateway.clients.traffic import all_idle
from appliance.race import first_of

# Together with uvicorn's own steps of 0.1 s this is less than the second that a stop may take after `drain_s`.
END_S = 0.8
# Shares of END_S: to send error events to clients, to close connections in order, and to end after the remaining
# connections were aborted.
TELL, FLUSH, ABORT = 0.3, 0.45, 0.25
GC_THRESHOLDS = (10_000, 20, 50)
"""For `gc.set_threshold`. The usual 700 new objects are those of a few requests that run at the same time."""
BIND_HINTS = {
    errno.EADDRINUSE: "stop the program that listens there, or choose another port with --port (APPLIANCE_PORT)",
    errno.EACCES: "choose a port above 1023 with --port (APPLIANCE_PORT)",
    errno.EADDRNOTAVAIL: "choose an address of this machine with --host (APPLIANCE_HOST), 0.0.0.0 for all of them",
}


class Gateway:
    """The application on its port, from `open` to `drain`."""

    def __init__(self, server: _Server, serving: asyncio.Task[None], app: App, port: int) -> None:
        self._server = server
        self._serving = serving
        self._app = app
        self.backends = app.backends
        self.requests = app.requests
        self.port = port

    @classmethod
    async def open(cls, app: App, host: str, port: int, limits: Limits | None = None) -> Gateway:
        """Bind the port at once and serve in the running loop. Port 0 takes any free one. `limits` None takes the
        limits of this process. Raises ConfigError if the port cannot be bound."""
        listener = await bind(host, port)
        # All that was imported stays: looking through it again and again takes a tenth of the time of short requests.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",
            server_header=False,
            date_header=False,  # `Connection` adds it
            proxy_headers=False,
            timeout_keep_alive=math.ceil(KEEP_ALIVE_S),
        )
        running = lambda: sum(traffic.running for traffic in app.traffics)  # noqa: E731
        server = _Server(config, Connections(limits or own_limits(), app.connection_counts, running))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
        # Shielded, because the task must keep serving after this wait.
        await first_of(asyncio.shield(serving), server.is_up.wait())
        if serving.done():
            listener.close()
            await serving
        return cls(server, serving, app, listener.getsockname()[1])

    @property
    def running(self) -> int:
        """Number of running requests of every kind."""
        return sum(traffic.running for traffic in self._app.traffics)

    async def drain(self, drain_s: float, *, end_s: float = END_S) -> None:
        """Stop in order: no new connections, no new requests, `drain_s` seconds for running requests, an error for the
        rest, every connection closed. Returns within `drain_s` + `end_s` + 0.2 s whatever clients do; a second call
        waits for the same end."""
        for traffic in self._app.traffics:
            traffic.close()
        self._server.stop_accepting()
        if not await all_idle(self._app.traffics, drain_s):
            for traffic in self._app.traffics:
                traffic.end_all()
            await all_idle(self._app.traffics, TELL * end_s)
        self._server.must_end.set()
        if not await self._has_ended(FLUSH * end_s):
            self._server.abort_connections()
            if not await self._has_ended(ABORT * end_s):
                self._serving.cancel()
        await asyncio.wait([self._serving], timeout=0.1)

    async def _has_ended(self, timeout_s: float) -> bool:
        done, _ = await asyncio.wait([self._serving], timeout=timeout_s)
        return bool(done)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with our counted connections."""

    servers: list[Acceptor]  # type: ignore[assignment]

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self.must_end = asyncio.Event()
        self._connections = connections

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.watch()
        try:
            await super().serve(sockets)
        finally:
            self._connections.unwatch()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.servers = [Acceptor(listener, self._connections, self._connection) for listener in sockets or ()]
        self.is_up.set()

    async def main_loop(self) -> None:
        # uvicorn's looks ten times a second whether it must end: a tenth of the CPU time of a single stream.
        await self.must_end.wait()

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, connections=self._connections)

    def stop_accepting(self) -> None:
        for server in self.servers:
            server.close()

    def abort_connections(self) -> None:
        """Abort all connections: buffers of clients that read nothing would never empty."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`; a host name means its IPv4 address if it has one. Raises ConfigError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: an empty part in the host name
        message = f"the address to listen on is unknown: {host} port {port}"
        raise ConfigError(message, hint=BIND_HINTS[errno.EADDRNOTAVAIL]) from error
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen here, not in the server: with SO_REUSEADDR two sockets may be bound as long as neither listens.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno or 0).lower()
        message = f"cannot listen on port {port} of {host}: {reason}"
        hint = BIND_HINTS.get(error.errno or 0, "choose another port with --port (APPLIANCE_PORT)")
        raise ConfigError(message, hint=hint) from error
    listener.setblocking(False)
    return listener
