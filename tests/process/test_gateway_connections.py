"""Connections that make the gateway wait: silent, half, slow, not read, too many. Behind it stands the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.types import Receive, Scope, Send

from appliance.gateway.app import App
from appliance.gateway.clients.connections import CONNECTIONS_MOST, KNOWN, SPARE, Counts, Limits, limits_within
from appliance.gateway.clients.request_log import RequestLog
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.roster import roster_of
from appliance.gateway.server import Gateway
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_all, read_until
from tests.process.stages.supervisor import eventually as eventually_here

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n".encode()
LIVE = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
QUICK = Limits(
    connections=64, requests=48, header_s=0.2, body_s=0.2, unread_s=0.4, keep_alive_s=0.2, stuck_s=0.1
)  # fmt: skip
SLOW = Limits(connections=12, requests=6, stuck_s=0.2)


@pytest.fixture(scope="module")
def quick() -> Iterator[Stage]:
    with on_stage("fake_engine.py", limits=QUICK) as stage:
        yield stage


@pytest.fixture
def narrow() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.05", limits=SLOW) as stage:
        yield stage


def counted(stage: Stage, name: str) -> float:
    """A figure of /metrics, by name and labels as they are written there."""
    text = stage.ask("GET", "/metrics").body.decode()
    found = re.search(rf"^{re.escape(name)} ([0-9.]+)$", text, re.MULTILINE)
    assert found, f"no {name} in {text}"
    return float(found.group(1))


def closed(stage: Stage, reason: str) -> float:
    return counted(stage, f'appliance_connections_closed_total{{reason="{reason}"}}')


@contextmanager
def opened(stage: Stage, number: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stage.raw(first)) for _ in range(number)]


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(65536) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        connection.settimeout(60)


def dribble(connection: socket.socket, until: Callable[[], bool]) -> None:
    """Send a byte now and then until `until` holds."""
    while not until():
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"x")
        time.sleep(0.03)


# How long each may take


def test_a_silent_connection_is_closed_without_a_word(quick: Stage) -> None:
    before = closed(quick, "header_timeout")
    with quick.raw(b"") as connection:
        assert read_all(connection) == b""
    assert closed(quick, "header_timeout") == before + 1


@pytest.mark.parametrize("half", [b"G", HEAD, b"GET / HTTP/1.1\r\nX: "])
def test_half_a_header_has_an_end_however_it_dribbles(quick: Stage, half: bytes) -> None:
    with quick.raw(half) as connection:
        dribble(connection, lambda: not is_open(connection) or bool(select_read(connection)))
        answer = read_rest(connection)
    # A connection into which bytes were still on their way may be reset; what was read before is the answer.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


def select_read(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, ConnectionError):
        return b""
    finally:
        connection.settimeout(60)


def read_rest(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def test_half_a_header_is_answered(quick: Stage) -> None:
    with quick.raw(HEAD) as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_a_slow_body_is_ended_and_counted(quick: Stage) -> None:
    before = closed(quick, "body_timeout")
    with quick.raw(HEAD + b"Content-Length: 1000\r\n\r\n{") as connection:
        dribble(connection, lambda: bool(select_read(connection)))
        assert read_rest(connection).startswith(b"HTTP/1.1 408 ")
    assert closed(quick, "body_timeout") == before + 1


def test_it_is_told_in_the_words_of_the_clients_api(quick: Stage) -> None:
    with quick.raw(HEAD.replace(b"/chat/completions", b"/messages") + b"Content-Length: 9\r\n\r\n{") as connection:
        answer = read_all(connection).partition(b"\r\n\r\n")[2]
    assert json.loads(answer)["type"] == "error"


def test_a_slow_upload_that_goes_on_lives(quick: Stage) -> None:
    """The upload takes five times as long as a body may pause, at twice the slowest rate."""
    filler = b" " * 60
    body = json.dumps(CHAT).encode()
    with quick.raw(HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) + 60 * len(filler))) as connection:
        began = time.monotonic()
        for _ in range(60):
            connection.sendall(filler)
            time.sleep(0.02)
        connection.sendall(body)
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert time.monotonic() - began > 5 * QUICK.body_s


def test_idle_is_closed_after_its_own_time(quick: Stage) -> None:
    with quick.raw(LIVE) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_line_breaks_do_not_keep_a_connection_alive(quick: Stage) -> None:
    """uvicorn forgets its own timer with every byte."""
    with quick.raw(LIVE) as connection:
        read_until(connection, b"}")
        began = time.monotonic()
        while is_open(connection):
            assert time.monotonic() - began < 30
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"\r\n")
            time.sleep(0.03)


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(quick: Stage) -> None:
    with quick.raw(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n") as connection:
        assert read_until(connection, b"}").startswith(b"HTTP/1.1 401 ")
        dribble(connection, lambda: not is_open(connection))


def test_who_does_not_read_loses_the_engines_slot() -> None:
    """The fake sends as fast as it can; what is not read fills the buffers of both kernels first."""
    knobs = ("--chunks", "100000000", "--chunk-interval", "0")
    with on_stage("fake_engine.py", *knobs, limits=QUICK) as stage:
        long = {"messages": [{"role": "user", "content": "x" * 20_000}], "stream": True}
        with stage.post("/v1/chat/completions", long):
            eventually(lambda: stage.engine_saw()["open_streams"] == 1)
            eventually(lambda: stage.engine_saw()["open_streams"] == 0)
            assert stage.engine_saw()["disconnects"] == 1
        assert closed(stage, "not_read") == 1


def test_who_reads_slowly_gets_all_of_it() -> None:
    knobs = ("--chunks", "400", "--chunk-interval", "0")
    with on_stage("fake_engine.py", *knobs, limits=QUICK) as stage:
        long = {"messages": [{"role": "user", "content": "x" * 20_000}], "stream": True}
        with stage.post("/v1/chat/completions", long) as connection:
            received = b""
            while b"[DONE]" not in received[-100:]:
                data = connection.recv(100_000)
                assert data
                received += data
                time.sleep(0.01)
        assert len(received) > 400 * 20_000
        assert closed(stage, "not_read") == 0


def test_a_stream_that_takes_longer_than_any_of_the_times_goes_on() -> None:
    with (
        on_stage("fake_engine.py", "--chunks", "4", "--chunk-interval", "0.5", limits=QUICK) as stage,
        stage.post("/v1/chat/completions", {**CHAT, "stream": True}) as connection,
    ):
        assert b"[DONE]" in read_until(connection, b"[DONE]")


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nX: ", HEAD + CHUNKED + b"X: ", HEAD.replace(KEY.encode(), b"wrong") + CHUNKED + b"X: "],
    ids=["header", "trailer", "trailer-without-a-key"],
)
def test_an_endless_header_is_refused(quick: Stage, begin: bytes) -> None:
    before = closed(quick, "header_too_large")
    with quick.raw(begin) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"x" * 16384)
        assert read_rest(connection)[:13] in (b"", b"HTTP/1.1 431 ", b"HTTP/1.1 401 ")
    assert closed(quick, "header_too_large") == before + 1


def test_a_trailer_is_no_header(quick: Stage) -> None:
    body = json.dumps(CHAT).encode()
    request = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Late: 1\r\n\r\n" % (len(body), body)
    with quick.raw(request) as connection:
        read_until(connection, b'"usage"')
    assert "x-late" not in {name.lower() for name in quick.engine_saw()["requests"][-1]["headers"]}


def test_a_body_is_no_header(quick: Stage) -> None:
    """The second request begins in the same piece as the first one's body ends."""
    body = json.dumps({**CHAT, "filler": "x" * 200_000}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with quick.raw(request + request[: len(HEAD) - 5]) as connection:
        read_until(connection, b'"usage"')
        connection.sendall(request[len(HEAD) - 5 :])
        assert read_until(connection, b'"usage"').count(b"HTTP/1.1 200 ") == 1


def test_requests_are_not_queued_without_end(quick: Stage) -> None:
    with quick.raw(LIVE * 1000) as connection:
        received = read_rest(connection)
    assert received.count(b"HTTP/1.1 200 ") <= 17


def test_nothing_is_said_in_the_middle_of_an_answer(narrow: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with narrow.post("/v1/chat/completions", {**CHAT, "stream": True}) as connection:
        received = read_until(connection, b"data: ")
        connection.sendall(b"this is no HTTP\r\n\r\n")
        received += read_rest(connection)
    assert received.count(b"HTTP/1.1 ") == 1
    eventually(lambda: counted(narrow, "appliance_requests_in_flight") == 0)
    assert "Traceback" not in caplog.text


def test_who_leaves_with_another_request_behind_frees_the_slot(caplog: pytest.LogCaptureFixture) -> None:
    with on_stage("fake_engine.py", "--works-s", "inf", "--sleeps") as stage:
        with stage.post("/v1/chat/completions", CHAT) as connection:
            eventually(lambda: counted(stage, "appliance_requests_in_flight") == 1)
            connection.sendall(LIVE)
            time.sleep(0.1)  # until it was parsed, which nothing shows
        eventually(lambda: stage.engine_saw()["disconnects"] == 1, timeout_s=10)
    assert "Traceback" not in caplog.text


def test_who_leaves_with_a_large_request_behind_frees_the_slot() -> None:
    with on_stage("fake_engine.py", "--works-s", "inf", "--sleeps") as stage:
        with stage.post("/v1/chat/completions", CHAT) as connection:
            eventually(lambda: counted(stage, "appliance_requests_in_flight") == 1)
            connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 900_000)
        eventually(lambda: stage.engine_saw()["disconnects"] == 1, timeout_s=10)


async def test_who_leaves_before_the_key_is_known_does_not_count_on() -> None:
    """The named keys may be read from a volume meanwhile."""
    is_known, counts, ended = asyncio.Event(), Counts(), asyncio.Event()

    async def find_key(scope: Scope, _receive: Receive, _send: Send) -> None:
        await is_known.wait()
        scope[KNOWN]()
        ended.set()

    app = App(find_key, roster_of([]), Traffic(), counts, RequestLog())
    gateway = await Gateway.open(app, "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(LIVE)
        await eventually_here(lambda: counts.open == 1)
        writer.close()
        await eventually_here(lambda: counts.open == 0)
        is_known.set()
        await ended.wait()
        assert counts.open == 0
    finally:
        await gateway.drain(0.0)


# How many there may be


def test_the_oldest_silent_one_gives_way(narrow: Stage) -> None:
    with opened(narrow, 11) as silent, narrow.raw(LIVE) as idle:
        read_until(idle, b"}")
        assert narrow.ask("GET", "/v1/models").status == 200
        eventually(lambda: not is_open(silent[0]))
        assert is_open(silent[1])
        assert is_open(idle)
        # Once for /v1/models, and again for the metrics if the first request's connection is still there.
        assert closed(narrow, "made_room") in (1, 2)


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: ", LIVE, LIVE + b"POST /"])
def test_a_flood_without_a_key_keeps_nobody_out(narrow: Stage, first: bytes) -> None:
    with opened(narrow, 200, first):
        for _ in range(5):
            assert narrow.ask("GET", "/health/live", key=None).status == 200
            assert narrow.ask("POST", "/v1/embeddings", {"input": "a"}).status == 200
        assert counted(narrow, "appliance_connections") <= SLOW.connections
    assert closed(narrow, "made_room") >= 200 - SLOW.connections


def test_slow_bodies_give_way_where_nobody_is_silent(narrow: Stage) -> None:
    with opened(narrow, SLOW.connections, HEAD + b"Content-Length: 1000\r\n\r\n{"):
        eventually(lambda: narrow.ask("GET", "/health/live", key=None).status == 200)


def test_slow_bodies_with_a_key_give_way_to_a_request(narrow: Stage) -> None:
    with opened(narrow, SLOW.requests, HEAD + b"Content-Length: 1000\r\n\r\n{"):
        eventually(lambda: narrow.ask("POST", "/v1/embeddings", {"input": "a"}).status == 200)


def test_who_has_shown_a_key_keeps_an_idle_connection(narrow: Stage) -> None:
    with narrow.post("/v1/embeddings", {"input": "a"}) as mine:
        read_until(mine, b"embedding")
        with opened(narrow, 100, LIVE):
            assert is_open(mine)


def test_who_reads_nothing_and_has_no_key_gives_way(narrow: Stage) -> None:
    """Answers to requests without a key fill the buffers of both sides; nobody waits for the client to read them."""
    with ExitStack() as stack:
        for _ in range(SLOW.connections):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", narrow.port))
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                while True:
                    connection.sendall(LIVE * 8)
        for _ in range(5):
            assert narrow.ask("GET", "/health/live", key=None).status == 200
            assert narrow.ask("POST", "/v1/embeddings", {"input": "a"}).status == 200


def test_one_request_too_many_is_told_so_and_health_answers(narrow: Stage) -> None:
    with ExitStack() as streams:
        for _ in range(SLOW.requests):
            stream = streams.enter_context(narrow.post("/v1/chat/completions", {**CHAT, "stream": True}))
            read_until(stream, b"data: ")
        refused = narrow.ask("POST", "/v1/embeddings", {"input": "a"})
        assert refused.status == 503
        assert refused.error["code"] == "too_many_requests"
        assert refused.headers["retry-after"] == "2"
        assert narrow.ask("GET", "/v1/models", key="sk-wrong").status == 401
        assert narrow.ask("GET", "/health/live", key=None).status == 200
        assert narrow.ask("GET", "/health/ready", key=None).status == 200
    eventually(lambda: narrow.ask("POST", "/v1/embeddings", {"input": "a"}).status == 200)
    assert counted(narrow, 'appliance_connections_refused_total{reason="requests"}') >= 1


def test_where_all_work_a_new_connection_is_refused_in_our_words() -> None:
    limits = Limits(connections=2, requests=2)
    with (
        on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.05", limits=limits) as stage,
        ExitStack() as streams,
    ):
        for _ in range(2):
            stream = streams.enter_context(stage.post("/v1/chat/completions", {**CHAT, "stream": True}))
            read_until(stream, b"data: ")
        refused = stage.ask("GET", "/health/live", key=None)
        assert refused.status == 503
        assert refused.error["code"] == "too_many_requests"
        streams.close()
        eventually(lambda: stage.ask("GET", "/health/live", key=None).status == 200)
        assert counted(stage, 'appliance_connections_refused_total{reason="connections"}') >= 1


def test_it_is_said_once(narrow: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with opened(narrow, 100):
        assert narrow.ask("GET", "/health/live", key=None).status == 200
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        "12 connections are open, the most that fit: those that have been silent for longest are closed for new ones"
    ]


def test_a_stop_ends_silent_connections(narrow: Stage) -> None:
    with opened(narrow, 5) as silent, opened(narrow, 5, b"GET / HTTP/1.1\r\nX: "):
        assert narrow.drain(0.0) < 30
        assert not any(map(is_open, silent))


@pytest.mark.parametrize(
    ("files", "requests"), [(None, CONNECTIONS_MOST - SPARE), (128, 16), (256, 80), (1024, 432), (20_000, 2032)]
)
def test_what_fits_into_a_limit_of_files(files: int | None, requests: int) -> None:
    limits = limits_within(files)
    assert limits.requests == requests
    assert limits.connections == requests + SPARE
    # A connection to the engine for each request, and 64 and more for all else.
    assert files is None or 2 * limits.connections <= files - 64
