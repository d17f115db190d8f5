"""What our own client takes from the real engine's replies, and that the engine warns of none of it.

Needs the engine: a folder with llama-server in APPLIANCE_ENGINE_DIR, or what `make integration` copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from appliance.command import Command
from appliance.engines.engine import Install
from appliance.engines.llama.api.client import parse_completion
from appliance.engines.llama.engine import ENGINE as LLAMA
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.server import command, is_worth_showing
from appliance.errors import EngineNotReadyError
from appliance.tune.trials.engine import running
from appliance.tune.trials.run_trial import Probe, plain_point_of
from benchmarks.memory import planned_for
from tests.process.stages.engine import find_engine, session_with
from tests.process.stages.supervisor import eventually
from tests.shapes import SMALL, write_gguf

WAIT_S = 60.0
DEPTH, TOKENS = 400, 48
NGRAMS = ("--spec-type", "ngram-mod")
DRAFTS = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")


@pytest.fixture(params=["gqa", "delta-net"])  # the second has states, which cannot go back to a shorter prompt
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", SMALL[request.param], with_data=True)


@pytest.fixture
def serving(model: Path, socket_path: Path) -> Command:
    binary = find_engine("llama-server")
    facts = query_facts(binary)
    plan = planned_for(facts, model, {"ctx_size": "4096", "threads": "1"})
    folder = socket_path.parent
    install = Install(engine_dir=binary.parent, facts=facts, cache_dir=folder, stall_timeout_s=WAIT_S)
    return command(plan, install, socket_path)


@asynccontextmanager
async def asking(serving: Command, *flags: str) -> AsyncIterator[tuple[Probe, list[str]]]:
    lines: list[str] = []
    told = replace(serving, argv=(*serving.argv, *flags))
    async with running(LLAMA, told, on_line=lines.append), LLAMA.client(told) as client:
        yield await Probe.of(client), lines


async def give_up(session: aiohttp.ClientSession) -> None:
    body = {"prompt": "ab" * 50, "n_predict": 4000, "ignore_eos": True, "stream": True}
    async with session.post("http://engine/completion", json=body) as reply:
        await reply.content.readany()


@pytest.mark.parametrize("model", ["gqa"], indirect=True)
async def test_a_prompt_that_is_cached_and_a_client_that_leaves_are_no_warnings_of_ours(serving: Command) -> None:
    """The engine warns of both; in words that this build is known to use."""
    async with asking(serving) as (probe, lines), session_with(serving) as session:
        for _ in range(2):
            await probe.complete(probe.prompt(100), 1)
        await give_up(session)
        await eventually(lambda: any("cancel task" in line for line in lines), timeout_s=WAIT_S)
        assert any(" W slot " in line and "need to evaluate at least 1 token" in line for line in lines)
        shown = [line for line in lines if " slot " in line or " stop: " in line]
        assert [line for line in shown if is_worth_showing(line)] == []


async def test_what_is_measured_again_reads_all_and_as_often_as_it_is_asked(serving: Command) -> None:
    async with asking(serving) as (probe, _):
        for _ in range(2):
            point = await probe.repeat(DEPTH, TOKENS, is_speculating=False)
            assert (point.depth, point.prefill_tokens) == (DEPTH, DEPTH)
            assert point.decode_ms > 0


@pytest.mark.parametrize(
    ("model", "flags"),
    [("gqa", NGRAMS), ("delta-net", NGRAMS), ("mla-with-drafts", DRAFTS)],
    indirect=["model"],
)
async def test_an_engine_that_guesses_is_timed_without_guesses(serving: Command, flags: tuple[str, ...]) -> None:
    """The answer is one letter over and over, which drafts can predict."""
    async with asking(serving, *flags) as (probe, _), session_with(serving) as session:
        body = {"prompt": probe.prompt(60), "n_predict": 200, "ignore_eos": True, "temperature": 0}
        async with session.post("http://engine/completion", json=body | {"logit_bias": [[98, 100.0]]}) as reply:
            found = parse_completion(await reply.json())
        assert found.drafted > 0
        with pytest.raises(EngineNotReadyError, match="draft tokens while plain decode steps"):
            plain_point_of(found, 60, 200)
        for _ in range(2):
            point = await probe.repeat(DEPTH, TOKENS, is_speculating=True)
            assert (point.depth, point.prefill_tokens) == (DEPTH, DEPTH)
            assert point.decode_ms > 0


async def test_a_probe_that_is_given_up_leaves_the_engine_at_rest(serving: Command) -> None:
    async with asking(serving) as (probe, lines):
        work = asyncio.create_task(probe.repeat(DEPTH, 3000, is_speculating=False))
        await eventually(lambda: any("new prompt" in line and f"= {DEPTH}" in line for line in lines), timeout_s=WAIT_S)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await eventually(lambda: lines[-1].endswith("all slots are idle"), timeout_s=WAIT_S)
        assert any("cancel task" in line for line in lines)
