"""The order of a stop, and that it ends in time whatever the clients do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import openai
import pytest

from appliance.gateway.server import END_S
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_all, read_until

STREAM = {"messages": [{"role": "user", "content": "one two"}], "stream": True}
STOPPING = (
    b'data: {"error":{"message":"the appliance is stopping","type":"service_unavailable",'
    b'"param":null,"code":"shutting_down"}}\n\n'
)
MODELS = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


@pytest.fixture
def endless() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.02") as stage:
        yield stage


@pytest.fixture
def odd() -> Iterator[Stage]:
    with on_stage("odd_engine.py") as stage:
        yield stage


def draining(stage: Stage, drain_s: float, took_s: list[float]) -> threading.Thread:
    thread = threading.Thread(target=lambda: took_s.append(stage.drain(drain_s)))
    thread.start()
    return thread


def test_nothing_runs(endless: Stage) -> None:
    with endless.raw(MODELS) as idle:
        read_until(idle, b"}]}")
        assert endless.drain(300.0) < 60.0
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endless.port), timeout=5)


def test_a_short_stream_finishes() -> None:
    with (
        on_stage("fake_engine.py", "--chunks", "25", "--chunk-interval", "0.02") as stage,
        stage.post("/v1/chat/completions", STREAM) as connection,
    ):
        read_until(connection, b"two")
        assert stage.drain(300.0) < 60.0
        received = read_all(connection)
        assert b"data: [DONE]\n\n" in received
        assert b"shutting_down" not in received
        eventually(lambda: stage.engine_saw()["finished_streams"] == 1)


def test_a_held_stream_is_ended_with_an_error(endless: Stage) -> None:
    with endless.post("/v1/chat/completions", STREAM) as connection:
        read_until(connection, b"two")
        assert endless.drain(0.5) < 60.0
        received = read_all(connection)

    # One chunk of the event, then the end of the body: the response itself is whole.
    assert received.endswith(b"%x\r\n%s\r\n0\r\n\r\n" % (len(STOPPING), STOPPING))
    eventually(lambda: endless.engine_saw()["disconnects"] == 1)
    assert endless.engine_saw()["open_streams"] == 0


def test_the_sdk_is_told(endless: Stage) -> None:
    with endless.openai() as client:
        events = iter(client.chat.completions.create(model="demo", messages=STREAM["messages"], stream=True))  # type: ignore[call-overload]
        next(events)
        endless.drain(0.0)
        with pytest.raises(openai.APIError, match="the appliance is stopping") as caught:
            list(events)
    assert caught.value.code == "shutting_down"


def test_a_waiting_request_is_ended_with_503(odd: Stage) -> None:
    with odd.post("/v1/chat/completions", {"act": "slow"}) as connection:
        eventually(lambda: odd.engine_saw()["working"] == 1)
        assert odd.drain(0.2) < 60.0
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "shutting_down"
    eventually(lambda: odd.engine_saw()["disconnects"] == 1)


def test_new_requests_while_draining(endless: Stage) -> None:
    took_s: list[float] = []
    with endless.raw(MODELS) as kept, endless.post("/v1/chat/completions", STREAM) as held:
        read_until(kept, b"}]}")
        read_until(held, b"two")
        drain = draining(endless, 300.0, took_s)
        eventually(lambda: not is_accepting(endless.port))

        kept.sendall(MODELS)
        assert b"503 Service Unavailable" in (refused := read_until(kept, b"}}"))
        assert b'"code":"shutting_down"' in refused
        kept.sendall(b"GET /health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b'"phase":"stopping"' in read_until(kept, b"}")
        kept.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in read_until(kept, b"}")
        assert b"one" in read_until(held, b"one")  # the stream goes on meanwhile
        assert took_s == []
    # With the last client gone there is nothing left to wait for.
    drain.join(60)
    assert len(took_s) == 1


def test_clients_that_do_not_read_cannot_hold_it(odd: Stage) -> None:
    with odd.post("/v1/chat/completions", {"act": "flood"}) as connection:
        read_until(connection, b"data: ")
        eventually(lambda: odd.engine_saw()["flooded_bytes"] > 0)
        assert odd.drain(0.3, end_s=END_S) < 60.0
        eventually(lambda: odd.engine_saw()["disconnects"] == 1)


def test_clients_that_do_not_finish_cannot_hold_it(odd: Stage) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    with odd.raw(head.encode()) as sending, odd.raw(b"GET /v1/mo") as half, odd.raw(b"") as silent:
        eventually(lambda: b"in_flight 1.0" in odd.ask("GET", "/metrics").body)
        assert odd.drain(0.2, end_s=10.0) < 60.0
        assert b" 503 " in read_all(sending)
        assert read_all(half) == read_all(silent) == b""


def test_many_held_streams(endless: Stage) -> None:
    connections = [endless.post("/v1/chat/completions", STREAM) for _ in range(32)]
    try:
        for connection in connections:
            read_until(connection, b"two")
        assert endless.drain(0.2) < 60.0
        assert all(STOPPING in read_all(connection) for connection in connections)
    finally:
        for connection in connections:
            connection.close()
    eventually(lambda: endless.engine_saw()["disconnects"] == 32)


def test_twice(endless: Stage) -> None:
    assert endless.drain(0.0) < 60.0
    assert endless.drain(0.0) < 60.0


def is_accepting(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
