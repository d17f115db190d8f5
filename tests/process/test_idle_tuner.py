"""Measuring while nobody asks, over a real gateway with real processes: nobody is refused, nobody waits for long."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from appliance.command import Command
from appliance.console.progress import Phase
from appliance.errors import EngineError, EngineNotReadyError
from appliance.serve.background import idle_tuner
from appliance.serve.model.courtesy import LOOKS
from appliance.supervisor import Restart
from tests.process.stages.idle import GRACE_S, MESSAGES, FakePlan, IdleStage, Measuring, fake_plan, idle_stage, running
from tests.process.stages.supervisor import eventually, fake_command, is_alive, is_healthy

PREDICTED = fake_plan("predicted", "--load-seconds", "0.3", "--chunks", "20", "--chunk-interval", "0.02")
BEST = fake_plan("best", "--load-seconds", "0.3", "--chunks", "20", "--chunk-interval", "0.02")
TEXT = "one two three " * 6 + "one two "
NO_ROOM = "memory holds no second engine"


@pytest.fixture
async def stage() -> AsyncIterator[IdleStage]:
    async with idle_stage(PREDICTED) as stage:
        yield stage


async def ended(task: asyncio.Task[Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        await task


# The change drops no request


async def test_a_steady_stream_of_requests_over_a_change() -> None:
    answers: list[tuple[str, str]] = []
    is_loaded, is_over = asyncio.Event(), asyncio.Event()

    def command(plan: FakePlan, path: Path) -> Command:
        async def is_ready() -> bool:
            return is_loaded.is_set() and await is_healthy(path)

        made = fake_command(path, *plan.knobs)
        return replace(made, is_ready=is_ready) if plan.name == "best" else made

    def count(name: str) -> int:
        return sum(model == name for model, _ in answers)

    async with idle_stage(PREDICTED, command=command) as stage:
        first_pid = stage.pid()

        async def client() -> None:
            while not is_over.is_set():
                answers.append(await stage.stream())

        async def side_client() -> None:
            while not is_over.is_set():
                answers.append((await stage.model(), TEXT))

        tuner = stage.tuner(Measuring(stage.folder, [0.1], BEST))
        async with asyncio.TaskGroup() as clients, running(tuner) as task:
            await eventually(lambda: bool(stage.events("idle_change")))  # measured before anybody came
            for work in (*(client() for _ in range(8)), side_client()):
                clients.create_task(work)
            await eventually(lambda: count("predicted") >= 20, timeout_s=90)
            is_loaded.set()
            await ended(task)
            assert not is_alive(first_pid)
            await eventually(lambda: count("best") >= 20, timeout_s=90)
            is_over.set()
        assert stage.host.plan == BEST
        assert stage.report.progress.phase is Phase.READY
    assert count("predicted") + count("best") == len(answers)
    assert {text for _, text in answers} == {TEXT}


async def test_the_old_engine_lives_as_long_as_its_last_request(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    long = fake_plan("predicted", "--until", str(enough), "--chunk-interval", "0.03")
    async with idle_stage(long) as stage, stage.openai() as client:
        first_pid = stage.pid()
        ask = client.chat.completions.create
        streams = [await ask(model="a", messages=MESSAGES, stream=True) for _ in range(3)]
        changing = asyncio.create_task(stage.host.swap(BEST, stage.backend.upstream))
        await eventually(lambda: stage.host.plan == BEST)
        assert await stage.model() == "best"
        assert is_alive(first_pid)
        assert not changing.done()
        enough.touch()
        for events in streams:
            texts = [event.choices[0].delta.content or "" async for event in events]
            said = "".join(texts).split()
            assert said == [("one", "two", "three")[at % 3] for at in range(len(said))]
        await ended(changing)
        assert changing.result() is None
    assert not is_alive(first_pid)


async def test_an_engine_that_cannot_be_measured_where_it_serves_is_measured_like_all_others(stage: IdleStage) -> None:
    async def fails() -> None:
        message = "engine gave no timings"
        raise EngineNotReadyError(message)

    measuring = Measuring(stage.folder, [0.0], BEST)
    async with running(stage.tuner(measuring, measure_serving=fails)) as task:
        await ended(task)
    assert [event["message"] for event in stage.events("idle_failed_serving")] == [
        "the engine that serves could not be measured: engine gave no timings; its plan is loaded for it instead"
    ]
    assert measuring.calls == [False]
    assert await stage.model() == "best"


async def test_where_it_serves_it_is_measured_before_anything_is_stopped(stage: IdleStage) -> None:
    pids: list[int] = []

    async def measured() -> None:
        pids.append(stage.pid())

    measuring, first = Measuring(stage.folder, [0.0], BEST), stage.pid()
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM, measure_serving=measured)) as task:
        await ended(task)
    assert pids == [first], "once, on the engine that served"
    assert measuring.calls == [True]


async def test_a_best_plan_that_does_not_load_changes_nothing(stage: IdleStage) -> None:
    pid = stage.pid()
    broken = fake_plan("broken", "--die-before-ready", "1")
    async with running(stage.tuner(Measuring(stage.folder, [0.0], broken))) as task:
        await ended(task)
    assert stage.pid() == pid
    assert await stage.model() == "predicted"
    assert "exited with code 1" in stage.events("idle_failed")[0]["message"]


async def test_one_that_cannot_be_started_changes_nothing() -> None:
    def command(plan: FakePlan, path: Path) -> Command:
        made = fake_command(path, *plan.knobs)
        return Command(argv=("/nowhere/engine",), is_ready=made.is_ready) if plan.name == "best" else made

    async with idle_stage(PREDICTED, command=command) as stage:
        async with running(stage.tuner(Measuring(stage.folder, [0.0], BEST))) as task:
            await ended(task)
        assert await stage.model() == "predicted"
        assert "/nowhere/engine" in stage.events("idle_failed")[0]["message"]


@pytest.mark.parametrize("why_no_room", ["", NO_ROOM])
async def test_a_plan_with_other_reasons_is_no_other_plan(stage: IdleStage, why_no_room: str) -> None:
    pid = stage.pid()
    best = FakePlan(knobs=PREDICTED.knobs, why="measured")
    async with running(stage.tuner(Measuring(stage.folder, [0.0], best), why_no_room=why_no_room)) as task:
        await ended(task)
    if not why_no_room:
        assert stage.pid() == pid
    assert stage.events("idle_change") == stage.events("idle_failed") == []


# Beside


async def test_a_request_ends_measuring_and_does_not_wait_for_its_end(stage: IdleStage) -> None:
    measuring = Measuring(stage.folder, [60.0])
    async with running(stage.tuner(measuring)):
        await eventually(lambda: bool(measuring.pids))
        await asyncio.sleep(0.3)
        assert is_alive(measuring.pids[0])
        assert await stage.model() == "predicted"
        await eventually(lambda: bool(stage.events("idle_stopped")))
        assert not is_alive(measuring.pids[0])
        assert stage.events("idle_stopped")[0]["seconds"] < 30.0
        assert stage.report.progress.phase is Phase.READY
        await eventually(lambda: len(measuring.calls) == 2)  # goes on when nobody asks
    assert measuring.calls == [False, False]
    assert not any(is_alive(pid) for pid in measuring.pids)


async def test_short_stretches_of_idleness_add_up(stage: IdleStage) -> None:
    measuring = Measuring(stage.folder, [60.0], BEST)
    async with running(stage.tuner(measuring)) as task:
        for round_number in range(1, 4):
            await eventually(lambda count=round_number: len(measuring.pids) == count)  # type: ignore[misc]
            await stage.model()
            await eventually(lambda count=round_number: len(stage.events("idle_stopped")) == count)  # type: ignore[misc]
        measuring.sittings = [0.0]
        await ended(task)
    assert stage.host.plan == BEST


@pytest.mark.parametrize(("why_no_room", "alone"), [("", False), (NO_ROOM, True)])
async def test_who_waits_for_the_result_waits_for_no_idle_period(
    stage: IdleStage, why_no_room: str, alone: bool
) -> None:
    measuring = Measuring(stage.folder, [0.1], BEST)
    tuner = stage.tuner(measuring, why_no_room=why_no_room, idle_s=3600, settle_s=3600)
    async with running(tuner) as task:
        await asyncio.sleep(0.3)
        assert measuring.calls == []
        stage.tuning.wanted_now.set()
        await ended(task)
    assert measuring.calls == [alone]
    assert stage.host.plan == BEST


async def test_while_another_container_measures_it_is_tried_again_without_a_request(
    stage: IdleStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_tuner, "AGAIN_S", 0.3)
    measuring = Measuring(stage.folder, [0.0, 0.0, 0.0], BEST)
    async with running(stage.tuner(measuring)) as task:
        await ended(task)
    assert (measuring.calls, stage.backend.traffic.arrivals) == ([False] * 3, 0)


# Beside the work of others, and between requests that come often


class Neighbours:
    """Other programs of this machine: the answer at each look, and an event while it measures."""

    def __init__(self, *looks: str) -> None:
        self.looks = list(looks)
        self.seen = 0
        self.crowded = asyncio.Event()

    async def what_else_works(self) -> str:
        self.seen += 1
        return self.looks.pop(0) if self.looks else ""

    async def until_crowded(self) -> str:
        await self.crowded.wait()
        self.crowded.clear()
        return BUSY

    @property
    def told(self) -> dict[str, Any]:
        return {"what_else_works": self.what_else_works, "until_crowded": self.until_crowded}


BUSY = "other programs took 50% of 2 CPUs (1.0 cores)"


@pytest.mark.parametrize("why_no_room", ["", NO_ROOM])
async def test_on_a_busy_machine_measuring_waits_and_the_engine_that_serves_stays(
    stage: IdleStage, why_no_room: str
) -> None:
    pid, others = stage.pid(), Neighbours(BUSY, BUSY)
    measuring = Measuring(stage.folder, [0.0], BEST)
    async with running(stage.tuner(measuring, why_no_room=why_no_room, idle_s=0.3, **others.told)) as task:
        await eventually(lambda: others.seen == 2)
        assert (measuring.calls, stage.pid()) == ([], pid)
        await ended(task)
    assert (others.seen, len(measuring.calls)) == (3, 1)
    (told,) = stage.events("idle_busy")
    assert told["message"].startswith(f"{BUSY}: measuring waits for a quieter moment")


async def test_a_machine_that_never_is_quiet_is_measured_at_last(stage: IdleStage) -> None:
    others = Neighbours(*[BUSY] * 99)
    others.crowded.set()
    measuring = Measuring(stage.folder, [0.1], BEST)
    async with running(stage.tuner(measuring, idle_s=0.02, **others.told)) as task:
        await ended(task)
    assert (others.seen, measuring.calls) == (LOOKS, [False])


@pytest.mark.parametrize("why_no_room", ["", NO_ROOM])
async def test_others_that_begin_to_work_end_measuring_which_begins_again_later(
    stage: IdleStage, why_no_room: str
) -> None:
    """Measuring begins again without a request in between."""
    others = Neighbours()
    measuring = Measuring(stage.folder, [60.0], BEST)
    async with running(stage.tuner(measuring, why_no_room=why_no_room, **others.told)) as task:
        await eventually(lambda: bool(measuring.pids))
        others.crowded.set()
        await eventually(lambda: bool(stage.events("idle_busy")))
        assert not is_alive(measuring.pids[0])
        measuring.sittings = [0.0]
        await ended(task)
    assert (others.seen, measuring.calls) == (2, [bool(why_no_room)] * 2)


async def test_an_engine_comes_back_where_a_lack_of_files_hides_the_others(stage: IdleStage) -> None:
    lacks = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    async def until_crowded() -> str:
        if lacks:
            raise lacks.pop()
        await asyncio.Event().wait()
        return ""

    measuring = Measuring(stage.folder, [0.0], BEST)
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM, until_crowded=until_crowded)) as task:
        await eventually(lambda: not lacks and not stage.host.is_ready)
        assert await stage.model() == "predicted"  # a request ends the wait for files
        await ended(task)
    assert stage.host.plan == BEST


async def test_who_waits_for_the_result_waits_for_no_quiet_machine(stage: IdleStage) -> None:
    others = Neighbours(*[BUSY] * 99)
    measuring = Measuring(stage.folder, [0.1], BEST)
    tuner = stage.tuner(measuring, idle_s=3600, settle_s=3600, **others.told)
    stage.tuning.wanted_now.set()
    async with running(tuner) as task:
        await ended(task)
    assert (others.seen, measuring.calls) == (0, [False])


@pytest.mark.parametrize("hurries", [False, True])
async def test_between_requests_that_come_too_soon_no_engine_is_loaded_for_nothing(
    stage: IdleStage, hurries: bool
) -> None:
    """Each pause is a tenth of the time needed. If somebody waits for the result, one load is tried all the same,
    because requests may be over. It is measured once they are."""
    stage.backend.traffic.pauses.extend([2.0] * 32)
    measuring = Measuring(stage.folder, [60.0], BEST)
    tuner = stage.tuner(measuring, need_s=lambda: 20.0)
    if hurries:
        stage.tuning.wanted_now.set()
    async with running(tuner) as task:
        if hurries:
            await eventually(lambda: len(measuring.pids) == 1)
        for _ in range(6):
            await stage.model()
            await asyncio.sleep(0.1)
        assert len(measuring.calls) == hurries
        measuring.sittings = [0.0]
        await ended(task)
    assert len(stage.events("idle_pauses")) == 1


@pytest.mark.parametrize("why_no_room", ["", NO_ROOM])
async def test_nothing_is_measured_while_a_request_runs(why_no_room: str) -> None:
    endless = fake_plan("predicted", "--chunks", "100000", "--chunk-interval", "0.03")
    async with idle_stage(endless) as stage, stage.openai() as client:
        measuring = Measuring(stage.folder, [60.0])
        events = await client.chat.completions.create(model="a", messages=MESSAGES, stream=True)
        async with running(stage.tuner(measuring, why_no_room=why_no_room)):
            await asyncio.sleep(0.5)
            assert measuring.calls == []
            await events.close()
            await eventually(lambda: bool(measuring.calls))


async def test_measuring_that_fails_ends_the_tuning_and_not_the_serving(stage: IdleStage) -> None:
    measuring = Measuring(stage.folder, [0.0], error=EngineNotReadyError("no plan could be measured"))
    async with running(stage.tuner(measuring)) as task:
        await ended(task)
    assert "no plan could be measured" in stage.events("idle_failed")[0]["message"]
    assert await stage.model() == "predicted"


# In place of the engine


async def test_a_request_waits_for_the_reload_and_is_served(stage: IdleStage) -> None:
    measuring = Measuring(stage.folder, [60.0])
    first_pid = stage.pid()
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM)):
        await eventually(lambda: bool(measuring.pids))
        assert not is_alive(first_pid)
        assert stage.report.progress.phase is Phase.HELD
        answers = await asyncio.gather(stage.stream(), stage.stream(), stage.model())
        assert stage.events("idle_stopped")[0]["seconds"] < 30.0
        assert not is_alive(measuring.pids[0])
    assert answers == [("predicted", TEXT), ("predicted", TEXT), "predicted"]
    assert stage.report.progress.phase is Phase.READY
    assert stage.events("idle_back")[0]["held"] == 3


async def test_the_worst_wait_is_said_beforehand(stage: IdleStage) -> None:
    load_s = stage.host.load_s
    measuring = Measuring(stage.folder, [60.0])
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM, idle_s=0.5)):
        await eventually(lambda: bool(stage.events("idle_no_room")))
        assert measuring.calls == []
        await eventually(lambda: bool(measuring.calls))
    said, begun = stage.events("idle_no_room")[0], stage.events("idle_measure")[0]
    assert said["worst_wait_s"] == begun["worst_wait_s"] == pytest.approx(load_s + 1.0, abs=1e-3)
    assert said["message"].startswith(f"{NO_ROOM}: measuring begins after 0.5 s without a request")
    assert measuring.calls == [True]


async def test_a_held_client_is_told_what_happens(stage: IdleStage) -> None:
    async with running(stage.tuner(Measuring(stage.folder, [60.0]), why_no_room=NO_ROOM)), stage.openai() as client:
        await eventually(lambda: stage.report.progress.phase is Phase.HELD)
        asked = client.chat.completions.with_streaming_response.create(model="a", messages=MESSAGES, stream=True)
        async with asked as response, aclosing(response.iter_lines()) as lines:  # type: ignore[type-var] # a generator, says openai only as an iterator
            told = [line async for line in lines]
    comments = [line for line in told if line.startswith(":")]
    measured = ": requests wait for the engine: the machine is being measured; the model is back about "
    loaded = ": requests wait for the engine: the model is being loaded, about "
    assert comments[0].startswith((measured, loaded))
    assert comments[-1].startswith(loaded)
    assert told[-2:] == ["data: [DONE]", ""]


async def test_once_an_idle_period(stage: IdleStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container measures, and each try in place of the engine costs a load. Only a request opens the next
    period."""
    monkeypatch.setattr(idle_tuner, "AGAIN_S", 0.1)
    measuring = Measuring(stage.folder, [0.0, 0.0, 60.0])
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM, idle_s=0.1)):
        await eventually(lambda: len(stage.events("idle_back")) == 1)
        await asyncio.sleep(0.6)
        assert measuring.calls == [True]
        assert await stage.model() == "predicted"
        await eventually(lambda: len(stage.events("idle_back")) == 2)
        await asyncio.sleep(0.6)
        assert measuring.calls == [True, True]


async def test_the_best_plan_comes_back_with_the_same_reload(stage: IdleStage) -> None:
    measuring = Measuring(stage.folder, [0.0], BEST)
    async with running(stage.tuner(measuring, why_no_room=NO_ROOM)) as task:
        await eventually(lambda: bool(measuring.ended_at))
        assert await stage.stream() == ("best", TEXT)
        await ended(task)
    assert len(stage.events("idle_back")) == 1


async def test_when_the_best_plan_does_not_load_the_one_before_it_serves(stage: IdleStage) -> None:
    broken = fake_plan("broken", "--load-seconds", "0.3", "--die-before-ready", "1")
    async with running(stage.tuner(Measuring(stage.folder, [0.0], broken), why_no_room=NO_ROOM)) as task:
        watching = asyncio.create_task(stage.host.wait_failed())
        await eventually(lambda: stage.report.progress.phase is Phase.HELD)
        await eventually(lambda: "being loaded" in stage.report.progress.message)
        assert await stage.stream() == ("predicted", TEXT)
        await ended(task)
        assert not watching.done()
        watching.cancel()
    assert "exited with code 1" in stage.events("idle_failed")[0]["message"]


async def test_an_engine_that_does_not_come_back_is_said_to_everybody() -> None:
    starts: list[str] = []

    def command(plan: FakePlan, path: Path) -> Command:
        starts.append(plan.name)
        knobs = ("--die-before-ready", "1", "--error-line", "failed to load") if len(starts) > 1 else ()
        return fake_command(path, *plan.knobs, *knobs)

    async with idle_stage(PREDICTED, command=command) as stage:
        task = asyncio.create_task(stage.tuner(Measuring(stage.folder, [60.0]), why_no_room=NO_ROOM).run())
        await eventually(lambda: stage.report.progress.phase is Phase.HELD)
        streaming = asyncio.create_task(stage.stream())
        with pytest.raises(openai.APIStatusError) as plain:
            await stage.model()
        with pytest.raises(openai.APIError, match="the engine failed: ") as caught:
            await streaming
        assert (plain.value.status_code, plain.value.code, caught.value.code) == (503, "engine_died", "engine_died")
        with pytest.raises(EngineError):
            await task


# A stop in the middle


@pytest.mark.parametrize("why_no_room", ["", NO_ROOM])
@pytest.mark.parametrize("is_loading", [False, True])
async def test_a_stop_leaves_nothing_behind(why_no_room: str, is_loading: bool) -> None:
    slow = fake_plan("best", "--load-seconds", "60", "--ignore-sigterm")
    # In place of the engine, the one that loads is the host's: it gets its grace when all ends.
    grace_s = 0.3 if why_no_room and is_loading else GRACE_S

    def command(plan: FakePlan, path: Path) -> Command:
        return fake_command(path, *plan.knobs, stop_grace_s=grace_s)

    async with idle_stage(PREDICTED, command=command) as stage:
        measuring = Measuring(stage.folder, [0.0 if is_loading else 60.0], slow)
        task = asyncio.create_task(stage.tuner(measuring, why_no_room=why_no_room).run())
        if is_loading:
            await eventually(lambda: bool(measuring.ended_at))
            await eventually(lambda: bool(list(stage.folder.glob("b.sock"))) or stage.host.supervisor is None)
        else:
            await eventually(lambda: bool(measuring.pids))
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < GRACE_S / 3
        assert not any(is_alive(pid) for pid in measuring.pids)
        if not why_no_room:
            assert await stage.model() == "predicted"


async def test_a_stop_while_the_last_requests_of_the_old_engine_run() -> None:
    endless = fake_plan("predicted", "--chunks", "100000", "--chunk-interval", "0.03")
    async with idle_stage(endless) as stage, stage.openai() as client:
        pids = [stage.pid()]
        events = await client.chat.completions.create(model="a", messages=MESSAGES, stream=True)
        changing = asyncio.create_task(stage.host.swap(BEST, stage.backend.upstream))
        await eventually(lambda: stage.host.plan == BEST)
        pids.append(stage.pid())
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert all(is_alive(pid) for pid in pids)  # it is the gateway that ends the stream
        draining = asyncio.create_task(stage.gateway.drain(0.2))
        with pytest.raises(openai.APIError, match="the appliance is stopping"):
            _ = [event async for event in events]
        await draining
    assert not any(is_alive(pid) for pid in pids)


async def test_an_engine_that_was_left_to_its_last_requests_goes_with_the_next() -> None:
    """The new engine may be killed for lack of memory meanwhile. The old one must be gone before a smaller one
    loads."""
    endless = fake_plan("predicted", "--chunks", "100000", "--chunk-interval", "0.03")
    async with idle_stage(endless) as stage, stage.openai() as client:
        first = stage.pid()
        events = await client.chat.completions.create(model="a", messages=MESSAGES, stream=True)
        changing = asyncio.create_task(stage.host.swap(BEST, stage.backend.upstream))
        await eventually(lambda: stage.host.plan == BEST)
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
        assert is_alive(first)
        await stage.host.stop_current(grace_s=0.0)
        assert not is_alive(first)
        with pytest.raises(openai.APIError):
            _ = [event async for event in events]
        assert await stage.host.load(PREDICTED) is None
        assert await stage.model() == "predicted"


async def test_held_requests_end_with_a_stop(stage: IdleStage) -> None:
    slow = fake_plan("best", "--load-seconds", "60")
    task = asyncio.create_task(stage.tuner(Measuring(stage.folder, [0.0], slow), why_no_room=NO_ROOM).run())
    await eventually(lambda: "being loaded" in stage.report.progress.message)
    streaming = asyncio.create_task(stage.stream())
    await eventually(lambda: stage.backend.traffic.running == 1)
    task.cancel()
    await stage.gateway.drain(5.0)
    with pytest.raises(openai.APIError, match="the appliance is stopping"):
        await streaming
    await asyncio.gather(task, return_exceptions=True)


# Who serves, and its death


async def test_the_death_of_whoever_serves_is_seen() -> None:
    mortal = fake_plan("best", "--die-on-request")
    async with idle_stage(PREDICTED) as stage:
        watching = asyncio.create_task(stage.host.wait_failed())
        assert await stage.host.swap(mortal, stage.backend.upstream) is None
        await asyncio.sleep(0.05)
        assert not watching.done()  # the first one was stopped: that is no death
        with pytest.raises(openai.APIStatusError):
            await stage.model()
        async with asyncio.timeout(60):
            assert (await watching).exit_code == 1


async def test_there_and_back_again(stage: IdleStage) -> None:
    for _ in range(2):
        assert await stage.host.swap(BEST, stage.backend.upstream) is None
        assert await stage.model() == "best"
        assert await stage.host.swap(PREDICTED, stage.backend.upstream) is None
        assert await stage.model() == "predicted"


async def test_restarts_of_all_engines_are_counted() -> None:
    restart = Restart(max_in_row=100, backoff_s=(0.0,))
    async with idle_stage(PREDICTED, restart=restart) as stage:
        os.kill(stage.pid(), signal.SIGKILL)
        await eventually(lambda: stage.host.restarts == 1)
        await eventually(lambda: stage.host.is_ready)
        assert await stage.host.swap(BEST, stage.backend.upstream) is None
        assert stage.host.restarts == 1
        assert await stage.model() == "best"


async def test_an_engine_after_a_stop_listens_where_requests_go_and_counts_on() -> None:
    async with idle_stage(PREDICTED, restart=Restart(max_in_row=100, backoff_s=(0.0,))) as stage:
        assert await stage.host.swap(BEST, stage.backend.upstream) is None
        os.kill(stage.pid(), signal.SIGKILL)
        await eventually(lambda: stage.host.restarts == 1 and stage.host.is_ready)
        await stage.host.stop()
        stage.host.launch(PREDICTED)
        await eventually(lambda: stage.host.is_ready)
        assert await stage.model() == "predicted"
        assert stage.host.restarts == 1
