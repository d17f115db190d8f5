"""The real llama-server behind the gateway: a held stream, and a change under a stream, through the openai SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.command import Command
from appliance.console.progress import Phase
from appliance.supervisor import Supervisor
from tests.process.stages.engine import find_engine, find_model
from tests.process.stages.idle import FakePlan, IdleStage, idle_stage, running
from tests.process.stages.supervisor import eventually, is_alive, is_healthy

MESSAGES: Any = [{"role": "user", "content": "Count from one to twenty."}]
NO_ROOM = "memory holds no second engine"
PREDICTED = FakePlan(knobs=("--alias", "predicted", "--ctx-size", "1024", "--threads", "1"))
BEST = FakePlan(knobs=("--alias", "best", "--ctx-size", "2048", "--threads", "2"))


def real_command(plan: FakePlan, socket_path: Path) -> Command:
    engine, model = find_engine("llama-server"), find_model()
    return Command(
        argv=(str(engine), "--host", str(socket_path), "--model", str(model), *plan.knobs),
        environment={"PATH": "/usr/bin:/bin", "HOME": "/tmp"},
        is_ready=lambda: is_healthy(socket_path),
        socket_path=socket_path,
    )


@pytest.fixture
async def stage() -> AsyncIterator[IdleStage]:
    async with idle_stage(PREDICTED, command=real_command) as stage:
        yield stage


async def chat(stage: IdleStage, tokens: int = 24) -> tuple[str, int, str | None]:
    """Return a streamed chat's model name, number of chunks with text, and finish reason."""
    async with stage.openai() as client:
        events = await client.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, max_tokens=tokens, temperature=0
        )
        seen = [event async for event in events]
    chunks = sum(bool(event.choices[0].delta.content) for event in seen)
    return seen[0].model, chunks, seen[-1].choices[0].finish_reason


async def measure_for_ever(stage: IdleStage, pids: list[int]) -> None:
    supervisor = Supervisor()
    command = real_command(PREDICTED, stage.folder / "m.sock")
    supervisor.start(Command(**{**vars(command), "stop_grace_s": 0.0}))
    pids.append(supervisor.pid or 0)
    try:
        await asyncio.Event().wait()
    finally:
        await supervisor.stop()


async def test_the_sdk_streams_through_a_hold(stage: IdleStage) -> None:
    pids: list[int] = []

    async def measure(_: bool) -> FakePlan | None:
        await measure_for_ever(stage, pids)
        return None

    async with running(stage.tuner(measure, why_no_room=NO_ROOM)):
        await eventually(lambda: bool(pids))
        assert stage.report.progress.phase is Phase.HELD
        model, chunks, reason = await chat(stage)
        assert not is_alive(pids[0])
    assert (model, reason) == ("predicted", "length")
    assert chunks > 10
    assert stage.events("idle_back")[0]["held"] == 1


async def test_streams_over_a_change(stage: IdleStage) -> None:
    async with asyncio.timeout(120):
        first = stage.pid()
        long = asyncio.create_task(chat(stage, tokens=200))
        await eventually(lambda: stage.backend.traffic.running == 1)
        changing = asyncio.create_task(stage.host.swap(BEST, stage.backend.upstream))
        answers = []
        while not changing.done():
            answers.append(await chat(stage, tokens=4))
        answers += [await chat(stage, tokens=4), await long]
        assert await changing is None
    assert not is_alive(first)
    assert answers[-2][0] == "best"
    assert answers[-1][0] == "predicted"
    assert all(chunks > 0 and reason in ("length", "stop") for _, chunks, reason in answers)


async def test_a_held_stream_begins_with_the_same_head(stage: IdleStage) -> None:
    async def head() -> dict[str, str]:
        async with stage.openai() as client:
            asked = client.chat.completions.with_streaming_response.create(
                model="any", messages=MESSAGES, stream=True, max_tokens=2
            )
            async with asked as response:
                found = {name: value for name, value in response.headers.items() if name != "date"}
                stage.report.phase(Phase.READY)
                assert (await response.text()).endswith("data: [DONE]\n\n")
        return found

    plain = await head()
    stage.report.phase(Phase.HELD)
    assert await head() == plain


async def test_an_error_of_the_engine_after_a_hold_is_what_the_sdk_raises(stage: IdleStage) -> None:
    stage.report.phase(Phase.HELD)
    words: Any = [{"role": "user", "content": "word " * 3000}]
    async with stage.openai() as client:
        events = await client.chat.completions.create(model="any", messages=words, stream=True)
        stage.report.phase(Phase.READY)  # it was held: the head of its answer is here
        with pytest.raises(openai.APIError, match="exceeds the available context size") as caught:
            await anext(aiter(events))
    assert caught.value.code == "400"
