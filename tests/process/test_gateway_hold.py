"""Requests that come while the engine is away on purpose: they wait, are told why, and are served."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from appliance.console.progress import Phase, Progress
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_all, read_until

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
CHAT = {"model": "demo", "messages": MESSAGES}
STREAM = {**CHAT, "stream": True}
HELD = Progress(phase=Phase.HELD, message="the model is being loaded,\nabout 12 s")
COMMENT = b": requests wait for the engine: the model is being loaded, about 12 s\n\n"
READY = Progress(phase=Phase.READY)


@pytest.fixture(scope="module")
def shared() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--alias", "demo", "--chunks", "6", "--chunk-interval", "0.01") as stage:
        yield stage


@pytest.fixture
def held(shared: Stage) -> Iterator[Stage]:
    shared.progress = HELD
    yield shared
    shared.progress = READY
    waiting(shared, 0)  # who left is another test's to count no more


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` in a thread. The list gets its result, or the exception that it raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def waiting(stage: Stage, count: int = 1) -> None:
    eventually(lambda: f"in_flight {count}.0".encode() in stage.ask("GET", "/metrics").body)


def posts(stage: Stage, path: str = "/v1/chat/completions") -> int:
    return int(stage.engine_saw()["counts"].get(f"POST {path}", 0))


# Held and served


def test_a_stream_begins_at_once_and_is_told_why(held: Stage) -> None:
    before = posts(held)
    with held.post("/v1/chat/completions", STREAM) as connection:
        received = read_until(connection, COMMENT)
        head = received.partition(b"\r\n\r\n")[0].lower()
        received += read_until(connection, COMMENT)  # and again
        assert posts(held) == before

        held.progress = READY
        received += read_until(connection, b"0\r\n\r\n")

    assert head.startswith(b"http/1.1 200 ")
    assert sorted(line.partition(b":")[0] for line in head.split(b"\r\n")[1:]) == [
        b"content-type",
        b"date",
        b"transfer-encoding",
        b"x-accel-buffering",
    ]
    assert b"content-type: text/event-stream" in head
    assert received.count(b'"content": ') == 6
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b": requests wait" not in received.partition(b"data: ")[2]
    assert posts(held) == before + 1


def test_the_heads_of_a_held_and_of_a_plain_stream_are_alike(held: Stage) -> None:
    def head() -> set[bytes]:
        with held.post("/v1/chat/completions", STREAM) as connection:
            lines = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        return {line for line in lines if not line.startswith(b"date:")}

    early = head()
    held.progress = READY
    assert early == head()


def test_the_sdk_streams_through_a_hold(held: Stage) -> None:
    def chat() -> str:
        with held.openai() as client:
            events = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            return "".join(event.choices[0].delta.content or "" for event in events)

    thread, texts = in_thread(chat)
    waiting(held)
    time.sleep(0.35)  # some comments
    held.progress = READY
    thread.join(60)
    assert texts == ["one two three one two three "]


def test_one_that_asks_for_no_stream_just_waits(held: Stage) -> None:
    with held.post("/v1/chat/completions", CHAT) as connection:
        waiting(held)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60)
        held.progress = READY
        received = read_until(connection, b"}}")
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b": requests wait" not in received


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a", "stream": True}),  # the engine streams no such answer
        ("/v1/chat/completions", {**CHAT, "stream": 1}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"stream": True}]}),
    ],
)
def test_no_stream_is_promised_that_the_engine_would_not_give(held: Stage, path: str, body: Any) -> None:
    thread, answers = in_thread(lambda: held.ask("POST", path, body))
    waiting(held)
    time.sleep(0.15)
    held.progress = READY
    thread.join(60)
    assert answers[0].status == 200
    assert b": requests wait" not in answers[0].body


def test_many_are_held_and_all_are_served(held: Stage) -> None:
    connections = [held.post("/v1/chat/completions", STREAM) for _ in range(32)]
    try:
        for connection in connections:
            read_until(connection, COMMENT)
        held.progress = READY
        for connection in connections:
            assert b'"content": "three "' in read_until(connection, b"data: [DONE]\n\n")
    finally:
        for connection in connections:
            connection.close()


def test_the_phase_may_change_while_a_request_is_sent(held: Stage) -> None:
    """The engine is ready when the request comes, and away when its body is whole."""
    held.progress = READY
    data = json.dumps(STREAM).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with held.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:5]) as connection:
        waiting(held)
        held.progress = HELD
        connection.sendall(data[5:])
        read_until(connection, COMMENT)
        held.progress = READY
        read_until(connection, b"[DONE]")


def test_limits_hold_while_held(held: Stage) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with held.raw(f"{head}Content-Length: {2**30}\r\n\r\n".encode()) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert held.ask("POST", "/v1/chat/completions", STREAM, key="sk-wrong").status == 401


# Held and not served


def test_a_client_that_leaves_is_not_served(held: Stage) -> None:
    before = posts(held)
    with held.post("/v1/chat/completions", STREAM) as connection, held.post("/v1/chat/completions", CHAT):
        read_until(connection, COMMENT)
        waiting(held, 2)
    waiting(held, 0)
    held.progress = READY
    assert held.ask("POST", "/v1/chat/completions", CHAT).status == 200
    assert posts(held) == before + 1


@pytest.mark.parametrize(
    ("phase", "code", "message"),
    [
        (Phase.FAILED, "engine_died", "the engine failed: killed by SIGKILL"),
        (Phase.RESTARTING, "model_loading", "the engine is being restarted: killed by SIGKILL"),
    ],
)
def test_the_engine_does_not_come_back(held: Stage, phase: Phase, code: str, message: str) -> None:
    thread, answers = in_thread(lambda: held.ask("POST", "/v1/chat/completions", CHAT))
    with held.post("/v1/chat/completions", STREAM) as connection:
        read_until(connection, COMMENT)
        waiting(held, 2)
        held.progress = Progress(phase=phase, message="killed by SIGKILL")
        event = read_until(connection, b"0\r\n\r\n").rpartition(b"data: ")[2].partition(b"\n\n")[0]
    thread.join(60)
    assert (answers[0].status, answers[0].error["code"], answers[0].error["message"]) == (503, code, message)
    assert json.loads(event)["error"] == answers[0].error


@pytest.mark.parametrize("first", [HELD, READY])
def test_an_engine_that_fails_while_a_body_still_comes_is_not_asked(held: Stage, first: Progress) -> None:
    before = posts(held)
    held.progress = first
    data = json.dumps(CHAT).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}"
    )
    with held.raw(f"{head}\r\nConnection: close\r\n\r\n".encode() + data[:5]) as connection:
        waiting(held)
        held.progress = Progress(phase=Phase.FAILED, message="gone")
        connection.sendall(data[5:])
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"the engine failed: gone" in answer
    assert posts(held) == before


def test_the_sdk_is_told_of_it(held: Stage) -> None:
    has_begun = threading.Event()  # the answer has begun: an earlier error comes as a status, which the SDK words anew

    def chat() -> Any:
        with held.openai() as client:
            stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            has_begun.set()
            return list(stream)

    thread, errors = in_thread(chat)
    assert has_begun.wait(60)
    held.progress = Progress(phase=Phase.FAILED, message="gone")
    thread.join(60)
    assert isinstance(errors[0], openai.APIError)
    assert errors[0].message == "the engine failed: gone"
    assert errors[0].code == "engine_died"


def test_a_stop_ends_those_that_are_held() -> None:
    with on_stage("fake_engine.py") as stage:
        stage.progress = HELD
        thread, answers = in_thread(lambda: stage.ask("POST", "/v1/chat/completions", CHAT))
        with stage.post("/v1/chat/completions", STREAM) as connection:
            read_until(connection, COMMENT)
            waiting(stage, 2)
            assert stage.drain(300.0) < 60.0  # nobody loads the engine any more: there is nothing to wait for
            received = read_all(connection)
        thread.join(60)
        assert received.endswith(b'"code":"shutting_down"}}\n\n\r\n0\r\n\r\n')
        assert (answers[0].status, answers[0].error["code"]) == (503, "shutting_down")
        assert posts(stage) == 0


@pytest.fixture
def odd() -> Iterator[Stage]:
    with on_stage("odd_engine.py") as stage:
        stage.progress = HELD
        yield stage


def end_of(odd: Stage, path: str, act: str) -> bytes:
    """Return what a held stream is sent after the last comment."""
    with odd.post(path, {"act": act, "stream": True}) as connection:
        read_until(connection, COMMENT)
        odd.progress = READY
        return read_until(connection, b"0\r\n\r\n").rpartition(COMMENT)[2]


def test_an_error_of_the_engine_after_the_stream_was_begun(odd: Stage) -> None:
    event = end_of(odd, "/v1/chat/completions", "refusal").partition(b"data: ")[2].partition(b"\n\n")[0]
    error = {"message": "the prompt is too long", "type": "exceed_context_size_error", "param": None, "code": "400"}
    assert json.loads(event) == {"error": error}


def test_the_same_in_anthropics_words(odd: Stage) -> None:
    data = b'{"type":"error","error":{"type":"invalid_request_error","message":"the prompt'
    assert b"event: error\ndata: " + data in end_of(odd, "/v1/messages", "refusal")


def test_no_stream_where_one_was_begun(odd: Stage) -> None:
    assert b"status 200 and without a stream" in end_of(odd, "/v1/chat/completions", "compressed")


def test_the_engine_dies_after_a_hold() -> None:
    with on_stage("fake_engine.py", "--die-on-request", "2") as stage:
        stage.progress = HELD
        with stage.post("/v1/chat/completions", STREAM) as connection:
            read_until(connection, COMMENT)
            stage.progress = READY
            received = read_until(connection, b"0\r\n\r\n")
    assert received.count(b'"content": ') == 2
    assert b'"code":"engine_died"' in received


# Who only looks


def test_health_stays_ready(held: Stage) -> None:
    answer = held.ask("GET", "/health/ready", key=None)
    assert (answer.status, answer.json["status"], answer.json["phase"]) == (200, "ready", "held")
    assert "about 12 s" in answer.json["message"]
    assert b'appliance_phase{phase="held"} 1.0' in held.ask("GET", "/metrics").body


def test_the_list_of_models_never_waits_for_the_engine(held: Stage) -> None:
    answer = held.ask("GET", "/v1/models")
    assert (answer.status, [model["state"] for model in answer.json["data"]]) == (200, ["held"])
    assert "GET /v1/models" not in held.engine_saw()["counts"]


# What the answer waits for


def unread(connection: socket.socket) -> bytes:
    connection.setblocking(False)
    try:
        return connection.recv(2**20)
    except BlockingIOError:
        return b""


def test_it_is_told_now_and_then_and_not_all_the_time() -> None:
    with on_stage("fake_engine.py", tell_every_s=60.0) as stage:
        stage.progress = HELD
        with stage.post("/v1/chat/completions", STREAM) as connection:
            read_until(connection, COMMENT)
            time.sleep(0.3)
            assert b":" not in unread(connection)
