"""What the real engine's log says of its requests against the `timings` of its own replies.

Needs the engine: a folder with llama-server in APPLIANCE_ENGINE_DIR, or what `make integration` copied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_stage import find_engine

from appliance.engines.llama.facts import query_facts
from appliance.engines.llama.server import command, is_worth_showing
from appliance.engines.llama_timings import Served, TimingsReader
from appliance.supervisor import Supervisor
from benchmarks.memory import planned_for
from tests.shapes import SMALL, write_gguf

WAIT_S = 60.0
Timings = dict[str, float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "small.gguf", SMALL["gqa"], with_data=True)


class Stage:
    """A running engine, its requests as they were answered and as its log tells them."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.reader = TimingsReader()
        self.lines: list[str] = []
        self.served: list[Served] = []

    def on_line(self, line: str) -> None:
        self.lines.append(line)
        if (served := self.reader.read(line)) is not None:
            self.served.append(served)

    async def ask(self, prompt: list[int], tokens: int = 40, **more: object) -> Timings:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, **more}
        async with self._session.post("http://engine/completion", json=body) as reply:
            assert reply.status == 200, await reply.text()
            timings: Timings = (await reply.json())["timings"]
            return timings

    async def give_up(self, prompt: list[int]) -> None:
        body = {"prompt": prompt, "n_predict": 4000, "ignore_eos": True, "stream": True}
        async with self._session.post("http://engine/completion", json=body) as reply:
            await reply.content.readany()

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, self.served
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(model: Path, folder: Path, *flags: str) -> AsyncIterator[Stage]:
    binary = find_engine("llama-server")
    facts = query_facts(binary)
    plan = planned_for(facts, model, {"ctx_size": "4096", "threads": "1"})
    started = command(
        plan, facts, engine_dir=binary.parent, socket_path=folder / "e.sock", cache_dir=folder, stall_timeout_s=WAIT_S
    )
    connector = aiohttp.UnixConnector(path=str(started.socket_path))
    async with aiohttp.ClientSession(connector=connector) as session:
        stage = Stage(session)
        supervisor = Supervisor(on_line=stage.on_line)
        supervisor.start(replace(started, argv=(*started.argv, *flags)))
        try:
            assert await supervisor.wait_ready() is None, supervisor.log_tail
            yield stage
        finally:
            await supervisor.stop()


def on_stage(model: Path, socket_path: Path, play: Callable[[Stage], Awaitable[None]], *flags: str) -> None:
    async def run() -> None:
        async with running(model, socket_path.parent, *flags) as stage:
            await play(stage)

    asyncio.run(run())


def assert_same(served: Served, timings: Timings) -> None:
    """The log has two decimals of a millisecond."""
    assert (served.cached_tokens, served.prompt_tokens) == (timings["cache_n"], timings["prompt_n"])
    assert served.decode_tokens == timings["predicted_n"]
    assert served.prefill_ms == pytest.approx(timings["prompt_ms"], abs=0.006)
    assert served.decode_ms == pytest.approx(timings["predicted_ms"], abs=0.006)
    assert served.drafted_tokens == timings.get("draft_n", 0)
    assert served.accepted_tokens == timings.get("draft_n_accepted", 0)


def prompt(length: int, begin: int = 0) -> list[int]:
    return [97 + (begin + at * at) % 26 for at in range(length)]


def test_requests_of_three_depths_are_told_as_they_were_answered(model: Path, socket_path: Path) -> None:
    async def play(stage: Stage) -> None:
        replies = [await stage.ask(prompt(length)) for length in (50, 400, 900)]
        replies.append(await stage.ask(prompt(300, 1)))
        await stage.until(lambda: len(stage.served) == 4)
        for served, timings in zip(stage.served, replies, strict=True):
            assert_same(served, timings)
            assert served.was_alone
        assert [served.depth_before for served in stage.served] == [50, 400, 900, 300]
        assert stage.served[2].cached_tokens >= 300
        assert not stage.reader.is_busy

    on_stage(model, socket_path, play)


def test_of_two_at_once_neither_was_alone_and_one_that_was_given_up_is_none(model: Path, socket_path: Path) -> None:
    async def play(stage: Stage) -> None:
        await stage.give_up(prompt(100))
        await stage.until(lambda: not stage.reader.is_busy)
        assert stage.served == []
        replies = await asyncio.gather(stage.ask(prompt(400), 100), stage.ask(prompt(500, 3), 100))
        replies.append(await stage.ask(prompt(60, 5)))
        await stage.until(lambda: len(stage.served) == 3)
        told = {served.depth_before: served for served in stage.served}
        for depth, timings in zip((400, 500, 60), replies, strict=True):
            assert_same(told[depth], timings)
        assert {depth for depth, served in told.items() if served.was_alone} == {60}

    on_stage(model, socket_path, play)


def test_a_prompt_that_is_cached_and_a_client_that_leaves_are_no_warnings_of_ours(
    model: Path, socket_path: Path
) -> None:
    """The engine warns of both; in words that this build is known to use."""

    async def play(stage: Stage) -> None:
        for _ in range(2):
            await stage.ask(prompt(100))
        await stage.give_up(prompt(100))
        await stage.until(lambda: any("cancel task" in line for line in stage.lines))
        assert any(" W slot " in line and "need to evaluate at least 1 token" in line for line in stage.lines)
        shown = [line for line in stage.lines if " slot " in line or " stop: " in line]
        assert [line for line in shown if is_worth_showing(line)] == []

    on_stage(model, socket_path, play)


def test_guessed_tokens_are_told_as_they_were_answered(model: Path, socket_path: Path) -> None:
    """The answer is one letter over and over, which can be guessed."""

    async def play(stage: Stage) -> None:
        timings = await stage.ask(prompt(60), 200, logit_bias=[[98, 100.0]])
        await stage.until(lambda: len(stage.served) == 1)
        assert_same(stage.served[0], timings)
        assert stage.served[0].accepted_tokens > 0
        assert 0 < stage.served[0].decode_steps < 199

    on_stage(model, socket_path, play, "--spec-type", "ngram-mod")
