"""A crowd without a key: opens connections that send nothing, half a header, a body a byte at a time, or never read.

    flood.py PORT NUMBER

Says `open` once all were tried, then sends a byte on some of them every 0.2 s until its standard input ends. Those that
are closed come back. Only the standard library is used.
"""

from __future__ import annotations

import itertools
import resource
import select
import socket
import sys
import time
from contextlib import suppress

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
KINDS = (
    b"",
    HEAD + b"X: ",
    HEAD + b"Content-Length: 100000\r\n\r\n{",
    b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n" * 16,
)
EVERY_S = 0.2


def opened(port: int, first: bytes) -> socket.socket | None:
    connection = socket.socket()
    connection.settimeout(5)
    try:
        connection.connect(("127.0.0.1", port))
        connection.sendall(first)
    except OSError:
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def is_over(connection: socket.socket, kind: int) -> bool:
    """Sends a byte on those that are slow; True if the other side has closed. What was answered stays unread."""
    try:
        if kind in (1, 2):
            connection.send(b"x")
        return kind == 0 and connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main(port: int, number: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kinds = itertools.cycle(range(len(KINDS)))
    crowd = [(opened(port, KINDS[kind]), kind) for kind in itertools.islice(kinds, number)]
    print("open", flush=True)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        began = time.monotonic()
        for index, (connection, kind) in enumerate(crowd):
            if time.monotonic() - began > EVERY_S:
                break
            if connection is None or is_over(connection, kind):
                if connection is not None:
                    connection.close()
                crowd[index] = opened(port, KINDS[kind]), kind
    for connection, _ in crowd:
        if connection is not None:
            with suppress(OSError):
                connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
