"""Reasoning in every dialect, and MCP: what the table of docs/api.md says, through the real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving
from tests.process.stages.real import post, real_home
from tests.process.test_abilities import ledger
from tests.shapes import SMALL, write_gguf

ROOT = Path(__file__).parents[2]
SAID = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAID,
    "/v1/messages": SAID,
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"messages": SAID["messages"], "stream": False},
}


def table() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return the rows of the page: route, fields of the request, fields that the engine gets."""
    page = (ROOT / "docs/api.md").read_text()
    section = page.partition("## Reasoning\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| `(/[^`]+)` \| `(\{[^`]+\})` \| `(\{[^`]+\})` \|", section)
    return [(route, json.loads(asked), json.loads(gets)) for route, asked, gets in rows]


@pytest.fixture(scope="module")
def serving(tuned: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with tuned.copy(tmp_path_factory.mktemp("reasoning") / "home").serving() as serving:
        serving.wait_ready()
        yield serving


def test_every_dialect_is_in_the_table() -> None:
    assert {route for route, _, _ in table()} == {*BODIES}


@pytest.mark.parametrize(("route", "asked", "gets"), table())
def test_the_engine_gets_what_the_table_says(
    serving: Serving, route: str, asked: dict[str, Any], gets: dict[str, Any]
) -> None:
    status, answer = post(serving, route, {**BODIES[route], **asked})
    assert status == 200, answer
    got = json.loads(ledger(serving)["requests"][-1]["body"])
    assert {name: got.get(name) for name in gets} == gets
    # nothing more of it reaches the engine
    about = {"chat_template_kwargs", "reasoning_effort", "reasoning", "reasoning_budget_tokens"}
    assert about & got.keys() == about & gets.keys()


def test_what_a_client_says_itself_goes_first(serving: Serving) -> None:
    own = {"chat_template_kwargs": {"enable_thinking": True}, "thinking": {"type": "disabled"}}
    assert post(serving, "/v1/messages", {**SAID, **own})[0] == 200
    assert json.loads(ledger(serving)["requests"][-1]["body"]) == {**SAID, **own}


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/responses", {"tools": [{"type": "mcp", "server_label": "a", "server_url": "https://example.org"}]}),
        ("/v1/messages", {"mcp_servers": [{"type": "url", "url": "https://example.org", "name": "a"}]}),
        ("/v1/messages", {"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}),
        ("/v1/chat/completions", {"tools": [{"type": "mcp", "server_label": "a"}], "stream": True}),
    ],
)
def test_mcp_is_refused_with_what_to_do(serving: Serving, route: str, asked: dict[str, Any]) -> None:
    before = len(ledger(serving)["requests"])
    status, answer = post(serving, route, {**BODIES[route], **asked})
    assert status == 400
    assert answer["error"]["message"] == (
        "MCP servers are not called from here: connect to them in the client, and send their tools as functions in "
        "`tools`"
    )
    assert len(ledger(serving)["requests"]) == before


@pytest.mark.parametrize("asked", [{"mcp_servers": []}, {"metadata": {"user_id": '"mcp"'}}])
def test_a_request_without_mcp_is_answered(serving: Serving, asked: dict[str, Any]) -> None:
    assert post(serving, "/v1/messages", {**SAID, **asked})[0] == 200


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return a home with the real engine and a model whose template has a switch."""
    home = real_home(tmp_path_factory.mktemp("thinker") / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    return home


@pytest.mark.parametrize("thinking", ["auto", "on", "off"])
def test_the_switch_of_the_real_engine(thinker: Home, thinking: str) -> None:
    """Without reasoning Qwen3's template closes an empty one, which makes the prompt longer."""
    template = str(ROOT / "tests/data/templates/qwen3.jinja")
    settings = {"thinking": thinking, "chat_template_file": template, "ctx_size": "2048"}
    words = {None: {}, True: {"thinking": {"type": "adaptive"}}, False: {"thinking": {"type": "disabled"}}}
    with thinker.serving(**settings) as serving:
        serving.wait_ready()
        count = {}
        for is_on, said in words.items():
            status, answer = post(serving, "/v1/messages/count_tokens", {**SAID, **said})
            assert status == 200, answer
            count[is_on] = answer["input_tokens"]
        choices = serving.document("plan")["choices"]
    assert count[False] > count[True]
    assert count[None] == count[thinking != "off"]
    assert [choice["value"] for choice in choices if choice["name"] == "thinking"] == [thinking]


def test_a_model_without_reasoning_is_told(thinker: Home) -> None:
    choices = thinker.plan(thinking="on")["choices"]
    (choice,) = [each for each in choices if each["name"] == "thinking"]
    assert choice["is_refusal"]
    assert choice["reason"] == "without effect: its chat template has no reasoning"
