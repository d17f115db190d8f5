"""The named keys as the gateway sees them: found by the key of a request, and read again when the file changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from appliance.errors import FatalError, VolumeError, printable
from appliance.gateway.accounts.limits import Meter
from appliance.gateway.accounts.named_keys import NamedKey, digest_of, read_keys
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.system.detached import HANGS_S, detached
from appliance.system.lack import is_lack

LOOK_EVERY_S = 1.0
WAIT_S = 1.0  # most time that requests wait for a look; for the first one longer
PRESENTED_MAX = 4  # keys of one request that are looked up; a client sends one, or the same one twice

_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int] | None  # of a file that was read; None: there was none, or it could not be read


class Accounts:
    """The named keys of one file, with what each has used. A damaged file means that no named key is accepted."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._keys: tuple[tuple[bytes, NamedKey], ...] = ()
        self._meters: dict[str, Meter] = {}
        self._stamp: _Stamp = None
        self._look_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._is_known = False  # True once the file was looked at
        self._waits_until = 0.0  # the most that requests wait for that look
        self._speed = 0.0
        self.problem = ""  # what is wrong with the file; empty if nothing is

    @property
    def is_known(self) -> bool:
        """True once the file was looked at; before that no key is known to be wrong."""
        return self._is_known

    async def find(self, presented: Iterable[bytes]) -> NamedKey | None:
        """Return the key that one of the presented ones is, ended ones included; None if there is none.

        All are compared to their end, so that the time tells nothing. The file is looked at once a second at most, in a
        thread, since a disk of the network may stand still: then the keys of the last look count.
        """
        if self._looking is None and self._clock() >= self._look_at:
            self._looking = asyncio.create_task(detached(self._look), name="looking at the keys")
            self._waits_until = self._clock() + (WAIT_S if self._is_known else HANGS_S)
        if (looking := self._looking) is not None:
            # `wait` does not cancel it: other requests wait for the same look.
            await asyncio.wait((looking,), timeout=max(0.0, self._waits_until - self._clock()))
            if looking.done() and looking is self._looking:
                self._looking = None
                if looking.exception() is None:
                    self._look_at, self._is_known = self._clock() + LOOK_EVERY_S, True
            error = looking.exception() if looking.done() else None
            if error is not None and not (self._is_known and isinstance(error, RuntimeError)):  # no thread is left
                raise error
        digests = [digest_of(key) for key in islice(presented, PRESENTED_MAX)]
        found = None
        for known, key in self._keys:
            for digest in digests:
                if hmac.compare_digest(known, digest):
                    found = key
        return found

    def meter(self, key: NamedKey) -> Meter:
        return self._meters.setdefault(key.name, Meter(self._clock))

    def note(self, row: FinishedRequest) -> None:
        """Count a request that ended."""
        if row.tokens_per_s:
            self._speed = row.tokens_per_s
        if (meter := self._meters.get(row.key)) is not None:
            meter.note(row, self._speed)

    def _look(self) -> None:
        """Read the file if it has changed. Raises the error of a lack of files, memory or processes."""
        stamp = _stamp_of(self._path)
        if stamp is not None and stamp == self._stamp:
            return
        keys: tuple[NamedKey, ...] = ()
        problem = ""
        try:
            keys = read_keys(self._path)
        except FatalError as error:
            if is_lack(error):
                raise
            problem = error.message
            if isinstance(error, VolumeError):
                stamp = None  # a disk may recover while the file stays the same
        if problem and problem != self.problem:
            _log.error("no named key is accepted: %s", printable(problem))
        self._keys = tuple((bytes.fromhex(key.sha256), key) for key in keys)
        self._stamp, self.problem = stamp, problem


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino  # the time of a change of owner or mode, too


def has_ended(key: NamedKey) -> bool:
    return key.has_ended(datetime.now(UTC).date())
