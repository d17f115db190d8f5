"""Receipts of the real engine's answers, as the openai and anthropic SDKs read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.process.stages.boot import Serving
from tests.process.stages.real import post, real_home
from tests.shapes import SMALL, write_gguf

HEADER = {"X-Appliance-Receipt": "1"}
MESSAGES: Any = [{"role": "user", "content": "Tell me about the sea."}]
FIELDS = {
    "plan",
    "tokens_per_s",
    "profile_tokens_per_s",
    "depth",
    "seconds",
    "profile_seconds",
    "tokens_cached",
    "tokens_from_disk",
    "waited_s",
    "waited_for",
    "joules",
    "slowed_by",
}
CHAT: Any = {"model": "any", "messages": MESSAGES, "max_tokens": 8}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home = real_home(tmp_path_factory.mktemp("receipts") / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    done = home.command("tune", budget_s="5", ctx_size="2048", parallel="1")
    assert done.returncode == 0, done.stderr
    home.calm()
    with home.serving(ctx_size="2048", parallel="1") as serving:
        serving.wait_ready()
        yield serving


@pytest.fixture
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key=serving.home.key, max_retries=0)


@pytest.fixture
def claude(serving: Serving) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{serving.port}", api_key=serving.home.key, max_retries=0)


def checked(usage: Any) -> dict[str, Any]:
    """Return the receipt in an SDK's usage."""
    receipt: dict[str, Any] = usage.model_dump()["appliance"]
    assert receipt.keys() == FIELDS
    assert receipt["plan"].startswith("context 2,048, ")
    assert receipt["profile_tokens_per_s"] > 0
    assert receipt["seconds"] > 0
    return receipt


def test_a_whole_chat(serving: Serving, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, extra_headers=HEADER)
    assert answer.usage is not None
    receipt = checked(answer.usage)
    assert receipt["tokens_per_s"] > 0
    assert receipt["depth"] >= answer.usage.prompt_tokens
    again = client.chat.completions.create(**CHAT, extra_headers=HEADER)
    assert again.usage is not None
    assert checked(again.usage)["tokens_cached"] > 0
    assert answer.choices[0].message.content is not None


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_streamed_chat_has_it_in_its_last_chunk(client: openai.OpenAI, options: dict[str, Any]) -> None:
    *others, last = client.chat.completions.create(**CHAT, stream=True, extra_headers=HEADER, **options)
    assert last.choices == []
    receipt = checked(last.usage)
    assert receipt["tokens_per_s"] > 0
    assert last.usage.completion_tokens == 8
    assert (last.id, last.model, last.object) == (others[-1].id, others[-1].model, "chat.completion.chunk")
    assert not any("appliance" in (each.usage.model_dump() if each.usage else {}) for each in others)


def test_completions(client: openai.OpenAI) -> None:
    options: Any = {"model": "any", "prompt": "The sea", "max_tokens": 8, "extra_headers": HEADER}
    checked(client.completions.create(**options).usage)
    *_, last = client.completions.create(**options, stream=True)
    checked(last.usage)


def test_responses(client: openai.OpenAI) -> None:
    options: Any = {"model": "any", "input": "hello", "max_output_tokens": 8, "extra_headers": HEADER}
    checked(client.responses.create(**options).usage)
    *_, last = client.responses.create(**options, stream=True)
    checked(last.response.usage)
    assert last.response.output


def test_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="any", max_tokens=8, messages=MESSAGES, extra_headers=HEADER)
    checked(answer.usage)
    with claude.messages.stream(model="any", max_tokens=8, messages=MESSAGES, extra_headers=HEADER) as stream:
        usages = [event.usage for event in stream if event.type == "message_delta"]
    checked(usages[-1])
    assert stream.get_final_message().usage.output_tokens == 8


def test_nobody_gets_one_who_does_not_ask(serving: Serving, client: openai.OpenAI) -> None:
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": "any", "input": "hi", "max_output_tokens": 4}),
    ):
        status, answer = post(serving, path, body)
        assert status == 200
        assert "appliance" not in answer["usage"]
    *_, last = client.chat.completions.create(**CHAT, stream=True, extra_headers={"X-Appliance-Receipt": "0"})
    assert last.usage is None


def test_other_routes_know_no_receipt(serving: Serving, client: openai.OpenAI) -> None:
    counted = client.post("/messages/count_tokens", body=CHAT, cast_to=object, options={"headers": HEADER})
    assert "appliance" not in json.dumps(counted)


@pytest.mark.parametrize(("receipts", "has_one"), [("always", True), ("off", False)])
def test_the_setting_counts(serving: Serving, receipts: str, has_one: bool) -> None:
    home = serving.home
    with home.serving(ctx_size="2048", parallel="1", receipts=receipts) as other:
        other.wait_ready()
        status, answer = post(other, "/v1/chat/completions", CHAT)
        assert (status, "appliance" in answer["usage"]) == (200, has_one)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{other.port}/v1", api_key=home.key, max_retries=0)
        asked = client.chat.completions.create(**CHAT, extra_headers=HEADER)
        assert asked.usage is not None
        assert ("appliance" in asked.usage.model_dump()) == has_one
        other.terminate()
