"""Ollama's API in front of an endpoint that a test writes, and in the routing of the whole gateway."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from appliance.console.progress import Phase
from appliance.gateway.app import create_app
from appliance.gateway.clients.connections import WRITE_NOW
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import ListedModel
from appliance.gateway.engine.gate import Tell
from appliance.gateway.engine.roster import roster_of
from appliance.gateway.routes.metrics import FAILED
from appliance.gateway.routes.models import Endpoint
from appliance.gateway.routes.ollama import OllamaApi
from appliance.gateway.wire.api_error import dialect_of
from appliance.gateway.wire.ollama_paths import METHODS
from tests.unit.gateway.listed import QWEN as OF_LISTS
from tests.unit.gateway.listed import backend

QWEN = replace(OF_LISTS, aliases=("qwen3:8b",), vocabulary=None)
SMALL = ListedModel(id="small", phase=Phase.LOADING)
HELLO = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
OUR_CHAT = "/v1/chat/completions"
EVENTS = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]


class Reply:
    """What a client gets."""

    def __init__(self, sent: list[Mapping[str, Any]], scope: Mapping[str, Any]) -> None:
        self.scope = scope
        self.status: int = sent[0]["status"]
        self.headers = dict(sent[0]["headers"])
        self.pieces = [message.get("body", b"") for message in sent[1:]]
        self.is_whole = not sent[-1].get("more_body", False)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in b"".join(self.pieces).splitlines()]

    @property
    def json(self) -> Any:
        (line,) = self.lines
        return line


def ask(app: Endpoint, path: str, body: Any = None, *, method: str | None = None) -> Reply:
    """Ask from a client that never leaves by itself."""
    sent: list[Mapping[str, Any]] = []
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    messages: list[Any] = [{"type": "http.request", "body": data, "more_body": False}]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Future()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"a"), (b"content-length", b"%d" % len(data))],
        WRITE_NOW: lambda _: False,
    }
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]  # an Endpoint returns a coroutine
    return Reply(sent, scope)


def api(
    *listed: ListedModel,
    endpoint: Endpoint | None = None,
    fleet: Recorded | None = None,
) -> OllamaApi:
    endpoints = {OUR_CHAT: endpoint} if endpoint else {}
    backends = [backend(model) for model in listed or (QWEN,)]
    for each in backends:
        each.gate = fleet
    return OllamaApi(endpoints, roster_of(backends), Traffic(), fleet)


class Recorded:
    """A fleet and its gate that note what is asked of them."""

    is_loaded = waits = True
    volume_problem = ""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str | float | None]] = []

    @asynccontextmanager
    async def held(self, tell: Tell | None, keep_alive_s: float | None) -> AsyncIterator[str]:
        assert tell is None
        self.heard.append(("held", keep_alive_s))
        yield ""

    def document(self) -> dict[str, Any]:
        return {}

    async def load(self, name: str) -> None:
        self.heard.append(("load", name))

    async def unload(self, name: str) -> None:
        self.heard.append(("unload", name))


def answering(status: int, headers: Any, *pieces: bytes, ends: bool = True, failed: bool = False) -> Endpoint:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if ends:
            await send({"type": "http.response.body", "body": b""})
        if failed:
            scope[FAILED] = "502"

    return answer


# What is shown


def test_a_model_is_listed_with_the_facts_of_its_file() -> None:
    (model,) = ask(api(QWEN), "/api/tags").json["models"]
    assert len(model.pop("digest")) == 64
    assert model == {
        "name": QWEN.id,
        "model": QWEN.id,
        "modified_at": "2026-09-21T14:13:20Z",
        "size": 5_027_783_488,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "qwen3",
            "families": ["qwen3"],
            "parameter_size": "8.2B",
            "quantization_level": "Q4_K_M",
        },
    }


def test_only_a_model_that_serves_is_running() -> None:
    (model,) = ask(api(QWEN, SMALL), "/api/ps").json["models"]
    assert (model["name"], model["context_length"]) == (QWEN.id, 32768)
    assert not {"size_vram", "expires_at"} & set(model)  # nobody knows them


@pytest.mark.parametrize("name", ["qwen3:8b", "QWEN3:8B", QWEN.id, f"{QWEN.id}:latest"])
def test_a_model_is_shown_by_each_of_its_names(name: str) -> None:
    found = ask(api(QWEN, SMALL), "/api/show", {"model": name}).json
    assert found["capabilities"] == ["completion", "tools", "thinking", "vision"]
    assert found["model_info"] == {
        "general.architecture": "qwen3",
        "general.parameter_count": 8_190_735_360,
        "qwen3.context_length": 32768,
        "qwen3.embedding_length": 4096,
    }
    assert found["parameters"] == "num_ctx 32768"


def test_a_model_of_vectors_says_so() -> None:
    vectors = replace(QWEN, is_embedding=True)
    assert ask(api(vectors), "/api/show", {"name": QWEN.id}).json["capabilities"] == ["embedding"]
    scores = replace(vectors, is_reranker=True)
    assert ask(api(scores), "/api/show", {"name": QWEN.id}).json["capabilities"] == ["rerank"]


@pytest.mark.parametrize("path", ["/api/show", "/api/chat", "/api/generate", "/api/embed"])
def test_a_name_that_means_no_model(path: str) -> None:
    body = {"model": "nope:latest", "messages": [{"role": "user"}], "prompt": "a", "input": "a"}
    reply = ask(api(QWEN, SMALL), path, body)
    assert (reply.status, reply.json) == (404, {"error": "model 'nope:latest' not found"})
    reply = ask(api(QWEN, SMALL), path, {**body, "model": ""})
    assert (reply.status, reply.json) == (400, {"error": "model is required"})


# What is passed on


def test_the_endpoint_gets_a_request_of_our_own_api() -> None:
    seen: dict[str, Any] = {}

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope=scope, body=(await receive())["body"])
        await answering(200, EVENTS, b"data: [DONE]\n\n")(scope, lambda: asyncio.sleep(0), send)  # type: ignore[arg-type,return-value]

    ask(api(QWEN, SMALL, endpoint=endpoint), "/api/chat", {**HELLO, "model": "qwen3:8b:latest", "keep_alive": "5m"})
    headers = dict(seen["scope"]["headers"])
    assert json.loads(seen["body"]) == {
        "model": QWEN.id,
        "messages": HELLO["messages"],
        "keep_alive": "5m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert headers[b"content-length"] == b"%d" % len(seen["body"])
    assert headers[b"content-type"] == b"application/json"
    assert seen["scope"]["path"] == "/api/chat"  # which the log of requests shows
    assert WRITE_NOW not in seen["scope"]  # it would write events past the translation


def test_one_model_answers_any_name() -> None:
    document = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    endpoint = answering(200, [(b"content-type", b"application/json")], json.dumps(document).encode())
    reply = ask(api(endpoint=endpoint), "/api/chat", {**HELLO, "model": "gpt-4o", "stream": False})
    assert (reply.status, reply.json["model"], reply.json["message"]["content"]) == (200, "gpt-4o", "hi")
    assert reply.headers[b"content-type"] == b"application/json"


def test_an_engine_without_the_path() -> None:
    reply = ask(api(), "/api/embed", {"model": "m", "input": "a"})
    assert (reply.status, reply.json) == (501, {"error": "the engine of this appliance has no /v1/embeddings"})


def test_every_piece_of_a_stream_is_sent_as_it_comes() -> None:
    words = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(3)]
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    reply = ask(api(endpoint=answering(200, EVENTS, *words, end)), "/api/chat", HELLO)
    assert reply.headers == {b"content-type": b"application/x-ndjson", b"x-accel-buffering": b"no"}
    assert [piece.count(b"\n") for piece in reply.pieces] == [1, 1, 1, 1, 0]
    assert [line["done"] for line in reply.lines] == [False, False, False, True]


def test_an_error_keeps_its_status_and_its_headers() -> None:
    body = b'{"error":{"message":"the model is being loaded","type":"service_unavailable","code":"model_loading"}}'
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"2"), (b"x-appliance-error", b"model_loading")]
    reply = ask(api(endpoint=answering(503, headers, body)), "/api/chat", HELLO)
    assert (reply.status, reply.json) == (503, {"error": "the model is being loaded"})
    assert (reply.headers[b"retry-after"], reply.headers[b"x-appliance-error"]) == (b"2", b"model_loading")


def test_a_stream_that_failed_is_counted_as_failed() -> None:
    error = b'data: {"error":{"message":"the engine ended"}}\n\n'
    reply = ask(api(endpoint=answering(200, EVENTS, error, failed=True)), "/api/chat", HELLO)
    assert (reply.status, reply.json, reply.scope[FAILED]) == (200, {"error": "the engine ended"}, "502")
    reply = ask(api(endpoint=answering(200, EVENTS)), "/api/chat", HELLO)
    assert reply.scope[FAILED] == "502"


@pytest.mark.parametrize("headers", [EVENTS, [(b"content-type", b"application/json")]])
def test_an_answer_that_is_left_unfinished_is_an_error(headers: Any) -> None:
    reply = ask(api(endpoint=answering(200, headers, b'{"cho', ends=False)), "/api/chat", HELLO)
    assert reply.is_whole
    assert reply.lines[-1] == {"error": "the engine ended while it worked on this request"}


def test_an_answer_that_is_not_understood_is_502() -> None:
    endpoint = answering(200, [(b"content-type", b"application/json")], b"{}")
    reply = ask(api(endpoint=endpoint), "/api/chat", HELLO)
    assert (reply.status, reply.json) == (502, {"error": "the engine's answer is not understood"})


# keep_alive without a prompt


def test_loading_and_unloading_ask_the_fleet_and_no_engine() -> None:
    fleet = Recorded()
    app = api(QWEN, fleet=fleet)
    for body, reason in (({}, "load"), ({"keep_alive": "5m"}, "load"), ({"keep_alive": 0}, "unload")):
        for path, said in (
            ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
            ("/api/generate", {"response": ""}),
        ):
            found = ask(app, path, {"model": "qwen3:8b", **body}).json
            assert {**found, "created_at": ""} == {
                "model": "qwen3:8b",
                "created_at": "",
                **said,
                "done": True,
                "done_reason": reason,
            }
    loads: list[tuple[str, str | float | None]] = [("held", None)] * 2 + [("held", 300.0)] * 2
    assert fleet.heard == [*loads, ("unload", QWEN.id), ("unload", QWEN.id)]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_time_that_is_none_is_refused(path: str) -> None:
    reply = ask(api(QWEN, fleet=Recorded()), path, {"model": "qwen3:8b", "keep_alive": "soon"})
    assert reply.status == 400
    assert "keep_alive is no duration" in reply.json["error"]


def test_a_model_that_is_not_loaded_is_not_said_to_be() -> None:
    reply = ask(api(SMALL), "/api/generate", {"model": "small"})
    assert reply.status == 503
    assert set(reply.json) == {"error"}


# In the gateway


def test_what_changes_the_store_is_refused_in_one_sentence() -> None:
    app = create_app([backend(QWEN)], keys=None)
    asked = [(path, method) for path, (method,) in METHODS.items() if path[5:] in "pull push create copy delete"]
    assert len(asked) == 5
    for path, method in [*asked, ("/api/blobs/sha256:00", "POST")]:
        reply = ask(app, path, {}, method=method)
        assert reply.status == 501
        assert "`appliance models pull NAME`" in reply.json["error"]
    assert ask(app, "/api/blobs/sha256:00", method="HEAD").status == 501


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/api/chat", "ollama"),
        ("/api/blobs/sha256:1", "ollama"),
        ("/api/chat?a=b", "ollama"),
        ("/api/v0/models", "openai"),
        ("/api/chats", "openai"),
        ("/v1/models", "openai"),
        ("/v1/messages", "anthropic"),
    ],
)
def test_whose_form_an_error_has(path: str, dialect: str) -> None:
    assert dialect_of(path) == dialect


def test_the_gateways_own_refusals_have_ollamas_form() -> None:
    app = create_app([backend(QWEN)], keys=None)
    assert ask(app, "/api/chat", {}, method="PUT").json == {"error": "method not allowed: PUT /api/chat"}
    assert ask(app, "/api/chat", b"[]").json == {"error": "the body is not a JSON object"}


def test_a_start_imports_only_the_table_of_paths() -> None:
    code = "import sys, appliance.gateway.app; print(*sorted(name for name in sys.modules if 'ollama' in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["appliance.gateway.wire.ollama_paths"]
