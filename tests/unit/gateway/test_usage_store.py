"""The use of keys on the volume: sums, days, several writers, and files that are none."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import VolumeError
from appliance.gateway.accounts.usage import Usage, used_by
from appliance.gateway.accounts.usage_store import KEPT_DAYS, UsageStore, Used, summed, usage_document
from appliance.gateway.clients.request_log import FinishedRequest

ROOT = Path(__file__).parents[3]


def day(ago: int = 0) -> str:
    return (datetime.now(UTC).date() - timedelta(days=ago)).isoformat()


def used(ago: int = 0, key: str = "ci", model: str = "m", **more: Any) -> Used:
    known = {"requests": 1, "tokens_in": 10, "tokens_cached": 4, "tokens_out": 20, "seconds": 0.5}
    return Used(day=day(ago), key=key, model=model, **{**known, **more})


def finished(**more: Any) -> FinishedRequest:
    known: dict[str, Any] = {
        "id": "1", "time": time.time(), "model": "m", "route": "/v1/chat/completions", "key": "ci", "stream": True,
        "tokens_in": 10, "tokens_cached": 4, "tokens_out": 20, "waited_s": 0.0, "ttft_s": 0.1, "seconds": 0.5,
        "tokens_per_s": 10.0, "ending": "stop", "status": 200,
    }  # fmt: skip
    return FinishedRequest(**{**known, **more})


def eventually(ask: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ask():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path: Path) -> UsageStore:
    return UsageStore(tmp_path / "usage.sqlite3")


def test_what_is_added_is_summed(store: UsageStore) -> None:
    assert store.read(30) == ()
    store.add([used(), used(key="", errors=1)])
    store.add([used(), used(ago=1)])
    assert store.read(1) == (used(key="", errors=1), used() + used())
    assert len(store.read(2)) == 3


def test_old_days_are_forgotten(store: UsageStore) -> None:
    store.add([used(ago=KEPT_DAYS), used(ago=KEPT_DAYS - 1), used()])
    assert [row.day for row in store.read(10 * KEPT_DAYS)] == [day(), day(KEPT_DAYS - 1)]


def test_another_user_of_the_group_may_write_it_and_others_read_nothing(store: UsageStore, tmp_path: Path) -> None:
    store.add([used()])
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) & 0o607 == 0o600
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("delete",)


ADDS = """
import sys
from pathlib import Path
from appliance.gateway.accounts.usage_store import Used, UsageStore
for _ in range(20):
    UsageStore(Path(sys.argv[1])).add([Used(day=sys.argv[2], key="ci", model="m", requests=1, seconds=0.25)], busy_s=60)
"""


def test_several_processes_lose_nothing(store: UsageStore, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ADDS, str(tmp_path / "usage.sqlite3"), day()]
    writers = [subprocess.Popen(argv, cwd=ROOT) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    (row,) = store.read(1)
    assert (row.requests, row.seconds) == (60, 15.0)


def test_one_that_is_locked_is_refused_in_time(store: UsageStore, tmp_path: Path) -> None:
    store.add([used()])
    other = sqlite3.connect(tmp_path / "usage.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(VolumeError, match="database is locked"):
        store.add([used()], busy_s=0.05)
    other.execute("ROLLBACK")
    other.close()
    store.add([used()], busy_s=0.05)
    assert store.read(1) == (used() + used(),)


def with_table(path: Path, *commands: str) -> None:
    connection = sqlite3.connect(path)
    for command in commands:
        connection.execute(command)
    connection.commit()
    connection.close()


COLUMNS = "day, key, model, requests, errors, uncounted, tokens_in, tokens_cached, tokens_out, seconds"
HOSTILE: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_bytes(b"this is no database" * 100),
    "cut": lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 200),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "link to nowhere": lambda path: path.symlink_to("/nowhere/usage"),
    "device": lambda path: path.symlink_to("/dev/full"),
    "newer": lambda path: with_table(path, "PRAGMA user_version = 7", "CREATE TABLE usage (a)"),
    "view": lambda path: with_table(path, "CREATE VIEW usage AS SELECT 1 AS day"),
    "other table": lambda path: with_table(path, "CREATE TABLE usage (a)"),
    "too large": lambda path: with_table(
        path,
        f"CREATE TABLE usage ({COLUMNS}, PRIMARY KEY (day, key, model))",
        f"INSERT INTO usage VALUES ('{day()}', 'ci', 'm', {2**63 - 1}, 0, 0, 0, 0, 0, 'x')",
        f"INSERT INTO usage VALUES ('{day()}', 'ci', x'6d', {2**63 - 1}, 0, 0, 0, 0, 0, 9e999)",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_none_ends_nothing(store: UsageStore, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "usage.sqlite3"
    HOSTILE[kind](path)
    usage = Usage(store, write_every_s=0.01, again_s=0.01)
    usage.note(finished())
    if kind != "too large":
        eventually(lambda: bool(usage.problem))
        assert str(path) in usage.problem
    rows, problem = usage.read(30)
    document = usage_document(rows, days=30, by="key", problem=problem)
    assert json.loads(json.dumps(document))["total"]["requests"] >= 1
    assert "\n" not in usage.problem
    usage.close()


def test_counts_wait_for_a_volume_that_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "away"
    usage = Usage(UsageStore(folder / "usage.sqlite3"), write_every_s=0.01, again_s=0.01)
    for _ in range(5):
        usage.note(finished())
    eventually(lambda: bool(usage.problem))
    assert sum(row.requests for row in usage.read(1)[0]) == 5
    folder.mkdir()
    eventually(lambda: not usage.problem)
    usage.note(finished(ending="error", status=502))
    usage.close()
    (row,) = UsageStore(folder / "usage.sqlite3").read(1)
    assert (row.requests, row.errors, row.tokens_in, row.tokens_cached, row.tokens_out) == (6, 1, 60, 24, 120)
    told = [record.getMessage() for record in caplog.records]
    assert len([words for words in told if "stays in memory until the volume takes it" in words]) == 1
    assert "the use of the keys is written again" in told


def test_what_is_written_meanwhile_is_seen_once(store: UsageStore) -> None:
    usage = Usage(store, write_every_s=0.0)
    seen: list[int] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(sum(row.requests for row in usage.read(1)[0]))

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(300):
        usage.note(finished())
        time.sleep(0.001)
    is_over.set()
    looking.join()
    usage.close()
    assert seen == sorted(seen)
    assert max(seen) <= 300
    assert sum(row.requests for row in store.read(1)) == 300


def test_the_end_writes_the_rest_at_once(store: UsageStore) -> None:
    usage = Usage(store, write_every_s=600)
    usage.note(finished())
    began = time.monotonic()
    usage.close()
    assert time.monotonic() - began < 1.5
    assert store.read(1)[0].requests == 1
    Usage(store).close()  # without a request there is nothing to write


def test_a_request_without_counts_is_told_apart() -> None:
    left = used_by(finished(tokens_in=None, tokens_cached=None, tokens_out=None, ending="client_left", status=499))
    assert (left.uncounted, left.errors, left.tokens_out) == (1, 0, 0)
    assert used_by(finished(ending="stopped")).errors == 1
    assert len(used_by(finished(model="m" * 5000)).model) == 200


def test_sums_by_each_group() -> None:
    rows = (used(), used(key="b", model="n"), used(ago=1), used(key="b"))
    assert [(row.key, row.requests) for row in summed(rows, "key")] == [("ci", 2), ("b", 2)]
    assert [(row.model, row.requests) for row in summed(rows, "model")] == [("m", 3), ("n", 1)]
    assert [(row.day, row.requests) for row in summed(rows, "day")] == [(day(), 3), (day(1), 1)]
    assert len(summed(rows, None)) == 4
    document = usage_document(rows, days=2, by="day")
    assert (document["since"], document["total"]["tokens_out"], document["problem"]) == (day(1), 80, None)
    assert set(document["rows"][0]) == {"day", *document["total"]}
