"""The stream of events behind the pages: who makes it, how often, and what happens if a part of it cannot be made."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.console.progress import Phase, Progress
from appliance.gateway.clients.request_log import RequestLog
from appliance.gateway.engine.backend import Backend
from appliance.gateway.face.feed import Feed


def feed_of(
    documents: dict[str, Callable[[], dict[str, Any]]] | None = None, doctor: Callable[[], dict[str, Any]] | None = None
) -> Feed:
    backend = Backend(
        name="small",
        socket_path=Path("/nonexistent"),
        routes=(),
        progress=lambda: Progress(phase=Phase.READY),
        documents=documents or {},
    )
    return Feed(backend, requests=RequestLog(), recent=list, doctor=doctor)


async def until(feed: Feed, name: str, is_wanted: Callable[[Any], bool] = lambda _: True) -> Any:
    """Watch until a wanted event has come, then leave. Returns its document."""
    stream = feed.events()
    try:
        async with asyncio.timeout(60):
            async for piece in stream:
                if piece.startswith(f"event: {name}\n".encode()):
                    document = json.loads(piece.partition(b"\ndata: ")[2])
                    if is_wanted(document):
                        return document
    finally:
        await stream.aclose()
    message = "the stream ended"
    raise AssertionError(message)


async def test_who_comes_as_the_last_one_leaves_is_served() -> None:
    feed = feed_of()
    before = await until(feed, "now")
    later = await until(feed, "now", lambda now: now["uptime_s"] > before["uptime_s"])
    assert later["phase"] == "ready"


async def test_nothing_runs_after_the_last_one_left() -> None:
    feed, before = feed_of(), asyncio.all_tasks()
    first, second = feed.events(), feed.events()
    await anext(first)
    await anext(second)
    assert asyncio.all_tasks() > before
    await first.aclose()
    await until(feed, "now")
    await second.aclose()
    _, running = await asyncio.wait(asyncio.all_tasks() - before, timeout=60)
    assert not running


async def test_the_machine_is_not_examined_anew_for_each_page() -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    calls: list[int] = []

    def doctor() -> dict[str, Any]:
        calls.append(1)
        begun.release()
        may_end.wait(60)
        return {"findings": []}

    feed = feed_of(doctor=doctor)
    try:
        await until(feed, "now")
        assert await asyncio.to_thread(begun.acquire, timeout=60)
        for _ in range(5):  # each leaves while the thread still works
            await until(feed, "now")
            await asyncio.sleep(0.01)
    finally:
        may_end.set()
    for _ in range(5):
        assert await until(feed, "doctor") == {"findings": []}
    assert len(calls) == 1


async def test_a_document_that_cannot_be_made_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise ZeroDivisionError

    feed = feed_of({"plan": broken, "status": lambda: {"a": 1}}, doctor=broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert await until(feed, "status") == {"a": 1}
            await until(feed, "now")
        await until(feed, "now", lambda _: "the doctor of a page cannot be made" in caplog.text)
    assert caplog.text.count("the plan of a page cannot be made") == 1
