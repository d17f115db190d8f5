"""The client of vLLM against its socket: what an engine's own clock says, what was cached, what is thrown away."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from appliance.engines.engine import Completion
from appliance.engines.vllm.api.client import VllmClient, parse_completion, parse_likely
from appliance.errors import EngineNotReadyError
from appliance.supervisor import Supervisor
from tests.process.stages.vllm import vllm_command

PROMPT = list(range(100))
KNOBS = ("--enable-prompt-tokens-details", "--fake-decode-ms", "10", "--fake-prefill-ms", "2", "--block-size", "16")


def asked(socket_path: Path, ask: Callable[[VllmClient], Awaitable[Any]], *knobs: str) -> Any:
    async def live() -> Any:
        supervisor = Supervisor()
        command = vllm_command(socket_path, *KNOBS, *knobs)
        supervisor.start(command)
        try:
            assert await supervisor.wait_ready() is None
            async with VllmClient(command, doing="measuring") as client:
                return await ask(client)
        finally:
            await supervisor.stop()

    return asyncio.run(live())


def test_the_likely_tokens_are_told_by_their_numbers(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> dict[int, float]:
        return dict(await client.likely([1, 2, 3], 10))

    assert asked(socket_path, ask) == pytest.approx({0: math.log(0.9), 1: math.log(0.1)})


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"top_logprobs": []}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{"word": -1.0}]}}]},
    ],
)
def test_an_answer_without_probabilities_is_an_error(reply: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match="gave no probabilities of tokens"):
        parse_likely(reply)


def test_a_completion_is_timed_by_the_engines_own_clock_at_each_depth(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> list[Completion]:
        return [await client.complete(list(range(depth)), 5, uses_cache=False) for depth in (64, 512, 1024)]

    found = asked(socket_path, ask)
    for depth, each in zip((64, 512, 1024), found, strict=True):
        step_ms = 10 * (1 + depth / 2048)
        assert (each.read, each.cached, each.made, each.tokens) == (depth, 0, 5, tuple(range(depth, depth + 5)))
        assert each.prefill_ms == pytest.approx(2 * depth + step_ms)
        assert each.decode_ms == pytest.approx(4 * step_ms), "n tokens are n - 1 steps"


def test_what_is_cached_of_a_prompt_is_told_and_can_be_ruled_out(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> list[Completion]:
        return [await client.complete(PROMPT, 3, uses_cache=uses) for uses in (True, True, False)]

    found = asked(socket_path, ask)
    assert [each.cached for each in found] == [0, 96, 0], "whole blocks, and nothing of the one that was thrown away"
    assert [each.read for each in found] == [100, 4, 100]
    assert found[1].prefill_ms < found[0].prefill_ms


def test_the_first_answer_is_thrown_away_once_and_said_to_be_jit(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def ask(client: VllmClient) -> tuple[int, float | None]:
        before = client.jit_ms
        assert before is None
        for _ in range(2):
            await client.complete(PROMPT, 3)
        connector = aiohttp.UnixConnector(path=str(socket_path))
        ledger = "http://engine/fake/ledger"
        async with aiohttp.ClientSession(connector=connector) as session, session.get(ledger) as reply:
            document = json.loads(await reply.text())
        return document["counts"]["POST /v1/completions"], client.jit_ms

    count, jit_ms = asked(socket_path, ask)
    assert count == 1 + 1 + 2, "readiness, the one that is thrown away, and two that count"
    assert jit_ms
    assert jit_ms > 0
    (said,) = [words for words in caplog.messages if "thrown away" in words]
    assert said.endswith(f"(JIT); its first token took {jit_ms:.0f} ms")


def test_draft_tokens_are_counted(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> Completion:
        return await client.complete(PROMPT, 10)

    found = asked(socket_path, ask, "--speculative-config", '{"method":"ngram"}')
    assert (found.drafted, found.accepted) == (15, 5)


def test_text_is_tokenized_with_and_without_the_template(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> list[list[int]]:
        return [await client.tokenize("one three", as_chat=as_chat) for as_chat in (False, True)]

    assert asked(socket_path, ask) == [[3, 5], [1, 3, 5]]


def test_an_engine_that_refuses_is_43_with_its_words(socket_path: Path) -> None:
    async def ask(client: VllmClient) -> None:
        await client.post("/v1/nothing", {})

    with pytest.raises(EngineNotReadyError, match=r"engine refused /v1/nothing while measuring: 404") as caught:
        asked(socket_path, ask)
    assert caught.value.exit_code == 43


REPLY: dict[str, Any] = {
    "choices": [{"token_ids": [7]}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": None},
    "metrics": {"time_to_first_token_ms": 24.6, "generation_time_ms": 0.0, "speculative_decoding": None},
}


def test_fields_that_are_null_are_nothing() -> None:
    found = parse_completion(REPLY)
    assert (found.read, found.cached, found.drafted, found.tokens) == (4, 0, 0, (7,))


@pytest.mark.parametrize(
    "broken",
    [
        {**REPLY, "metrics": None},
        {**REPLY, "usage": {}},
        {**REPLY, "choices": []},
        {**REPLY, "metrics": {"time_to_first_token_ms": "soon", "generation_time_ms": 1}},
    ],
)
def test_an_answer_without_the_engines_clock_is_43(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineNotReadyError, match="engine gave no timings"):
        parse_completion(broken)
