"""Counts what is used, and writes it every few seconds: a thread, since a disk may be slow."""

from __future__ import annotations

import logging
import threading
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from appliance.errors import VolumeError
from appliance.gateway.accounts.usage_store import (
    GROUPS,
    KEPT_DAYS,
    USUAL_DAYS,
    UsageStore,
    Used,
    first_day,
    usage_document,
)
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.routes.forward import ResponseWriter
from appliance.gateway.wire.api_error import ApiError
from appliance.system.background_writer import BackgroundWriter
from appliance.system.detached import detached

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

WRITE_EVERY_S = 3.0  # what a kill may lose
AGAIN_S = 60.0  # until the next try if the volume refuses
END_S = 1.0  # most time that a stop waits for the last write
NAME_MAX = 200

_log = logging.getLogger(__name__)
_Group = tuple[str, str, str]


class Usage:
    """The use since the last write, and the thread that writes it. A volume that refuses ends nothing: counts wait."""

    def __init__(self, store: UsageStore, *, write_every_s: float = WRITE_EVERY_S, again_s: float = AGAIN_S) -> None:
        self._store = store
        self._new: deque[FinishedRequest] = deque()  # the only thing that a request touches
        self._waiting: dict[_Group, Used] = {}
        self._lock = threading.Lock()  # of `_waiting` and the file together, so that a reader sees each request once
        self._writer = BackgroundWriter("usage", self._write, every_s=write_every_s, again_s=again_s)

    @property
    def problem(self) -> str:
        """Why the volume refuses; empty if it does not."""
        return self._writer.problem

    def note(self, row: FinishedRequest) -> None:
        """Count a request that ended."""
        self._new.append(row)
        self._writer.wake()

    def read(self, days: int) -> tuple[tuple[Used, ...], str]:
        """Return the rows of the last `days` days, and what is wrong with the file, empty if nothing is.

        May wait for the disk; has no rows while a write hangs.
        """
        if not self._lock.acquire(timeout=5 * END_S):
            return (), self.problem or "it is being written"
        try:
            problem = self.problem
            kept: tuple[Used, ...] = ()
            try:
                kept = self._store.read(days)
            except VolumeError as error:
                problem = error.message
            self._collect()
            return (*kept, *(used for used in self._waiting.values() if used.day >= first_day(days))), problem
        finally:
            self._lock.release()

    def close(self) -> None:
        """Write the rest. Waits for END_S at most."""
        self._writer.close(END_S)

    def _collect(self) -> None:
        while self._new:
            used = used_by(self._new.popleft())
            group = used.day, used.key, used.model
            self._waiting[group] = self._waiting[group] + used if group in self._waiting else used

    def _write(self, before: str) -> str:
        with self._lock:
            self._collect()
            return self._stored(before) if self._waiting else before

    def _stored(self, before: str) -> str:
        """Add what waits to the file. Returns why the volume refuses, as `before` was; empty if it does not."""
        try:
            self._store.add(self._waiting.values(), busy_s=END_S / 2 if self._writer.is_over else 2 * END_S)
        except (VolumeError, MemoryError, ImportError) as error:
            self._writer.wake()
            problem = error.message if isinstance(error, VolumeError) else str(error)
            if not before:
                _log.warning("the use of the keys stays in memory until the volume takes it: %s", problem)
            return problem
        self._waiting = {}
        if before:
            _log.warning("the use of the keys is written again")
        return ""


def used_by(row: FinishedRequest) -> Used:
    """Return the use of one request."""
    is_told = row.tokens_in is not None or row.tokens_out is not None
    return Used(
        day=datetime.fromtimestamp(row.time, UTC).date().isoformat(),
        key=row.key,
        model=row.model[:NAME_MAX],
        requests=1,
        errors=int(row.ending in ("error", "stopped")),
        uncounted=int(not is_told),
        tokens_in=row.tokens_in or 0,
        tokens_cached=row.tokens_cached or 0,
        tokens_out=row.tokens_out or 0,
        seconds=row.seconds,
    )


class UsageEndpoint:
    """GET of the use: `?days=30&by=key`. Without `by` each row is of one day, key and model."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        days = _days_in(asked["days"][-1]) if "days" in asked else USUAL_DAYS
        by = asked["by"][-1] if "by" in asked else None
        if by is not None and by not in GROUPS:
            raise ApiError(400, "invalid_request", f"by is none of {', '.join(GROUPS)}: {by[:40]!r}")
        rows, problem = await detached(self._usage.read, days)
        await ResponseWriter(send, "openai").document(usage_document(rows, days=days, by=by, problem=problem))


def _days_in(text: str) -> int:
    days = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= days <= KEPT_DAYS:
        raise ApiError(400, "invalid_request", f"days is not from 1 to {KEPT_DAYS}: {text[:40]!r}")
    return days
