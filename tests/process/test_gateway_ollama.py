"""Ollama's API as its own Python client sees it, in front of a fake engine program."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import ollama
import pytest

from appliance.console.progress import Phase, Progress
from appliance.gateway.engine.backend import ListedModel
from appliance.gateway.routes.forward import BODY_BYTES_MAX
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_all, read_until

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
CHAT = {"model": "small", "messages": MESSAGES}
SCHEMA: Any = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nrest").decode()


def client_of(stage: Stage, key: str = KEY) -> ollama.Client:
    return ollama.Client(host=stage.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--chunks", "6", "--chunk-interval", "0.01") as stage:
        yield stage


@pytest.fixture
def client(stage: Stage) -> Iterator[ollama.Client]:
    with client_of(stage) as client:
        yield client


@pytest.fixture
def endless() -> Iterator[Stage]:
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.02") as stage:
        yield stage


def engine_got(stage: Stage) -> Any:
    """The body of the last request that the engine was sent."""
    return json.loads(stage.engine_saw()["requests"][-1]["body"])


# What it shows


def test_it_lists_and_shows_the_model(stage: Stage, client: ollama.Client) -> None:
    stage.listed = ListedModel(
        id="small", phase=Phase.READY, created_s=1_790_000_000, context=4096, size_bytes=100_000_000, format="gguf",
        architecture="qwen3", quantization="Q8_0", parameters=600_000_000, calls_tools=True,
    )  # fmt: skip
    try:
        (model,) = client.list().models
        assert (model.model, model.size) == ("small", 100_000_000)
        assert model.modified_at is not None
        assert model.details is not None
        assert (model.details.parameter_size, model.details.quantization_level) == ("0.6B", "Q8_0")
        (running,) = client.ps().models
        assert (running.name, running.context_length) == ("small", 4096)
        shown = client.show("small:latest")
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo is not None
        assert shown.modelinfo["qwen3.context_length"] == 4096
        with pytest.raises(ollama.ResponseError, match="model 'large' not found") as caught:
            client.show("large")
        assert caught.value.status_code == 404
    finally:
        stage.listed = None


def test_its_version_is_that_of_ollamas_api(stage: Stage) -> None:
    assert stage.ask("GET", "/api/version").json == {"version": "0.12.11"}


# Answers


def test_the_client_chats(stage: Stage, client: ollama.Client) -> None:
    reply = client.chat("small", MESSAGES)
    assert (reply.message.content, reply.done, reply.done_reason) == ("one two three", True, "stop")
    assert (reply.prompt_eval_count, reply.eval_count) == (3, 3)
    assert (reply.prompt_eval_duration, reply.eval_duration) == (12_000_000, 30_000_000)
    assert reply.total_duration
    assert engine_got(stage) == {"model": "small", "messages": MESSAGES}


def test_the_client_streams(stage: Stage, client: ollama.Client) -> None:
    *parts, last = client.chat("small", MESSAGES, stream=True)
    assert [part.message.content for part in parts] == ["one ", "two ", "three "] * 2
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content, last.eval_count) == (True, "stop", "", 6)
    assert engine_got(stage)["stream_options"] == {"include_usage": True}


async def test_the_asynchronous_client_streams(stage: Stage) -> None:
    client = ollama.AsyncClient(host=stage.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    async with client:
        parts = [part async for part in await client.generate("small", "one two", stream=True)]
    assert "".join(part.response or "" for part in parts) == "one two " * 3
    assert parts[-1].done_reason == "stop"


def test_lines_pass_as_they_arrive(tmp_path: Path) -> None:
    """The engine ends the stream only after the client has had a part of it."""
    enough = tmp_path / "enough"
    with (
        on_stage("fake_engine.py", "--until", str(enough), "--chunk-interval", "0.02") as stage,
        client_of(stage) as client,
    ):
        parts = client.chat("small", MESSAGES, stream=True)
        first = next(parts)
        assert (first.message.content, first.done) == ("one ", False)
        enough.touch()
        *_, last = parts
    assert last.done


def test_what_the_engine_is_asked(stage: Stage, client: ollama.Client) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "num_predict": 3, "stop": ["."], "num_ctx": 9}
    client.chat("small", MESSAGES, format=SCHEMA, think=False, options=options, keep_alive="5m")
    assert engine_got(stage) == {
        "model": "small",
        "messages": MESSAGES,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 7,
        "max_tokens": 3,
        "stop": ["."],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    }
    client.generate("small", "what is it?", images=[base64.b64decode(PIXEL)], system="be brief", format="json")
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert engine_got(stage) == {
        "model": "small",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, picture]},
        ],
        "response_format": {"type": "json_object"},
    }


def test_generating_raw_and_by_the_template(stage: Stage, client: ollama.Client) -> None:
    for raw, path in ((True, "/v1/completions"), (False, "/v1/chat/completions")):
        assert client.generate("small", "one two", raw=raw).response == "one two"
        assert stage.engine_saw()["requests"][-1]["path"] == path
        parts = list(client.generate("small", "one two", raw=raw, stream=True))
        assert "".join(part.response or "" for part in parts) == "one two " * 3
        assert parts[-1].done


def test_vectors(client: ollama.Client) -> None:
    assert client.embed("small", "a").embeddings == [[0.0, 1.0]]
    assert client.embeddings("small", "a").embedding == [0.0, 1.0]


SAID: Any = {
    "whole": {
        "choices": [
            {
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
                    ],
                },
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 8},
    },
    "events": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
        *(
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]}
            for call in (
                {"id": "a", "type": "function", "function": {"name": "add", "arguments": ""}},
                {"function": {"arguments": '{"a":1,'}},
                {"function": {"arguments": '"b":2}'}},
            )
        ),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 8}},
    ],
}


def test_the_client_gets_thoughts_and_calls_of_its_functions(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    said = tmp_path / "said.json"
    said.write_text(json.dumps(SAID))
    with on_stage("fake_engine.py", "--says", str(said)) as stage, client_of(stage) as client:
        reply = client.chat("small", MESSAGES, tools=[add], think=True)
        thought, called, last = client.chat("small", MESSAGES, tools=[add], stream=True)
        for message in (reply.message, called.message):
            assert message.tool_calls is not None
            (call,) = message.tool_calls
            assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
        assert (reply.message.thinking, thought.message.thinking) == ("hm", "hm")
        assert (last.done, last.done_reason, last.prompt_eval_count, last.eval_count) == (True, "stop", 9, 8)
        result = {"role": "tool", "content": "3", "tool_name": "add"}
        client.chat("small", [*MESSAGES, reply.message, result], tools=[add])
        _, asked, answered = engine_got(stage)["messages"]
        assert asked["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1,"b":2}'}
        assert answered["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_loading_and_unloading_ask_no_engine(stage: Stage, client: ollama.Client) -> None:
    before = len(stage.engine_saw()["requests"])
    assert client.generate("small").done_reason == "load"
    assert client.generate("small", keep_alive=0).done_reason == "unload"
    assert client.chat("small", []).done_reason == "load"
    assert len(stage.engine_saw()["requests"]) == before
    stage.progress = Progress(phase=Phase.LOADING)
    try:
        with pytest.raises(ollama.ResponseError) as caught:
            client.generate("small")
        assert caught.value.status_code == 503
    finally:
        stage.progress = Progress(phase=Phase.READY)


# What goes wrong


def test_what_changes_the_store_is_refused(client: ollama.Client, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"x")
    for change in (
        lambda: client.pull("qwen3"),
        lambda: client.push("qwen3"),
        lambda: client.create("mine", from_="qwen3"),
        lambda: client.copy("a", "b"),
        lambda: client.delete("qwen3"),
        lambda: client.create_blob(blob),
        lambda: list(client.pull("qwen3", stream=True)),
    ):
        with pytest.raises(ollama.ResponseError, match="`appliance models pull NAME`") as caught:
            change()
        assert caught.value.status_code == 501


def test_a_wrong_key_is_told_in_the_clients_form(stage: Stage) -> None:
    with client_of(stage, "sk-wrong") as client:
        for ask in (client.list, lambda: client.chat("small", MESSAGES), lambda: client.pull("x")):
            with pytest.raises(ollama.ResponseError, match="a valid API key is required") as caught:
                ask()
            assert caught.value.status_code == 401


def test_the_clients_own_variable_for_the_key_works(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_KEY", KEY)
    with ollama.Client(host=stage.url, timeout=60) as client:
        assert client.list().models


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/show"])
def test_a_hostile_body_is_refused_in_the_clients_form(stage: Stage, path: str) -> None:
    hostile = (b"", b"{", b"[1]", b"\xff\xfe", b'{"model": {}}', b"[" * 100_000, b'{"a":' * 100_000)
    for body in hostile:
        answer = stage.ask("POST", path, body)
        assert (answer.status, list(answer.json)) == (400, ["error"]), body[:20]
    answer = stage.ask("POST", path, b'{"a":[' + b"[]," * 3_000_000 + b"[]]}")
    assert (answer.status, list(answer.json)) == (400, ["error"])


def test_a_body_that_is_too_large_is_refused_before_it_is_read(stage: Stage) -> None:
    head = f"POST /api/chat HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    with stage.raw(f"{head}Content-Length: {BODY_BYTES_MAX + 1}\r\n\r\n".encode()) as connection:
        received = read_until(connection, b"MiB")
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":"the request body is over the limit of 64 MiB' in received


def test_an_image_of_many_megabytes_passes(stage: Stage, client: ollama.Client) -> None:
    image = base64.b64encode(b"\xff\xd8\xff" + bytes(24 * 2**20)).decode()
    reply = client.chat("small", [{"role": "user", "content": "what is it?", "images": [image]}])
    assert reply.message.content is not None
    assert reply.message.content.startswith("what is it?")


def test_when_the_client_leaves_the_engine_is_free(endless: Stage) -> None:
    def saw(name: str) -> int:
        return int(endless.engine_saw()[name])

    with (
        client_of(endless) as client,
        closing(cast("Generator[Any, None, None]", client.chat("small", MESSAGES, stream=True))) as parts,
    ):
        next(parts)
        assert saw("open_streams") == 1
    assert eventually(lambda: saw("open_streams") == 0) < 30
    assert saw("disconnects") == 1
    assert (
        b'requests_finished_total{ending="client_left",model_name="small"} 1.0' in endless.ask("GET", "/metrics").body
    )


def test_when_the_client_leaves_before_the_answer_the_engine_is_free() -> None:
    with on_stage("fake_engine.py", "--works-s", "inf", "--sleeps") as stage:
        connection = stage.post("/api/chat", {**CHAT, "stream": False})
        eventually(lambda: stage.engine_saw()["counts"].get("POST /v1/chat/completions") == 1)
        connection.close()
        eventually(lambda: stage.engine_saw()["disconnects"] == 1)
        eventually(lambda: b'route="/api/chat",status="499"' in stage.ask("GET", "/metrics").body)


def test_when_the_engine_dies_the_stream_ends_with_an_error() -> None:
    with on_stage("fake_engine.py", "--die-on-request", "2") as stage, client_of(stage) as client:
        parts = client.chat("small", MESSAGES, stream=True)
        assert [next(parts).message.content for _ in range(2)] == ["one ", "two "]
        with pytest.raises(ollama.ResponseError, match="the engine ended while it worked on this request"):
            next(parts)


def test_a_refusal_of_the_engine_keeps_its_status() -> None:
    with on_stage() as stage, client_of(stage) as client:  # no engine at all
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match="the engine cannot be reached") as caught:
                list(client.chat("small", MESSAGES, stream=stream))
            assert caught.value.status_code == 503


def test_the_client_streams_through_a_hold(stage: Stage) -> None:
    """While requests wait, the client gets empty parts."""
    texts: list[str] = []
    stage.progress = Progress(phase=Phase.HELD, message="the model is being loaded")

    def chat() -> None:
        with client_of(stage) as client:
            texts.extend(part.message.content or "" for part in client.chat("small", MESSAGES, stream=True))

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        eventually(lambda: len(texts) >= 2)
    finally:
        stage.progress = Progress(phase=Phase.READY)
        thread.join(60)
    assert texts[:2] == ["", ""]
    assert "".join(texts) == "one two three one two three "


def test_when_the_appliance_stops_the_stream_says_so() -> None:
    with on_stage("fake_engine.py", "--chunks", "100000", "--chunk-interval", "0.02") as stage:
        with stage.post("/api/chat", CHAT) as connection:
            received = read_until(connection, b"one")
            stage.drain(0.1)
            received += read_all(connection)
        assert b'{"error":"the appliance is stopping"}\n' in received
        assert received.endswith(b"0\r\n\r\n")


def test_a_client_that_reads_late_holds_the_engine_up_and_loses_nothing(tmp_path: Path) -> None:
    """16 MB are more than the sockets on the way hold."""
    count, text = 4096, "x" * 4000
    choices = [{"index": 0, "delta": {"content": f"{number} {text}"}} for number in range(count)]
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    said = tmp_path / "said.json"
    said.write_text(json.dumps({"events": [{"choices": [choice]} for choice in [*choices, end]]}))
    with on_stage("fake_engine.py", "--says", str(said)) as stage:
        with stage.post("/api/chat", CHAT) as connection:
            received = read_until(connection, b"x")
            for _ in range(100):  # the gateway has turns enough to take all, if it would
                assert stage.ask("GET", "/api/version").status == 200
            assert stage.engine_saw()["finished_streams"] == 0
            pieces = [received]
            while not pieces[-1].endswith(b"0\r\n\r\n"):
                pieces.append(connection.recv(2**20))
        eventually(lambda: stage.engine_saw()["finished_streams"] == 1)
    numbers = [int(found) for found in re.findall(rb'"content":"(\d+) x', b"".join(pieces))]
    assert numbers == list(range(count))
