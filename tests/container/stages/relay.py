"""A relay on the loopback that holds what a server sends, so that a test can stop a download in its middle."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK = 2**16


class Relay:
    """Forwards connections to `target`; after `hold_after` bytes of answers nothing more comes until `release`."""

    def __init__(self, target: str, hold_after: int) -> None:
        self._host, _, port = target.partition(":")
        self._port = int(port)
        self._hold_after = hold_after
        self._released = threading.Event()
        self.is_held = threading.Event()
        self.sent = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"

    def release(self) -> None:
        self._released.set()

    def serve(self) -> None:
        with suppress(OSError):  # closed at the end
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection((self._host, self._port))
                for source, sink, counts in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._copy, args=(source, sink, counts), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError), sink:  # the other end is gone
            while data := source.recv(_CHUNK):
                if counts and self.sent >= self._hold_after and not self._released.is_set():
                    self.is_held.set()
                    self._released.wait()
                sink.sendall(data)
                self.sent += len(data) if counts else 0

    def close(self) -> None:
        self.release()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@contextmanager
def relay(target: str, hold_after: int) -> Iterator[Relay]:
    found = Relay(target, hold_after)
    thread = threading.Thread(target=found.serve, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.close()
        thread.join(timeout=30)
