"""The fleet beside members that fail, hang and are cancelled at the worst moments: no client waits for ever, and one
model's fault is not another's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO

import pytest

from appliance.console.report import Report
from appliance.errors import EngineNotReadyError, FatalError
from appliance.fleet import fleet as module
from appliance.fleet.fleet import Fleet, FleetEndedError
from tests.unit.fleet.pretenders import Memory, Pretender, ask, running, until


async def left(task: asyncio.Task[str]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_who_asks_for_a_model_whose_load_is_being_cancelled_gets_it() -> None:
    memory = Memory()
    first, second, third = (Pretender(name, 30, memory) for name in "abc")
    async with running(first, second, third) as fleet:
        second.may_load.clear()
        leaving = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: second.loads == 1)
        second.may_end.clear()
        await left(leaving)
        other = asyncio.create_task(ask(fleet, "c"))
        await until(lambda: second.cancelled == 1)
        coming = asyncio.create_task(ask(fleet, "b"))  # its engine is still being stopped
        await asyncio.sleep(0.02)
        second.may_load.set()
        second.may_end.set()
        assert await asyncio.wait_for(coming, 5) == "b"
        assert await other == "c"
        assert second.loads == 2


async def test_two_busy_models_make_room_for_one_that_needs_the_memory_of_both() -> None:
    memory = Memory()
    first, second, large = Pretender("a", 40, memory), Pretender("b", 40, memory), Pretender("c", 90, memory)
    async with running(first, second, large, turn_s=0.2) as fleet:
        is_over = asyncio.Event()

        async def chatting(name: str, seconds: float) -> None:
            while not is_over.is_set():
                await ask(fleet, name, seconds=seconds)

        # Each model always answers a request, and their ends never meet.
        chats = [asyncio.create_task(chatting(name, seconds)) for name, seconds in (("a", 0.07), ("b", 0.11)) * 2]
        await until(lambda: fleet.loaded == ("a", "b"))
        try:
            assert await asyncio.wait_for(ask(fleet, "c"), 5) == "c"
        finally:
            is_over.set()
            await asyncio.gather(*chats)


@pytest.mark.parametrize("where", ["fails", "fails_to_prepare", "fails_to_weigh"])
async def test_a_bug_in_one_model_is_told_to_its_clients_and_ends_no_other(where: str) -> None:
    memory, log = Memory(), StringIO()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second, log=log) as fleet:
        setattr(second, where, FileNotFoundError("no such file"))
        answers = await asyncio.gather(*(ask(fleet, "b") for _ in range(10)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {FatalError}
        assert "FileNotFoundError: no such file" in str(answers[0])
        assert await ask(fleet, "a") == "a"
        told = [json.loads(line) for line in log.getvalue().splitlines()]
        assert any("Traceback" in "\n".join(line.get("log", ())) for line in told)


async def test_a_load_that_cancels_itself_is_a_failed_one() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.fails = asyncio.CancelledError()
        with pytest.raises(FatalError, match="cancelled"):
            await asyncio.wait_for(ask(fleet, "b"), 5)
        assert second.loads == 1


async def test_a_preparation_that_cancels_itself_is_a_failed_one() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:

        async def cancelled() -> None:
            raise asyncio.CancelledError

        second.prepare = cancelled  # type: ignore[method-assign]
        with pytest.raises(FatalError, match="cancelled"):
            await asyncio.wait_for(ask(fleet, "b"), 5)


async def test_a_bug_at_the_start_of_the_first_model_ends_the_fleet_as_it_is() -> None:
    first = Pretender("a", 40, Memory())
    first.fails_to_prepare = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await running(first).__aenter__()


async def test_an_engine_that_cannot_be_stopped_is_told_and_the_others_go_on() -> None:
    memory, log = Memory(), StringIO()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)
    async with running(first, second, log=log) as fleet:
        first.fails_to_unload = OSError("it stays")
        assert await ask(fleet, "b") == "b"
        assert "it stays" in log.getvalue()


async def test_a_preparation_is_not_begun_again_before_the_cancelled_one_has_ended() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.may_prepare.clear()
        second.may_end.clear()
        leaving = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: second.is_preparing == 1)
        await left(leaving)
        coming = asyncio.create_task(ask(fleet, "b"))
        await asyncio.sleep(0.05)
        second.may_prepare.set()
        second.may_end.set()
        assert await asyncio.wait_for(coming, 5) == "b"


async def test_nothing_is_loaded_for_a_client_that_left_while_another_container_had_the_lock() -> None:
    memory, is_free = Memory(), asyncio.Event()
    is_free.set()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)

    @asynccontextmanager
    async def lock() -> AsyncIterator[None]:
        await is_free.wait()
        yield

    async with running(first, second, lock=lock) as fleet:
        fleet.unload("a")
        await until(lambda: fleet.loaded == ())
        is_free.clear()
        leaving = asyncio.create_task(ask(fleet, "b"))
        await asyncio.sleep(0.05)
        await left(leaving)
        is_free.set()
        await asyncio.sleep(0.05)
        assert (second.loads, fleet.loaded) == (0, ())


async def test_an_unload_during_the_start_of_the_first_model_waits_for_it() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    first.may_prepare.clear()
    fleet = Fleet(Report("json", StringIO()))
    for member in (first, second):
        fleet.add(member)
    fleet.want("a")
    run = asyncio.create_task(fleet.run())
    try:
        await until(lambda: first.is_preparing == 1)
        fleet.unload("a")
        await asyncio.sleep(0.02)
        first.may_prepare.set()
        await until(lambda: fleet.was_loaded("a"))  # else nobody could ask for it: requests are refused until then
        await until(lambda: not fleet.is_loaded("a"))
        assert await ask(fleet, "a") == "a"
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def test_a_load_that_is_not_wanted_any_more_is_cancelled_by_an_unload() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.may_load.clear()
        fleet.want("b")
        await until(lambda: second.loads == 1)
        fleet.unload("b")
        await until(lambda: second.cancelled == 1)
        second.may_load.set()
        assert await ask(fleet, "b") == "b"
        assert fleet.is_loaded("b")


async def test_all_who_wait_are_told_at_once_that_everything_stops() -> None:
    memory = Memory()
    members = [Pretender(name, 30, memory) for name in "abcd"]
    fleet = Fleet(Report("json", StringIO()))
    for member in members:
        fleet.add(member)
    fleet.want("a")
    run = asyncio.create_task(fleet.run())
    await until(lambda: fleet.is_loaded("a"))
    members[1].may_prepare.clear()
    members[2].may_load.clear()
    waiting = [asyncio.create_task(ask(fleet, name)) for name in "bcd"]
    await until(lambda: members[2].loads == 1 and members[1].is_preparing == 1)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 1)
    assert [type(answer) for answer in answers] == [FleetEndedError] * 3
    assert (members[1].is_preparing, members[2].cancelled) == (0, 1)
    with pytest.raises(FleetEndedError):
        await ask(fleet, "d")


async def test_the_error_of_a_failed_load_does_not_grow_with_each_request_that_gets_it() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.fails = error = EngineNotReadyError("it died")
        for _ in range(50):
            with pytest.raises(EngineNotReadyError):
                await ask(fleet, "b")
        frames, at = 0, error.__traceback__
        while at is not None:
            frames, at = frames + 1, at.tb_next
        assert frames < 20


async def test_a_telling_that_fails_withdraws_the_wish() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)

    async def tell(_words: str) -> None:
        raise ConnectionResetError

    async with running(first, second) as fleet:
        second.may_prepare.clear()
        with pytest.raises(ConnectionResetError):
            async with fleet.held("b", tell=tell):
                raise AssertionError
        assert fleet.document()["waiting"] == []


@pytest.mark.parametrize("steps", range(12))
async def test_a_client_that_leaves_at_any_moment_leaves_no_lease(steps: int) -> None:
    memory = Memory()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)
    async with running(first, second) as fleet:
        asking = asyncio.create_task(ask(fleet, "b"))
        for _ in range(steps):
            await asyncio.sleep(0)
        await left(asking)
        await asyncio.sleep(0.02)
        assert [row["answering"] for row in fleet.document()["models"]] == [0, 0]
        assert await ask(fleet, "b") == "b"
        assert await ask(fleet, "a") == "a"


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_clients_and_engines_do_nobody_waits_for_ever(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAILED_S", 0.0)
    draw, memory = random.Random(seed), Memory()
    members = [Pretender(name, draw.choice((20, 40, 60, 90)), memory) for name in "abcde"]
    async with running(*members, turn_s=0.02) as fleet:
        asking: list[asyncio.Task[str]] = []
        for _ in range(150):
            member = draw.choice(members)
            match draw.randrange(10):
                case 0 | 1 | 2 | 3:
                    seconds = draw.choice((0.0, 0.001, 0.01))
                    asking.append(asyncio.create_task(ask(fleet, member.name, seconds=seconds)))
                case 4 if asking:
                    draw.choice(asking).cancel()
                case 5:
                    fleet.unload(member.name)
                case 6:
                    fleet.want(member.name)
                case 7 if member is not members[0] or fleet.was_loaded("a"):
                    member.fails = draw.choice((None, EngineNotReadyError("it died"), OSError("a file is gone")))
                case 8:
                    (member.may_load.clear if draw.random() < 0.5 else member.may_load.set)()
                case _:
                    await asyncio.sleep(draw.choice((0.0, 0.0, 0.005)))
        for member in members:
            member.fails = None
            member.may_load.set()
        await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 10)
        await until(lambda: not fleet.document()["waiting"])
        assert [row["answering"] for row in fleet.document()["models"]] == [0] * len(members)
        assert memory.free_mib >= 0
        for member in members:
            assert await ask(fleet, member.name) == member.name
