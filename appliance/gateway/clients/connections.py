"""Connections of clients: how many there may be, and for how long each may make the gateway wait.

Whoever reaches the port can open a connection, which needs no key. Each takes a descriptor, and the engine's
connections, the supervisor and all that opens a file need some too.
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
from typing import TYPE_CHECKING

from appliance.system import open_files
from appliance.values import dataclass

if TYPE_CHECKING:
    from appliance.gateway.clients.connection import Connection

# Longer than the pools of the usual clients and proxies keep a connection, so that they close first.
KEEP_ALIVE_S = 65.0
# As Apache's mod_reqtimeout, which counts bodies at 500 bytes a second (`RequestReadTimeout`, default of 2.4).
HEADER_S, BODY_S, BYTES_PER_S = 30.0, 30.0, 500
UNREAD_S = 60.0  # as nginx's send_timeout
# Beyond these a client costs memory only: 2,048 of them with the longest header hold 64 MiB.
CONNECTIONS_MOST = 2048
# Kept of the limit for all else: about 60 are needed (see `open_files`), more of a larger one.
RESERVED_LEAST, RESERVED_SHARE = 64, 8
SPARE = 16  # connections beyond those whose requests are taken: they are told so, and asked whether the gateway lives
GRACE_S = 0.05  # the first bytes of a request come with its connection or not at all
LOOKED_AT = 32  # for one to be closed; most have nothing unread
STUCK_S = 5.0  # a client that makes us wait for so long may lose its place to another
QUIET_S = 60.0  # a limit that is met again sooner belongs to the same episode, and is not said again

BUSY = "appliance.busy"
"""In the scope of a request that came while there were as many as may be: to be asked whether it is one too many."""
KNOWN = "appliance.known"
"""In the scope of each request: to be called where its key is right, or none is needed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`connections` are open at the same time; on them `requests` are with the engine or wait for it."""

    connections: int
    requests: int
    header_s: float = HEADER_S
    body_s: float = BODY_S
    unread_s: float = UNREAD_S
    keep_alive_s: float = KEEP_ALIVE_S
    stuck_s: float = STUCK_S


def limits_within(files: int | None) -> Limits:
    """For so many open files, None for any number. Each request takes two: the client's and one to the engine."""
    connections = CONNECTIONS_MOST
    if files is not None:
        left = files - max(RESERVED_LEAST, files // RESERVED_SHARE)
        connections = max(SPARE + 1, min(left // 2, CONNECTIONS_MOST))
    return Limits(connections=connections, requests=connections - SPARE)


def own_limits() -> Limits:
    """For the limit of this process."""
    return limits_within(open_files.limit())


class Wait(StrEnum):
    """What a connection makes the gateway wait for."""

    HEADER = "header"  # no whole header yet, or the rest of a request that was answered before its end
    IDLE = "idle"  # answered; another request may come
    BODY = "body"
    UNREAD = "unread"  # the client does not take what was written
    END = "end"  # closed, but for bytes that the client does not take


_SILENT = (Wait.HEADER, Wait.IDLE)
Place = tuple[Wait | None, bool]
"""What is waited for, and whether the client had a key before. None: it is worked for."""


class Refused(StrEnum):
    CONNECTIONS = "connections"  # closed as it came, with an answer of 503
    REQUESTS = "requests"  # its request was answered with 503


class Closed(StrEnum):
    ROOM = "made_room"  # the one that had been silent for longest, for a new one
    HEADER = "header_timeout"
    BODY = "body_timeout"
    UNREAD = "not_read"
    TOO_LARGE = "header_too_large"


_WORDS: dict[Refused | Closed, str] = {
    Refused.CONNECTIONS: "{connections} connections are open, the most that fit, and all have requests: new ones are "
    "refused with 503",
    Refused.REQUESTS: "{requests} requests run, the most that fit: others are refused with 503, health is answered",
    Closed.ROOM: "{connections} connections are open, the most that fit: those that have been silent for longest are "
    "closed for new ones",
    Closed.HEADER: "connections without a whole request after {header_s:g} s are closed",
    Closed.BODY: "connections whose request bodies come slower than 500 bytes a second are closed",
    Closed.UNREAD: "connections whose clients do not read their answers for {unread_s:g} s are closed",
    Closed.TOO_LARGE: "connections with a header above 32 KiB are closed",
}


class Counts:
    """What the metrics show of connections."""

    def __init__(self) -> None:
        self.open = 0
        self.refused = Counter({reason.value: 0 for reason in Refused})
        self.closed = Counter({reason.value: 0 for reason in Closed})


class Connections:
    """All that are open, each in the row of what it makes us wait for, the longest first. One event loop, no locks."""

    def __init__(self, limits: Limits, counts: Counts, running: Callable[[], int]) -> None:
        """`running` are the requests that are with the engine or wait for it."""
        self.limits = limits
        self._counts = counts
        self._running = running
        self._rows: dict[Place, dict[Connection, float]] = {
            (wait, is_known): {} for wait in (None, *Wait) for is_known in (False, True)
        }
        self._coming = 0  # accepted, and not connected yet
        self._said: dict[Refused | Closed, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        seconds = (limits.header_s, limits.body_s, limits.unread_s, limits.keep_alive_s)
        self._tick_s = min(1.0, *(each / 4 for each in seconds))

    @property
    def open(self) -> int:
        return sum(map(len, self._rows.values())) + self._coming

    @property
    def is_busy(self) -> bool:
        """Another request is one too many."""
        return self._running() >= self.limits.requests

    def coming(self, number: int) -> None:
        self._coming += number
        self._counts.open = self.open

    def put(self, connection: Connection, place: Place) -> None:
        """At the end of that row, also if it stands in it already."""
        self._rows[connection.place].pop(connection, None)
        connection.place = place
        self._rows[place][connection] = time.monotonic()
        self._counts.open = self.open

    def remove(self, connection: Connection) -> None:
        self._rows[connection.place].pop(connection, None)
        self._counts.open = self.open

    @property
    def must_wait(self) -> bool:
        """There are as many as may be, and those that are silent have hardly had the time to say something."""
        if self.open < self.limits.connections or self._victim() is not None:
            return False
        return bool(self._coming or any(self._rows[wait, known] for wait in _SILENT for known in (False, True)))

    def make_room(self) -> bool:
        """Closes who has kept us waiting for longest if there are as many as may be. False: nobody has."""
        if self.open < self.limits.connections:
            return True
        victim = self._victim()
        return victim is not None and self._close(victim)

    def is_too_many(self) -> bool:
        """For a request that came while there were as many as may be. False: one that was stuck has made room."""
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
        """Those that never had a key first. A client with a key that sends or reads is not among them."""
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
        """Once an episode: what a client does must not fill the log."""
        now = time.monotonic()
        is_new = now - self._said.get(reason, float("-inf")) > QUIET_S
        self._said[reason] = now
        if is_new:
            _log.warning("%s", _WORDS[reason].format_map({name: getattr(self.limits, name) for name in _SHOWN}))

    def watch(self) -> None:
        """Keeps the times, until `unwatch`."""
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
                # In the order of time, so that what is not due yet is not looked at.
                row, before = self._rows[wait, is_known], now - seconds
                for connection, _ in list(takewhile(lambda each: each[1] <= before, row.items())):  # noqa: B023
                    connection.expire()

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


_SHOWN = ("connections", "requests", "header_s", "unread_s")
