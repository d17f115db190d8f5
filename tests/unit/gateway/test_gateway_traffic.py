from __future__ import annotations

import asyncio
import json
import time
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.console.progress import Phase, Progress
from appliance.console.report import Report
from appliance.gateway.clients.request_queue import asks_for_stream, until_back
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["stream", "a"]), inner, max_size=2),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 0, 2]))
def test_a_stream_is_what_json_says(document: Any, is_ascii: bool, indent: int | None) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "surrogatepass")
    assert asks_for_stream(body) == (isinstance(document, dict) and document.get("stream") is True)


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda data: b'{"stream": true, ' + data))
def test_any_bytes_are_answered(body: bytes) -> None:
    assert asks_for_stream(body) in (True, False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream": true',
        b"[" * 100_000 + b'"stream": true',
        b'{"prompt": "\\"stream\\": true"}',
        b'{"stream": true, "stream": false}',
        b'{"stream": true, "n": ' + b"9" * 10_000 + b"}",
    ],
)
def test_no_stream(body: bytes) -> None:
    assert not asks_for_stream(body)


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b'{"error": "words"}', b'{"error": {"message": "m"}}', b"\xff"]
)
def test_an_answer_that_is_no_error_of_the_engine(body: bytes) -> None:
    assert api_error.of_engine(500, body).code == "engine_died"


async def test_what_is_told_follows_the_phase() -> None:
    report = Report("json", StringIO())
    report.phase(Phase.HELD, "measuring")
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)
        report.phase(*((Phase.HELD, "loading") if len(told) == 1 else (Phase.READY, "")))

    await until_back(lambda: report.progress, Traffic(), tell, every_s=0.0)
    assert told == ["requests wait for the engine: measuring", "requests wait for the engine: loading"]


async def test_closed_while_held() -> None:
    traffic = Traffic()
    traffic.close()
    with pytest.raises(ApiError, match="stopping"):
        await until_back(lambda: Progress(phase=Phase.HELD), traffic, None)
    await until_back(lambda: Progress(phase=Phase.READY), traffic, None)  # what can be served still is


async def test_traffic_knows_work_from_looking() -> None:
    traffic = Traffic()
    assert (traffic.running, traffic.arrivals) == (0, 0)
    with traffic.admitted(is_work=False):
        assert (traffic.running, traffic.arrivals) == (1, 0)
        assert traffic.idle_s >= 0.0
        assert not await arrives(traffic)
        with traffic.admitted():
            assert (traffic.running, traffic.arrivals, traffic.idle_s) == (2, 1, 0.0)
            assert await arrives(traffic)
    assert traffic.running == 0
    assert not await arrives(traffic)
    await asyncio.sleep(0.01)
    assert traffic.idle_s > 0.0


async def test_an_arrival_is_seen_even_if_it_leaves_at_once() -> None:
    traffic = Traffic()
    seen = asyncio.create_task(traffic.until_arrival())
    await asyncio.sleep(0)
    with traffic.admitted():
        pass
    await seen
    assert traffic.arrivals == 1


async def arrives(traffic: Traffic) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await traffic.until_arrival()
    except TimeoutError:
        return False
    return True


async def test_two_requests_at_once_work_twice_as_long() -> None:
    traffic = Traffic()
    with traffic.admitted(), traffic.admitted():
        began = time.monotonic()
        await asyncio.sleep(0.05)
        ran_s = time.monotonic() - began
        assert traffic.work_s >= 2 * ran_s
    worked_s = traffic.work_s
    await asyncio.sleep(0.01)
    assert traffic.work_s == worked_s
    with traffic.admitted(is_work=False):
        await asyncio.sleep(0.01)
        assert traffic.work_s == worked_s
