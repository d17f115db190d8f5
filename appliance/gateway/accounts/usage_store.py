"""The use of each key and model over days, in SQLite on the volume. Containers that share the volume add to one file.

The journal is a rollback journal, not WAL: WAL needs memory that all writers share, which containers on several hosts
and disks of the network do not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import VolumeError, printable
from appliance.values import dataclass

if TYPE_CHECKING:
    import sqlite3

KEPT_DAYS = 400
USUAL_DAYS = 30  # that are shown
BUSY_S = 5.0  # another container writes for milliseconds; a disk of the network may take longer
ROWS_MAX = 100_000
GROUPS = ("day", "key", "model")
SUMS = ("requests", "errors", "uncounted", "tokens_in", "tokens_cached", "tokens_out", "seconds")
VERSION = 1  # of the table
_MADE = f"""
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    {", ".join(f"{name} {'REAL' if name == 'seconds' else 'INTEGER'} NOT NULL" for name in SUMS)},
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID"""
_ADDED = f"""
INSERT INTO usage (day, key, model, {", ".join(SUMS)}) VALUES ({", ".join("?" * (3 + len(SUMS)))})
ON CONFLICT (day, key, model) DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)}"""  # noqa: S608


@dataclass(frozen=True, kw_only=True)
class Used:
    """What was used with one key of one model on one day in UTC; an empty `key` is the appliance's own.

    `tokens_in` includes `tokens_cached`. `uncounted` requests are those whose engine told no tokens, as for a client
    that left.
    """

    day: str
    key: str
    model: str
    requests: int = 0
    errors: int = 0
    uncounted: int = 0
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    seconds: float = 0.0

    def __add__(self, other: Used) -> Used:
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        return Used(day=self.day, key=self.key, model=self.model, **sums)


class UsageStore:
    """One file. Every call opens it anew, and each may raise VolumeError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, rows: Iterable[Used], *, busy_s: float = BUSY_S) -> None:
        """Add the rows to those that are there, all or none, and forget what is older than KEPT_DAYS."""
        oldest = first_day(KEPT_DAYS)
        with self._opened(busy_s) as connection:
            connection.execute("BEGIN IMMEDIATE")
            self._prepare(connection)
            connection.executemany(_ADDED, [_values(row) for row in rows])
            connection.execute("DELETE FROM usage WHERE day < ?", (oldest,))
            connection.execute("COMMIT")

    def read(self, days: int) -> tuple[Used, ...]:
        """Return the rows of the last `days` days, today included, the latest first; none if there is no file."""
        if not self._path.exists():
            return ()
        sums = ", ".join(f"SUM({name})" for name in SUMS)
        texts = ", ".join(f"CAST({name} AS TEXT)" for name in GROUPS)
        query = f"SELECT {texts}, {sums} FROM usage WHERE day >= ? GROUP BY day, key, model"  # noqa: S608
        with self._opened(BUSY_S) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'usage'").fetchone():
                return ()
            found = connection.execute(f"{query} ORDER BY day DESC LIMIT {ROWS_MAX}", (first_day(days),))
            return tuple(_used(row) for row in found)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            message = f"file of the use is of a newer appliance: {self._path}: version {version}, ours is {VERSION}"
            raise VolumeError(message, hint=f"use the newer image, or move the file away: mv {self._path} …")
        connection.execute(_MADE)
        connection.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _opened(self, busy_s: float) -> Iterator[sqlite3.Connection]:
        import sqlite3  # here: no start and no first token may wait for it

        try:
            # Made here and not by SQLite, whose file another user of group 0 could not write.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o660))
        except OSError as error:
            if not self._path.exists():
                raise self._refusal(error.strerror or str(error)) from error
        try:
            with closing(sqlite3.connect(self._path, timeout=busy_s, isolation_level=None)) as connection:
                connection.execute("PRAGMA trusted_schema = OFF")
                yield connection
        except (sqlite3.Error, OSError, OverflowError, ValueError, TypeError) as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, words: str) -> VolumeError:
        message = f"file of the use cannot be used: {self._path}: {printable(words).lower()}"
        hint = f"check the volume; if the file is damaged, move it away: mv {self._path} {self._path}.damaged"
        return VolumeError(message, hint=hint)


def first_day(days: int) -> str:
    """Return the first of the last `days` days in UTC; the last one is today."""
    return (datetime.now(UTC).date() - timedelta(days=days - 1)).isoformat()


def _values(row: Used) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in (*GROUPS, *SUMS))


def _used(row: tuple[Any, ...]) -> Used:
    day, key, model, *sums = row
    numbers = {name: float(value) if name == "seconds" else int(value) for name, value in zip(SUMS, sums, strict=True)}
    return Used(day=day, key=key, model=model, **numbers)  # type: ignore[arg-type]


def summed(rows: Iterable[Used], by: str | None) -> tuple[Used, ...]:
    """Return the rows summed by `by`, one of GROUPS; the other groups are empty then. None sums equal rows only.

    Days come latest first, other rows by requests.
    """
    found: dict[tuple[str, ...], Used] = {}
    for row in rows:
        key = tuple(getattr(row, name) if by in (None, name) else "" for name in GROUPS)
        day, of_key, model = key
        one = replace(row, day=day, key=of_key, model=model)
        found[key] = found[key] + one if key in found else one
    if by in (None, "day"):
        return tuple(sorted(found.values(), key=lambda row: (row.day, row.requests), reverse=True))
    return tuple(sorted(found.values(), key=lambda row: row.requests, reverse=True))


def usage_document(rows: Iterable[Used], *, days: int, by: str | None, problem: str = "") -> dict[str, Any]:
    """Return the document of the use. A row has only the groups that it is of."""
    known = summed(rows, by)
    groups = GROUPS if by is None else (by,)
    total = sum(known, Used(day="", key="", model=""))
    return {
        "days": days,
        "since": first_day(days),
        "by": by,
        "rows": [_row(row, groups) for row in known],
        "total": _row(total, ()),
        "problem": problem or None,
    }


def _row(row: Used, groups: Iterable[str]) -> Mapping[str, Any]:
    shown = {name: getattr(row, name) for name in (*groups, *SUMS)}
    return {**shown, "seconds": round(row.seconds, 3)}
