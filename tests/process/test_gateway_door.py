"""Who gets in, and how far: keys, routes, paths, sizes, readiness. Behind the door stands the real fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.console.progress import Phase, Progress
from appliance.engines.llama.api.routes import DROPPED_HEADERS, ROUTES
from appliance.errors import ConfigError
from appliance.gateway.app import create_app
from appliance.gateway.clients.auth import Keys
from appliance.gateway.engine.backend import Backend
from appliance.gateway.routes.forward import BODY_BYTES_MAX
from appliance.gateway.server import Gateway
from tests.ports import free_port
from tests.process.stages.gateway import (
    ERROR_KEYS,
    KEY,
    Stage,
    eventually,
    on_stage,
    read_all,
    read_until,
    running_loop,
)

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    documents: dict[str, Callable[[], dict[str, Any]]] = {
        "status": lambda: {"phase": "ready"},
        "plan": lambda: {"threads": 2},
    }
    with on_stage("fake_engine.py", "--alias", "demo", documents=documents) as stage:
        yield stage


@pytest.fixture
def unready(stage: Stage) -> Iterator[Stage]:
    yield stage
    stage.progress = Progress(phase=Phase.READY)


def paths_seen(stage: Stage) -> list[str]:
    return [request["path"] for request in stage.engine_saw()["requests"]]


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"Authorization": "Bearer stale", "x-api-key": KEY},
    ],
)
def test_the_key_opens(stage: Stage, headers: dict[str, str]) -> None:
    assert stage.ask("GET", "/v1/models", headers=headers, key=None).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer sk-\xe9"},
        {"x-api-key": KEY[:-1]},
        {"Cookie": f"api_key={KEY}"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/appliance/v1/status", "/nowhere", "/appliance/v1/events"])
def test_nothing_else_opens(stage: Stage, headers: dict[str, str], path: str) -> None:
    answer = stage.ask("GET", path, headers=headers, key=None)

    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "invalid_request_error"
    assert KEY.encode() not in answer.body


def test_a_query_is_no_key(stage: Stage) -> None:
    assert stage.ask("GET", f"/v1/models?api_key={KEY}", key=None).status == 401


def test_the_sdk_calls_a_wrong_key_an_authentication_error(stage: Stage) -> None:
    with stage.openai("sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.status_code == 401
    assert caught.value.code == "invalid_api_key"


def test_without_keys_the_door_is_open() -> None:
    with on_stage("fake_engine.py", keys=None) as stage:
        assert stage.ask("GET", "/v1/models", key=None).status == 200


def last(stage: Stage) -> dict[str, Any]:
    """Return the engine's last /tokenize request. The gateway's own requests may come after it."""
    found: dict[str, Any] = [each for each in stage.engine_saw()["requests"] if each["path"] == "/tokenize"][-1]
    return found


def test_the_engine_never_sees_the_key(stage: Stage) -> None:
    headers = {"x-api-key": KEY, "Cookie": f"k={KEY}", "X-Mine": "passes"}
    assert stage.ask("POST", "/tokenize", {"content": "a b"}, headers=headers).json == {"tokens": [1, 1]}

    assert KEY not in json.dumps(stage.engine_saw()["requests"])
    seen = last(stage)
    assert seen["headers"]["x-mine"] == "passes"
    assert not {"authorization", "x-api-key", "cookie"} & set(seen["headers"])


def test_no_key_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with on_stage("fake_engine.py", "--die-on-request", "1") as stage:
        stage.ask("GET", "/v1/models")
        stage.ask("GET", "/v1/models", key=KEY + "-wrong")
        stage.ask("GET", "/nowhere")
        stage.ask("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        with stage.raw(f"BROKEN {KEY}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()) as connection:
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert KEY not in caplog.text


# Routes and paths


def test_documents(stage: Stage) -> None:
    assert stage.ask("GET", "/appliance/v1/plan").json == {"threads": 2}
    assert stage.ask("GET", "/appliance/v1/secrets").error["code"] == "not_found"


@pytest.mark.parametrize(
    "path",
    [
        "/slots",
        "/slots/0?action=erase",
        "/props",
        "/cors-proxy?url=http://169.254.169.254/",
        "/tools",
        "/models/load",
        "/models/unload",
        "/lora-adapters",
        "/v1/streams/lookup",
        "/v1/chat/completions/control",
        "/completion",
        "/embedding",
        "/v1/health",
        "/docs",
        "/openapi.json",
        "/v1/models/demo",
        "/api/v0/models/demo",
        "//slots",
        "/v1//models",
        "/v1/models/",
        "/v1/models/../../slots",
        "/v1/models/%2e%2e/%2e%2e/slots",
        "/v1/%2e%2e/slots",
        "/v1/models%2f..%2f..%2fslots",
        "/v1/models%00/slots",
        "/v1/models;/slots",
        "/%73lots",
        "/V1/MODELS",
        "http://engine/slots",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_unlisted_reaches_the_engine(stage: Stage, method: str, path: str) -> None:
    before = stage.engine_saw()["counts"]
    request = f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 0\r\n"

    with stage.raw(f"{request}Connection: close\r\n\r\n".encode()) as connection:
        head, _, body = read_all(connection).partition(b"\r\n\r\n")

    assert head.split()[1] in (b"404", b"400"), head
    assert b"secret of another client" not in body
    if head.split()[1] == b"404":
        assert set(json.loads(body)["error"]) == ERROR_KEYS
    assert stage.engine_saw()["counts"] == before


def test_an_encoded_spelling_of_a_listed_path_is_that_path(stage: Stage) -> None:
    assert stage.ask("POST", "/v1/%65mbeddings", {"input": "a"}).status == 200
    assert paths_seen(stage)[-1] == "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "upstream"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/api/v0/chat/completions", "/v1/chat/completions"),
        ("/api/v0/embeddings", "/v1/embeddings"),
        ("/responses", "/v1/responses"),
        ("/v1/messages", "/v1/messages"),
        ("/v1/messages/count_tokens?beta=true", "/v1/messages/count_tokens?beta=true"),
        ("/tokenize?a=%2Fslots&b=%0d%0a", "/tokenize?a=%2Fslots&b=%0d%0a"),
    ],
)
def test_where_a_path_goes(stage: Stage, path: str, upstream: str) -> None:
    assert stage.ask("POST", path, CHAT).status == 200
    assert paths_seen(stage)[-1] == upstream


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PUT", "GET"])
def test_other_methods(stage: Stage, method: str) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = stage.ask(method, "/v1/chat/completions", headers=headers)

    assert answer.status == 405
    assert answer.error["code"] == "method_not_allowed"
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_head(stage: Stage) -> None:
    answer = stage.ask("HEAD", "/v1/models")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) == len(stage.ask("GET", "/v1/models").body)


def test_hop_by_hop_headers_stay(stage: Stage) -> None:
    headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "X-Conversation-Id": "c1"}
    headers |= {"Accept-Encoding": "gzip", "Origin": "https://evil.example", "Content-Type": "application/json"}
    assert stage.ask("POST", "/tokenize", {"content": "a"}, headers=headers).status == 200

    seen = last(stage)["headers"]
    assert not {"x-hop", "te", "x-conversation-id", "origin", "transfer-encoding"} & set(seen)
    assert seen["accept-encoding"] == "identity"
    assert seen["content-type"] == "application/json"
    assert seen["host"] == "engine"


# Sizes


def test_a_body_over_the_limit(stage: Stage) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with stage.raw(f"{head}Content-Length: {BODY_BYTES_MAX + 1}\r\n\r\n".encode()) as connection:
        answer = read_until(connection, b"the request body is over the limit of 64 MiB")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_at_the_limit() -> None:
    body = json.dumps({"content": ""}).encode()
    body = body[:-2] + b"x" * (BODY_BYTES_MAX - len(body)) + b'"}'
    assert len(body) == BODY_BYTES_MAX
    with on_stage("fake_engine.py") as stage:  # the fake keeps what it was sent
        assert stage.ask("POST", "/tokenize", body).status == 200
        assert len(last(stage)["body"]) == BODY_BYTES_MAX


def test_a_chunked_body_is_counted(stage: Stage) -> None:
    before = stage.engine_saw()["counts"].get("POST /tokenize", 0)
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with stage.raw(head.encode()) as connection:
        for _ in range(BODY_BYTES_MAX // 2**20):
            connection.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
        connection.sendall(b"1\r\nx\r\n")  # the first byte over it, and the last that is sent
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert stage.engine_saw()["counts"].get("POST /tokenize", 0) == before


def test_a_small_chunked_body_arrives_whole(stage: Stage) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with stage.raw(head.encode() + b'9\r\n{"content\r\n8\r\n":"a b"}\r\n0\r\n\r\n') as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    seen = last(stage)
    assert (seen["body"], seen["headers"]["content-length"]) == ('{"content":"a b"}', "17")


# Readiness


def test_health_needs_no_key(stage: Stage) -> None:
    assert stage.ask("GET", "/health/live", key=None).status == 200
    assert stage.ask("GET", "/health/ready", key=None).json == {"status": "ready"}
    assert stage.ask("GET", "/health", key=None).json == {"status": "ready"}


def test_while_loading(unready: Stage) -> None:
    unready.progress = Progress(phase=Phase.LOADING, message="weights of demo")

    answer = unready.ask("POST", "/v1/chat/completions", CHAT)
    assert answer.status == 503
    assert answer.headers["retry-after"] == "2"
    message = "the model is being loaded: weights of demo"
    assert answer.json == {
        "error": {"message": message, "type": "service_unavailable", "param": None, "code": "model_loading"}
    }
    ready = unready.ask("GET", "/health/ready", key=None)
    assert ready.status == 503
    assert ready.json.pop("elapsed_s") >= 0
    assert {**ready.json, "elapsed_s": 0} == {
        "status": "not ready",
        "phase": "loading",
        "message": message,
        "elapsed_s": 0,
    }
    assert unready.ask("GET", "/health/live", key=None).status == 200
    assert unready.ask("GET", "/v1/models", key=None).status == 401


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        (Phase.STARTING, "model_loading"),
        (Phase.TUNING, "model_loading"),
        (Phase.RESTARTING, "model_loading"),
        (Phase.STOPPING, "shutting_down"),
        (Phase.FAILED, "engine_died"),
    ],
)
def test_every_other_phase_refuses(unready: Stage, phase: Phase, code: str) -> None:
    unready.progress = Progress(phase=phase)
    answer = unready.ask("POST", "/v1/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (503, code)
    assert ("retry-after" in answer.headers) == (code == "model_loading")


def test_metrics(stage: Stage) -> None:
    stage.ask("POST", "/tokenize", {"content": "a"})
    stage.ask("GET", "/made-up-path")
    # A request is counted when it has ended, which may be after its answer was read.
    idle = b"appliance_requests_in_flight 0.0"
    eventually(lambda: idle in stage.ask("GET", "/metrics").body)
    text = stage.ask("GET", "/metrics").body.decode()

    assert 'appliance_requests_total{method="POST",route="/tokenize",status="200"}' in text
    assert 'appliance_request_duration_seconds_count{route="/tokenize"}' in text
    assert 'appliance_time_to_first_byte_seconds_count{route="/tokenize"}' in text
    assert 'appliance_phase{phase="ready"} 1.0' in text
    assert "appliance_engine_restarts_total 3.0" in text
    assert "appliance_engine_hangs_total 0.0" in text
    assert "made-up-path" not in text


# Binding


def open_gateway(host: str, port: int) -> None:
    backend = Backend(
        name="small",
        socket_path=Path("/tmp/none.sock"),
        routes=ROUTES,
        dropped_headers=DROPPED_HEADERS,
        progress=lambda: Progress(phase=Phase.READY),
        documents={},
    )
    app = create_app([backend], keys=Keys(frozenset({KEY})))

    async def open_and_drain() -> None:
        gateway = await Gateway.open(app, host, port)
        await gateway.drain(0.0)

    with running_loop() as loop:
        asyncio.run_coroutine_threadsafe(open_and_drain(), loop).result(60)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        port = free_port()
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(
            ConfigError, match=f"cannot listen on port {port} of 127.0.0.1: address already in use"
        ) as e:
            open_gateway("127.0.0.1", port)
    assert e.value.exit_code == 10
    assert "--port" in (e.value.hint or "")
    open_gateway("127.0.0.1", port)  # nothing was left behind


@pytest.mark.parametrize("host", ["192.0.2.1", "no..host"])  # which no name server is asked for
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=host) as caught:
        open_gateway(host, 0)
    assert "0.0.0.0" in (caught.value.hint or "")


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0"])
def test_addresses_that_work(host: str) -> None:
    open_gateway(host, 0)
