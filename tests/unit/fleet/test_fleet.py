"""The fleet with members that only pretend to load: who is loaded, who waits, and what clients get."""

from __future__ import annotations

import asyncio

import pytest

from appliance.errors import EngineDiedError, EngineNotReadyError, ModelDoesNotFitError
from appliance.fleet import fleet as module
from appliance.fleet.fleet import Fleet, LoadWaitError
from tests.unit.fleet.pretenders import Memory, Pretender, ask, running, until


async def test_a_hundred_first_requests_make_one_load() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.may_load.clear()
        asking = [asyncio.create_task(ask(fleet, "b")) for _ in range(100)]
        await until(lambda: second.loads == 1)
        second.may_load.set()
        assert await asyncio.gather(*asking) == ["b"] * 100
        assert second.loads == 1
        assert fleet.loaded == ("a", "b")


async def test_an_idle_one_makes_room_and_comes_back_when_it_is_asked() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory), Pretender("b", 60, memory)) as fleet:
        await ask(fleet, "b")
        assert fleet.loaded == ("b",)
        row = fleet.document()["models"][0]
        assert (row["evictions"], row["sent_away_for"], row["is_loaded"]) == (1, "b", False)
        await ask(fleet, "a")
        assert fleet.loaded == ("a",)
        assert fleet.document()["models"][0]["loads"] == 2


async def test_a_smaller_plan_is_loaded_beside_the_others_before_anyone_is_sent_away() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory), Pretender("b", 80, memory, smaller=(30,))) as fleet:
        await ask(fleet, "b")
        assert fleet.loaded == ("a", "b")
        assert memory.held == {"a": 60, "b": 30}


async def test_who_answers_is_waited_for_and_never_sent_away() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory), Pretender("b", 60, memory)) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.3))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: bool(fleet.document()["waiting"]))
        await asyncio.sleep(0.1)
        assert fleet.loaded == ("a",)
        assert "a" in fleet.document()["waiting"][0]["reason"]
        assert not waiting.done()
        assert await answering == "a"
        assert await waiting == "b"


async def test_a_loaded_model_goes_on_only_for_its_turn_while_another_waits() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory), Pretender("b", 60, memory), turn_s=0.3) as fleet:

        async def chatting() -> int:
            """Ask `a` again and again, two at a time, so that it always answers."""
            count = 0
            while not is_over.is_set():
                await ask(fleet, "a", seconds=0.05)
                count += 1
            return count

        is_over = asyncio.Event()
        chats = [asyncio.create_task(chatting()) for _ in range(2)]
        await asyncio.sleep(0.02)
        began = asyncio.get_running_loop().time()
        await ask(fleet, "b")
        is_over.set()
        assert asyncio.get_running_loop().time() - began >= 0.25  # the turn of `a` was respected
        counts = await asyncio.gather(*chats)
        assert min(counts) >= 1  # nobody's request was lost


async def test_a_pinned_one_is_never_sent_away_and_who_does_not_fit_beside_it_is_refused_with_the_figures() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory, pin=True), Pretender("b", 60, memory)) as fleet:
        with pytest.raises(ModelDoesNotFitError, match=r"60 MiB.*40 MiB are free"):
            await ask(fleet, "b")
        assert fleet.loaded == ("a",)


async def test_an_engine_that_dies_as_it_loads_answers_all_who_wait_and_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    async with running(first, second) as fleet:
        second.fails = EngineNotReadyError("it died")
        answers = await asyncio.gather(*(ask(fleet, "b") for _ in range(10)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["it died"] * 10
        assert second.loads == 1
        with pytest.raises(EngineNotReadyError):  # at once, without another load
            await ask(fleet, "b")
        assert second.loads == 1
        second.fails = None
        monkeypatch.setattr(module, "FAILED_S", 0.0)
        await ask(fleet, "b")
        assert fleet.loaded == ("a", "b")


async def test_a_client_that_leaves_withdraws_its_wish() -> None:
    memory = Memory()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)
    async with running(first, second) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.3))
        await asyncio.sleep(0.05)
        leaving = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: bool(fleet.document()["waiting"]))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert fleet.document()["waiting"] == []
        await answering
        await asyncio.sleep(0.05)
        assert (second.loads, fleet.loaded) == (0, ("a",))


async def test_a_load_that_nobody_wants_any_more_gives_way_to_one_that_is_waited_for() -> None:
    memory = Memory()
    first, second, third = (Pretender(name, 40, memory) for name in "abc")
    async with running(first, second, third) as fleet:
        second.may_load.clear()
        leaving = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: second.loads == 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await ask(fleet, "c")
        assert (second.cancelled, fleet.loaded) == (1, ("a", "c"))
        assert "b" not in memory.held


async def test_a_request_without_a_stream_is_told_after_its_limit_when_to_ask_again() -> None:
    memory = Memory()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)
    async with running(first, second) as fleet:
        second.may_load.clear()
        with pytest.raises(LoadWaitError, match="b is being loaded") as caught:
            await ask(fleet, "b", wait_s=0.2)
        assert caught.value.about_s == second.reload_s


async def test_a_stream_is_told_why_it_waits() -> None:
    memory = Memory()
    first, second = Pretender("a", 60, memory), Pretender("b", 60, memory)
    told: list[str] = []

    async def tell(words: str) -> None:
        told.append(words)
        second.may_load.set()

    async with running(first, second) as fleet:
        second.may_load.clear()
        async with fleet.held("b", tell=tell):
            assert fleet.is_loaded("b")
    assert told == ["b is being loaded"]


async def test_a_model_is_unloaded_when_its_time_without_requests_is_over() -> None:
    memory = Memory()
    async with running(Pretender("a", 40, memory), Pretender("b", 40, memory)) as fleet:
        async with fleet.held("b", keep_alive_s=0.1):
            await asyncio.sleep(0.2)
            assert fleet.is_loaded("b")  # the time begins with the end of an answer
        await until(lambda: not fleet.is_loaded("b"))
        assert fleet.loaded == ("a",)
        async with fleet.held("a", keep_alive_s=0.0):
            pass
        await until(lambda: fleet.loaded == ())
        await ask(fleet, "a")
        await asyncio.sleep(0.05)
        assert fleet.loaded == ("a",)  # a request without a time has the setting's


async def test_an_unload_waits_for_the_answers() -> None:
    memory = Memory()
    async with running(Pretender("a", 40, memory), Pretender("b", 40, memory)) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.2))
        await asyncio.sleep(0.05)
        fleet.unload("a")
        await asyncio.sleep(0.05)
        assert fleet.is_loaded("a")
        assert await answering == "a"
        await until(lambda: not fleet.is_loaded("a"))
        fleet.want("a")
        await until(lambda: fleet.is_loaded("a"))


async def test_preparing_one_model_for_hours_keeps_no_other_waiting() -> None:
    memory = Memory()
    first, second, third = (Pretender(name, 30, memory) for name in "abc")
    async with running(first, second, third) as fleet:
        second.may_prepare.clear()
        fetching = asyncio.create_task(ask(fleet, "b"))
        assert await ask(fleet, "c") == "c"
        assert not fetching.done()
        second.may_prepare.set()
        assert await fetching == "b"


async def test_the_first_model_that_cannot_be_loaded_ends_the_fleet() -> None:
    first = Pretender("a", 40, Memory())
    first.fails = EngineNotReadyError("it died")
    serving = running(first)
    with pytest.raises(EngineNotReadyError):
        await serving.__aenter__()


async def test_the_end_of_the_first_models_engine_ends_the_fleet_and_of_another_does_not() -> None:
    memory = Memory()
    first, second = Pretender("a", 40, memory), Pretender("b", 40, memory)
    seen: list[tuple[str, ...]] = []

    async def serving() -> None:
        async with running(first, second) as fleet:
            await ask(fleet, "b")
            del memory.held["b"]
            fleet.lost("b", EngineDiedError("second"))
            await asyncio.sleep(0.02)
            seen.append(fleet.loaded)
            fleet.lost("a", EngineDiedError("first"))
            await asyncio.sleep(0.02)

    with pytest.raises(EngineDiedError, match="first"):
        await serving()
    assert seen == [("a",)]


async def test_one_that_came_later_is_loaded_beside_while_the_first_in_line_waits() -> None:
    memory = Memory()
    first, large, small = Pretender("a", 60, memory), Pretender("b", 90, memory), Pretender("c", 10, memory)
    async with running(first, large, small) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.4))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: bool(fleet.document()["waiting"][0]["reason"]) if fleet.document()["waiting"] else False)
        assert await ask(fleet, "c") == "c"
        assert not waiting.done()
        await asyncio.gather(answering, waiting)
        assert fleet.loaded == ("b", "c")


async def test_the_time_of_a_request_outlives_an_unload_that_it_waited_for() -> None:
    memory = Memory()
    async with running(Pretender("a", 40, memory), Pretender("b", 40, memory)) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.2))
        await asyncio.sleep(0.05)
        fleet.unload("a")
        async with fleet.held("a", keep_alive_s=600.0):
            assert answering.done()
        assert fleet.document()["models"][0]["keep_alive_s"] == 600.0
        await answering


async def test_who_waits_is_told_at_the_end_what_was_done_meanwhile() -> None:
    memory = Memory()
    first, second, third = (Pretender(name, 60, memory) for name in "abc")
    async with running(first, second, third) as fleet:
        async with fleet.held("a") as nothing:
            assert nothing == ""
        async with fleet.held("b") as of_load:
            assert of_load == "b was loaded: nothing else is loaded"
        third.may_load.clear()
        asking = asyncio.create_task(ask(fleet, "c"))
        await until(lambda: third.loads == 1)
        waiting = asyncio.create_task(words_of(fleet, "b"))
        await until(lambda: len(fleet.document()["waiting"]) == 2)
        third.may_load.set()
        await asking
        assert await waiting == "c was loaded; b was loaded: nothing else is loaded"


async def test_who_is_held_back_for_anothers_turn_is_told_so() -> None:
    memory = Memory()
    async with running(Pretender("a", 60, memory), Pretender("b", 60, memory), turn_s=0.0) as fleet:
        answering = asyncio.create_task(ask(fleet, "a", seconds=0.3))
        await until(lambda: fleet.document()["models"][0]["answering"] == 1)
        asking = asyncio.create_task(ask(fleet, "b"))
        await until(lambda: "answer has ended" in str(fleet.document()["waiting"]))
        words = await words_of(fleet, "a")
        await asyncio.gather(answering, asking)
        assert words == "a makes room for b; b was loaded; a was loaded: nothing else is loaded"


async def words_of(fleet: Fleet, name: str) -> str:
    async with fleet.held(name) as words:
        return words


async def test_what_is_free_is_less_what_was_loaded_since_the_last_look() -> None:
    memory = Memory()
    async with running(Pretender("a", 40, memory), Pretender("b", 30, memory)) as fleet:
        assert fleet.document()["free_mib"] == {}, "nobody looked yet"
        await ask(fleet, "b")
        assert fleet.document()["free_mib"] == {"host": 30}
        fleet.unload("a")
        await until(lambda: fleet.loaded == ("b",))
        assert fleet.document()["free_mib"] == {"host": 70}
