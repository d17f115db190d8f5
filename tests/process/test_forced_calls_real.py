"""A forced tool call is a call of that tool, whatever the model would have said: the real engine with the chat template
of each recipe and of notations with parsers of their own, and random weights, which say nothing by themselves."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.process.stages.engine import find_engine, plain_environment
from tests.shapes import SMALL, write_gguf

TEMPLATES = Path(__file__).parents[1] / "data/templates"
WITH_TOOLS = (
    "qwen3", "qwen3.5", "gemma-4", "gpt-oss", "glm-4.6", "kimi-k2", "kimi-k3", "deepseek-v3.2", "lfm2.5", "ling-3",
    "minicpm5", "demo-with-tools",
)  # fmt: skip
WITHOUT_TOOLS = ("demo", "gemma-2")
TOKENS = 400  # a byte each
SEEDS = range(6)  # until one ends before its tokens do: random weights may begin thoughts, which they never end


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("set_level", level={"type": "integer"}, mode={"type": "string", "enum": ["on", "off"]}), tool("stop")]
NAMED = {"type": "function", "function": {"name": "set_level"}}


@dataclass(frozen=True)
class Engine:
    port: int

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, json.dumps(body).encode())
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except ConnectionError:
            return False
        finally:
            connection.close()


@contextmanager
def serving(model: Path, template: str) -> Iterator[Engine]:
    binary, port = find_engine("llama-server"), free_port()
    words = ["--model", str(model), "--port", str(port), "--chat-template-file", str(TEMPLATES / f"{template}.jinja")]
    words += ["--ctx-size", "8192", "--parallel", "1", "--threads", "1", "--jinja", "--no-warmup", "--fit", "off"]
    log = model.with_name(f"{template}.log")
    with log.open("wb") as file:
        environment = plain_environment(binary)
        process = subprocess.Popen([binary, *words], stdout=file, stderr=file, env=environment)
    try:
        engine, deadline = Engine(port), time.monotonic() + 180
        while not engine.is_healthy():
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.02)
        yield engine
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "m.gguf"
    return write_gguf(path, SMALL["gqa"], quantization="Q8_0", with_data=True)


@pytest.fixture(scope="module", params=WITH_TOOLS)
def able(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with serving(model, request.param) as engine:
        yield engine


@pytest.fixture(scope="module", params=WITHOUT_TOOLS)
def unable(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with serving(model, request.param) as engine:
        yield engine


def asked(choice: Any, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "a"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": TOKENS,
        "seed": seed,
        "reasoning_budget_tokens": 0,
        "chat_template_kwargs": {"enable_thinking": False},
        **more,
    }


def check(calls: list[dict[str, Any]], choice: Any) -> None:
    assert calls
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
        assert name == "set_level" or (choice == "required" and name == "stop")
        if name == "stop":
            assert arguments == {}
        else:
            assert arguments.keys() == {"level", "mode"}
            assert isinstance(arguments["level"], int)
            assert arguments["mode"] in ("on", "off")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_is_one(able: Engine, choice: Any) -> None:
    for seed in SEEDS:
        status, body = able.post("/v1/chat/completions", asked(choice, seed))
        assert status == 200, body
        [answer] = json.loads(body)["choices"]
        assert not answer["message"].get("content"), answer
        if answer["finish_reason"] != "length":
            assert answer["finish_reason"] == "tool_calls", answer
            return check(answer["message"]["tool_calls"], choice)
    pytest.fail("no answer came to its end")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_streamed_one_is_too(able: Engine, choice: Any) -> None:
    for seed in SEEDS:
        status, body = able.post("/v1/chat/completions", asked(choice, seed, stream=True))
        assert status == 200, body
        lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: {")]
        chunks = [json.loads(line)["choices"][0] for line in lines if json.loads(line).get("choices")]
        calls: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            assert not chunk["delta"].get("content"), chunk
            for call in chunk["delta"].get("tool_calls", []):
                whole = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
                for key, text in call["function"].items():
                    whole["function"][key] += text
        if chunks[-1]["finish_reason"] != "length":
            return check([*calls.values()], choice)
    pytest.fail("no answer came to its end")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_template_without_tools_says_so(unable: Engine, choice: Any, is_stream: bool) -> None:
    status, body = unable.post("/v1/chat/completions", asked(choice, 0, stream=is_stream))
    assert status == 400
    assert "chat template of this model has no form of tool calls" in json.loads(body)["error"]["message"]


def test_a_template_without_tools_takes_them_all_the_same(unable: Engine) -> None:
    """`auto` promises no call: such a template may ignore the tools."""
    status, body = unable.post("/v1/chat/completions", asked("auto", 0, max_tokens=4))
    assert status == 200, body


def test_a_budget_of_none_ends_reasoning_at_once(model: Path) -> None:
    """The prompt of DeepSeek R1 goes on after the start tag, by a line: the end tag is forced after it, whole."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "temperature": 0}
    with serving(model, "deepseek-r1") as engine:
        status, answer = engine.post("/v1/chat/completions", {**body, "reasoning_budget_tokens": 0})
    assert status == 200, answer
    message = json.loads(answer)["choices"][0]["message"]
    assert message["content"]
    assert not (message.get("reasoning_content") or "").strip()
