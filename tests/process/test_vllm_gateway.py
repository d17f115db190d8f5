"""vLLM behind the gateway: streams that fail after their status was 200, and routes that do not exist outside."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from appliance.console.progress import Phase
from appliance.engines.vllm.api.client_errors import ERRORS
from appliance.engines.vllm.api.routes import ROUTES
from appliance.gateway.engine.backend import ListedModel
from tests.process.stages.gateway import KEY, Stage, eventually, on_stage, read_until

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
ENDLESS = {"model": "m", "messages": MESSAGES, "max_tokens": 10**6, "stream": True}
END = b"\r\n0\r\n\r\n"  # of a body in chunks
ANNOUNCED = re.compile(r"Route: (\S+), Methods: (.+)")


@pytest.fixture
def stage() -> Iterator[Stage]:
    with on_stage("fake_vllm.py", routes=ROUTES, errors=ERRORS) as stage:
        yield stage


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def kill_core(stage: Stage) -> None:
    assert stage.engine
    os.kill(child_of(stage.engine.pid), signal.SIGKILL)


def kill_worker(stage: Stage) -> None:
    assert stage.engine
    os.kill(child_of(child_of(stage.engine.pid)), signal.SIGKILL)


def counted(stage: Stage, route: str) -> dict[str, float]:
    """Return the number of POSTs to this route for each status, from /metrics."""
    text = stage.ask("GET", "/metrics").body.decode()
    pattern = rf'^appliance_requests_total{{method="POST",route="{route}",status="(\d+)"}} ([0-9.]+)$'
    return {status: float(count) for status, count in re.findall(pattern, text, re.MULTILINE)}


@pytest.mark.parametrize("kill", [kill_core, kill_worker])
def test_a_stream_that_fails_is_an_error_although_its_status_was_200(kill: Any, stage: Stage) -> None:
    with stage.post("/v1/chat/completions", ENDLESS) as connection:
        assert read_until(connection, b"word").startswith(b"HTTP/1.1 200 ")
        kill(stage)
        rest = read_until(connection, END)
    assert b"[DONE]" not in rest
    *_, last = [line for line in rest.split(b"\r\n") if line.startswith(b"data: ")]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_died"
    eventually(lambda: counted(stage, "/v1/chat/completions") == {"502": 1.0})


def test_the_sdk_raises_our_words_for_an_engine_that_died(stage: Stage) -> None:
    with stage.openai() as client:
        events = iter(client.chat.completions.create(**ENDLESS))
        next(events)
        kill_core(stage)
        with pytest.raises(openai.APIError, match="the engine ended while it worked on this request"):
            list(events)


def test_an_anthropic_stream_that_fails_is_told_in_its_own_words(stage: Stage) -> None:
    with stage.post("/v1/messages", ENDLESS) as connection:
        read_until(connection, b"word")
        kill_core(stage)
        rest = read_until(connection, END)
    (event,) = re.findall(rb"event: error\ndata: (.*)\n", rest)
    assert json.loads(event)["type"] == "error"
    eventually(lambda: counted(stage, "/v1/messages") == {"502": 1.0})


def test_a_stream_that_ends_well_is_counted_as_such(stage: Stage) -> None:
    body = stage.ask("POST", "/v1/chat/completions", {**ENDLESS, "max_tokens": 3}).body
    assert body.endswith(b"data: [DONE]\n\n")
    eventually(lambda: counted(stage, "/v1/chat/completions") == {"200": 1.0})


def test_no_route_that_the_engine_announces_exists_outside_but_the_safe_ones(stage: Stage) -> None:
    announced = [(path, method) for path, methods in ANNOUNCED.findall(stage.log.read_text())
                 for method in methods.split(", ")]  # fmt: skip
    assert len(announced) > 45
    safe, ours = {route.path for route in ROUTES}, {"/health", "/metrics", "/v1/models"}
    assert {"/v1/chat/completions", "/v1/messages", "/tokenize"} <= safe & {path for path, _ in announced}
    refused = [(path, method) for path, method in announced if path not in safe | ours]
    assert {("/invocations", "POST"), ("/scale_elastic_ep", "POST"), ("/collective_rpc", "POST")} <= set(refused)
    for path, method in refused:
        assert stage.ask(method, path, {} if method == "POST" else None).status == 404, path
    assert set(stage.engine_saw()["counts"]) <= {"GET /health"}  # none of them ever reached it


@pytest.mark.parametrize("path", ["//invocations", "/v1/../invocations", "/%69nvocations", "/v1/completions/render"])
def test_no_spelling_reaches_a_route_that_is_not_listed(path: str, stage: Stage) -> None:
    assert stage.ask("POST", path, {"model": "m", "prompt": "a"}).status == 404
    assert not [count for count in stage.engine_saw()["counts"] if "invocations" in count or "render" in count]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_every_name_means_the_one_model(path: str) -> None:
    """A client may use any name of the list, or its own default. The engine knows one name alone, and is sent that."""
    with on_stage("fake_vllm.py", routes=ROUTES, errors=ERRORS, checks_model_name=True) as stage:
        stage.listed = ListedModel(id="m", phase=Phase.READY, aliases=("demo", "demo:135m-bf16"))
        listed = stage.ask("GET", "/v1/models").json["data"][0]
        for name in (listed["id"], *listed["aliases"], "DEMO", "gpt-4o", 'a "b"'):
            body = {"model": name, "messages": MESSAGES, "input": "a", "prompt": "a", "max_tokens": 2}
            assert stage.ask("POST", path, body).status == 200, name


def test_a_client_that_leaves_ends_its_request_with_the_engine(stage: Stage) -> None:
    with stage.post("/v1/chat/completions", ENDLESS) as connection:
        read_until(connection, b"word")
        assert stage.engine_saw()["open_streams"] == 1
    eventually(lambda: stage.engine_saw()["open_streams"] == 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score"])
def test_what_only_an_embedder_answers_is_refused_for_a_model_that_gives_text(path: str, stage: Stage) -> None:
    answer = stage.ask("POST", path, {"model": "m", "input": "a"})
    assert (answer.status, answer.error["code"]) == (400, "model_gives_text")
    assert f"POST {path}" not in stage.engine_saw()["counts"]
    stage.listed = ListedModel(id="m", phase=Phase.READY, is_embedding=True)
    assert stage.ask("POST", path, {"model": "m", "input": "a"}).status == 404  # the engine's own answer, here


def test_ollamas_client_is_answered(stage: Stage) -> None:
    with ollama.Client(host=stage.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
        *parts, last = client.chat("m", MESSAGES, stream=True, options={"num_predict": 4})
        assert "".join(part.message.content or "" for part in parts) == "word word word word "
        assert (last.done, last.done_reason, last.eval_count) == (True, "length", 4)
        whole = client.chat("m", MESSAGES, options={"num_predict": 4})
        assert whole.message.content == "word word word word "
        running = client.chat("m", MESSAGES, stream=True, options={"num_predict": 10**6})
        next(running)
        kill_core(stage)
        with pytest.raises(ollama.ResponseError, match="the engine ended while it worked on this request"):
            list(running)
    eventually(lambda: counted(stage, "/api/chat") == {"200": 2.0, "502": 1.0})
