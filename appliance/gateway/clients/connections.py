"""Connections of clients: how many may be open, and how long each may keep the gateway waiting.

Everyone who reaches the port can open a connection, without a key. Each takes a descriptor, and descriptors are also
needed for the engine's connections, for the supervisor and for every file that is opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from heapq import merge
from itertools import islice, takewhile
from operator import itemgetter
from typing import Protocol

from appliance.system import open_files
from appliance.values import dataclass

# Longer than common clients and proxies keep idle connections, so that they close first.
KEEP_ALIVE_S = 65.0
# Same as Apache's mod_reqtimeout, which expects bodies at 500 bytes a second (`RequestReadTimeout`, default of 2.4).
HEADER_S, BODY_S, BYTES_PER_S = 30.0, 30.0, 500
UNREAD_S = 60.0  # same as nginx's send_timeout
# More connections would cost only memory: 2,048 of them with the longest header hold 64 MiB.
CONNECTIONS_MOST = 2048
# Descriptors kept for other uses: about 60 are needed (see `open_files`), more under a larger limit.
RESERVED_LEAST, RESERVED_SHARE = 64, 8
SPARE = 16  # connections beyond the accepted requests: they get a refusal, or an answer to a health check
GRACE_S = 0.05  # a client sends the first bytes of its request with the connection, or much later
LOOKED_AT = 32  # connections examined to find one to close; most have nothing unread
STUCK_S = 5.0  # a client that keeps the gateway waiting for so long may lose its place to another
QUIET_S = 60.0  # a limit reached again within this time is the same episode and is not logged again

BUSY = "appliance.busy"
"""Key in the scope of a request that came at the limit. Its function returns True if the request is one too many."""
KNOWN = "appliance.known"
"""Key in the scope of each request: a function to call once its key was accepted, or if it needs none."""
LEFT = "appliance.left"
"""Key in the scope of each request: a future that is done when the client has left before the end of its answer."""
WRITE_NOW = "appliance.write_now"
"""Key in the scope of each request: a function that writes whole chunks of the begun answer, framed, at once, or
returns False."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the gateway: `connections` open at the same time, and on them `requests` that run or wait for the
    engine."""

    connections: int
    requests: int
    header_s: float = HEADER_S
    body_s: float = BODY_S
    unread_s: float = UNREAD_S
    keep_alive_s: float = KEEP_ALIVE_S
    stuck_s: float = STUCK_S


def limits_within(files: int | None) -> Limits:
    """Return the limits for a process that may open so many files; None: any number. Each request takes two: the
    client's connection and one to the engine."""
    connections = CONNECTIONS_MOST
    if files is not None:
        left = files - max(RESERVED_LEAST, files // RESERVED_SHARE)
        connections = max(SPARE + 1, min(left // 2, CONNECTIONS_MOST))
    return Limits(connections=connections, requests=connections - SPARE)


def own_limits() -> Limits:
    """Return the limits for this process's own limit of open files."""
    return limits_within(open_files.limit())


class Wait(StrEnum):
    """What a connection makes the gateway wait for."""

    HEADER = "header"  # the end of a header, or the rest of a request that was answered before its end
    IDLE = "idle"  # the next request, after an answer
    BODY = "body"
    UNREAD = "unread"  # the client to read what was written
    END = "end"  # the client to read the last bytes before the connection closes


_SILENT = (Wait.HEADER, Wait.IDLE)
Place = tuple[Wait | None, bool]
"""What the gateway waits for, and whether the client sent a valid key before. None: the gateway works on a request."""


class Refused(StrEnum):
    CONNECTIONS = "connections"  # a new connection, closed with an answer of 503
    REQUESTS = "requests"  # a request, answered with 503


class Closed(StrEnum):
    ROOM = "made_room"  # the longest silent connection, closed for a new one
    HEADER = "header_timeout"
    BODY = "body_timeout"
    UNREAD = "not_read"
    TOO_LARGE = "header_too_large"


_WORDS: dict[Refused | Closed, str] = {
    Refused.CONNECTIONS: "{connections} connections are open, the most that fit, and all have requests: new ones are "
    "refused with 503",
    Refused.REQUESTS: "{requests} requests run, the most that fit: others get 503, health checks an answer",
    Closed.ROOM: "{connections} connections are open, the most that fit: those that have been silent for longest are "
    "closed for new ones",
    Closed.HEADER: "connections without a whole request after {header_s:g} s are closed",
    Closed.BODY: "connections whose request bodies come slower than 500 bytes a second are closed",
    Closed.UNREAD: "connections whose clients do not read their answers for {unread_s:g} s are closed",
    Closed.TOO_LARGE: "connections with a header above 32 KiB are closed",
}


class Connection(Protocol):
    """A client's connection, as far as it is counted, waited for and closed here."""

    place: Place

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def has_unread(self) -> bool: ...

    def begin_end(self) -> None: ...

    def expire(self) -> None: ...


class Counts:
    """Counts of connections for the metrics."""

    def __init__(self) -> None:
        self.open = 0
        self.refused = Counter({reason.value: 0 for reason in Refused})
        self.closed = Counter({reason.value: 0 for reason in Closed})


class Connections:
    """All open connections, grouped in rows by what they make the gateway wait for, longest wait first. One event loop,
    no locks."""

    def __init__(self, limits: Limits, counts: Counts, running: Callable[[], int]) -> None:
        """`running` returns the number of requests that run or wait for the engine."""
        self.limits = limits
        self._counts = counts
        self._running = running
        self._rows: dict[Place, dict[Connection, float]] = {
            (wait, is_known): {} for wait in (None, *Wait) for is_known in (False, True)
        }
        self._coming = 0  # accepted, but not yet given to a protocol
        self._in_rows = 0
        self._said: dict[Refused | Closed, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        seconds = (limits.header_s, limits.body_s, limits.unread_s, limits.keep_alive_s)
        self._tick_s = min(1.0, *(each / 4 for each in seconds))

    @property
    def open(self) -> int:
        return self._in_rows + self._coming

    @property
    def is_busy(self) -> bool:
        """True if another request would exceed the limit."""
        return self._running() >= self.limits.requests

    def coming(self, number: int) -> None:
        self._coming += number
        self._counts.open = self.open

    def put(self, connection: Connection, place: Place) -> None:
        """Put the connection at the end of that row, even if it is in the row already."""
        self._take_out(connection)
        connection.place = place
        self._rows[place][connection] = time.monotonic()
        self._in_rows += 1
        self._counts.open = self.open

    def has(self, connection: Connection) -> bool:
        return connection in self._rows[connection.place]

    def remove(self, connection: Connection) -> None:
        self._take_out(connection)
        self._counts.open = self.open

    def _take_out(self, connection: Connection) -> None:
        if self._rows[connection.place].pop(connection, None) is not None:
            self._in_rows -= 1

    @property
    def must_wait(self) -> bool:
        """True if the limit is reached and the silent connections have hardly had time to send something."""
        if self.open < self.limits.connections or self._victim() is not None:
            return False
        return bool(self._coming or any(self._rows[wait, known] for wait in _SILENT for known in (False, True)))

    def make_room(self) -> bool:
        """Make room for a new connection; close the one that kept the gateway waiting for longest if the limit is
        reached. False if there is none to close."""
        if self.open < self.limits.connections:
            return True
        victim = self._victim()
        return victim is not None and self._close(victim)

    def is_too_many(self) -> bool:
        """True if a request that came while the limit was reached must be refused. False if a stuck connection was
        closed for it."""
        victim = self._stuck(is_known=True, longer_than_s=self.limits.stuck_s)
        if victim is not None:
            return not self._close(victim)
        self.refused(Refused.REQUESTS)
        return True

    def _close(self, victim: Connection) -> bool:
        self.remove(victim)
        victim.transport.abort()
        self.closed(Closed.ROOM)
        return True

    def _victim(self) -> Connection | None:
        """Return the connection to close; clients that never sent a valid key come first. A client with a key that
        sends or reads is never chosen."""
        for is_known, stuck_s in ((False, GRACE_S), (True, self.limits.stuck_s)):
            victim = self._silent(is_known=is_known) or self._stuck(is_known=is_known, longer_than_s=stuck_s)
            if victim is not None:
                return victim
        return None

    def _silent(self, *, is_known: bool) -> Connection | None:
        before = time.monotonic() - GRACE_S
        rows = (islice(self._rows[wait, is_known].items(), LOOKED_AT) for wait in _SILENT)
        old = takewhile(lambda each: each[1] < before, merge(*rows, key=itemgetter(1)))
        return next((connection for connection, _ in old if not connection.has_unread), None)

    def _stuck(self, *, is_known: bool, longer_than_s: float) -> Connection | None:
        before = time.monotonic() - longer_than_s
        fronts = (next(iter(self._rows[wait, is_known].items()), None) for wait in (Wait.END, Wait.UNREAD, Wait.BODY))
        return next((front[0] for front in fronts if front and front[1] < before), None)

    def closed(self, reason: Closed) -> None:
        self._counts.closed[reason] += 1
        self._say(reason)

    def refused(self, reason: Refused) -> None:
        self._counts.refused[reason] += 1
        self._say(reason)

    def _say(self, reason: Refused | Closed) -> None:
        """Log the reason once an episode: clients must not be able to fill the log."""
        now = time.monotonic()
        is_new = now - self._said.get(reason, float("-inf")) > QUIET_S
        self._said[reason] = now
        if is_new:
            _log.warning("%s", _WORDS[reason].format_map({name: getattr(self.limits, name) for name in _SHOWN}))

    def watch(self) -> None:
        """Enforce the time limits until `unwatch`."""
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self.watch)
        now = time.monotonic()
        for (wait, _), row in tuple(self._rows.items()):
            for connection in [each for each in row if wait is not Wait.END and each.transport.is_closing()]:
                connection.begin_end()
        limits = self.limits
        limit_s = {Wait.HEADER: limits.header_s, Wait.IDLE: limits.keep_alive_s, Wait.BODY: limits.body_s,
                   Wait.UNREAD: limits.unread_s, Wait.END: limits.unread_s}  # fmt: skip
        for wait, seconds in limit_s.items():
            for is_known in (False, True):
                # rows are ordered by time, so that later entries need not be examined
                row, before = self._rows[wait, is_known], now - seconds
                for connection, _ in list(takewhile(lambda each: each[1] <= before, row.items())):  # noqa: B023
                    connection.expire()

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_SHOWN = ("connections", "requests", "header_s", "unread_s")
