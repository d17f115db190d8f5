"""Counts what is used, and writes it every few seconds: a thread, since a disk may be slow."""

from __future__ import annotations

import asyncio
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
from appliance.system.lack import is_lack, tell

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
        self._write_every_s = write_every_s
        self._again_s = again_s
        self._new: deque[FinishedRequest] = deque()  # the only thing that a request touches
        self._waiting: dict[_Group, Used] = {}
        self._lock = threading.Lock()  # of `_waiting` and the file together, so that a reader sees each request once
        self._has_some = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem = ""  # why the volume refuses; empty if it does not

    def note(self, row: FinishedRequest) -> None:
        """Count a request that ended."""
        self._new.append(row)
        if not self._has_some.is_set():
            self._has_some.set()
        if self._thread is None:
            self._start()

    def read(self, days: int) -> tuple[tuple[Used, ...], str]:
        """Return the rows of the last `days` days, and what is wrong with the file, empty if nothing is.

        May wait for the disk.
        """
        with self._lock:
            problem = self.problem
            kept: tuple[Used, ...] = ()
            try:
                kept = self._store.read(days)
            except VolumeError as error:
                problem = error.message
            self._collect()
            return (*kept, *(used for used in self._waiting.values() if used.day >= first_day(days))), problem

    def close(self) -> None:
        """Write the rest. Waits for END_S at most."""
        self._is_over.set()
        self._has_some.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def _start(self) -> None:
        # A daemon: a disk that stands still must not keep the process alive.
        thread = threading.Thread(target=self._run, name="usage", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not is_lack(error):
                raise
            tell("writing what was used", error)  # the next request tries again
            return
        self._thread = thread

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._has_some.wait()
            self._is_over.wait(self._again_s if self.problem else self._write_every_s)
            with self._lock:
                self._has_some.clear()
                self._collect()
                if self._waiting:
                    self._write()

    def _collect(self) -> None:
        while self._new:
            used = used_by(self._new.popleft())
            group = used.day, used.key, used.model
            self._waiting[group] = self._waiting[group] + used if group in self._waiting else used

    def _write(self) -> None:
        try:
            self._store.add(self._waiting.values(), busy_s=END_S / 2 if self._is_over.is_set() else 2 * END_S)
        except (VolumeError, MemoryError, ImportError) as error:
            self._has_some.set()
            problem = error.message if isinstance(error, VolumeError) else str(error)
            if not self.problem:
                _log.warning("the use of the keys stays in memory until the volume takes it: %s", problem)
            self.problem = problem
            return
        self._waiting = {}
        if self.problem:
            _log.warning("the use of the keys is written again")
        self.problem = ""


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
        rows, problem = await asyncio.to_thread(self._usage.read, days)
        await ResponseWriter(send, "openai").document(usage_document(rows, days=days, by=by, problem=problem))


def _days_in(text: str) -> int:
    days = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= days <= KEPT_DAYS:
        raise ApiError(400, "invalid_request", f"days is not from 1 to {KEPT_DAYS}: {text[:40]!r}")
    return days
