"""A connection to the engine's unix socket, on the loop's readers and writers.

A transport takes three turns of the loop until it sends the first byte. connect(2) on a unix socket never waits, so a
request is at the engine in the turn in which it came.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

READ_BYTES = 64 * 2**10  # less than what malloc maps and unmaps each time


class Taker(Protocol):
    """Takes what comes."""

    def data_received(self, data: bytes) -> None: ...

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection; None is an end in order."""


class Link:
    """One connection. Data and the end go to the taker, until `close`."""

    def __init__(self, path: Path, taker: Taker) -> None:
        """Connect. Raises OSError; EAGAIN means that the engine's queue of connections is full."""
        self._loop = asyncio.get_running_loop()
        self._taker = taker
        # The type below `socket.socket`, which would turn every constant into a member of an enumeration.
        self._socket = socket.SocketType(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(str(path))
            self.resume_reading()
        except BaseException:
            self._socket.close()
            raise

    def send(self, data: bytes | memoryview) -> int:
        """Return how many bytes the kernel took. If the connection has ended all count as sent: reading tells why."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except ConnectionError:
            return len(data)
        except OSError as error:  # as ENOBUFS: the connection lives on, and the engine would wait for the rest
            self._end(error)
            return len(data)

    def on_writable(self, tell: Callable[[], None]) -> None:
        """Call `tell` while the kernel takes more, until `off_writable`."""
        self._loop.add_writer(self._socket.fileno(), tell)

    def off_writable(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket.fileno())

    def resume_reading(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._read)

    def pause_reading(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        self.pause_reading()
        self.off_writable()
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._end(None)
            return
        try:
            self._taker.data_received(data)
        except Exception as error:
            self._end(error)  # what came is lost, and the answer would go on without it
            raise

    def _end(self, error: Exception | None) -> None:
        self.close()
        self._taker.connection_lost(error)
