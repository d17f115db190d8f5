"""Ports for programs that are told one.

Below those that the kernel gives away by itself, and no two processes of tests take the same: a port that was free when
it was asked for is still free when the program has started.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import cache

FIRST, LAST, EACH = 12_000, 32_000, 100  # Linux gives away 32,768 and above


@cache
def _mine() -> tuple[socket.socket, Iterator[int]]:
    """Reserve a range of ports until this process ends. The reservation is an abstract socket: like ports, its name
    belongs to the network namespace."""
    mark = socket.socket(socket.AF_UNIX)
    for begin in range(FIRST, LAST, EACH):
        try:
            mark.bind(f"\0appliance-tests-{begin}")
        except OSError:
            continue  # another process of tests has these
        return mark, itertools.cycle(range(begin, begin + EACH))
    message = "no ports are left for tests: too many processes of tests run here"
    raise RuntimeError(message)


def free_port() -> int:
    _, ports = _mine()
    return next(port for port in itertools.islice(ports, EACH) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
