"""Whatever ends first, and however the race is left: nothing of it goes on."""

from __future__ import annotations

import asyncio

import pytest

from appliance.race import all_of, first_of


class Runner:
    """Says whether it still runs."""

    def __init__(self) -> None:
        self.is_running = False
        self.began = asyncio.Event()

    async def run(self) -> None:
        self.is_running = True
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an end that takes its time
            self.is_running = False


async def _soon(result: str) -> str:
    await asyncio.sleep(0)
    return result


async def _fail() -> None:
    await asyncio.sleep(0)
    message = "broken"
    raise ValueError(message)


async def test_the_first_has_its_result_and_the_others_have_ended() -> None:
    runner = Runner()
    waiting, soon = await first_of(runner.run(), _soon("done"))
    assert waiting.cancelled()
    assert soon.result() == "done"
    assert not runner.is_running


async def test_an_error_is_in_its_place_and_not_raised() -> None:
    waiting, failing = await first_of(Runner().run(), _fail())
    assert waiting.cancelled()
    with pytest.raises(ValueError, match="broken"):
        failing.result()


async def test_when_the_time_is_up_all_are_cancelled() -> None:
    runners = Runner(), Runner()
    ended = await first_of(*(runner.run() for runner in runners), timeout_s=0.01)
    assert all(future.cancelled() for future in ended)
    assert not any(runner.is_running for runner in runners)


async def test_a_race_that_is_cancelled_leaves_nothing_running() -> None:
    runner = Runner()
    race = asyncio.create_task(first_of(runner.run()))
    await runner.began.wait()
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert not runner.is_running


async def test_a_shielded_future_is_left_as_it_is() -> None:
    shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _, soon = await first_of(asyncio.shield(shared), _soon("done"))
    assert soon.result() == "done"
    assert not shared.done()


async def test_all_are_waited_for_and_a_failure_ends_the_others() -> None:
    ended: list[int] = []

    async def end(number: int) -> None:
        await asyncio.sleep(0)
        ended.append(number)

    await all_of(end(1), end(2))
    assert ended == [1, 2]

    async def fail() -> None:
        message = "no"
        raise ValueError(message)

    runner = Runner()
    with pytest.raises(ValueError, match="no"):
        await all_of(runner.run(), fail())
    assert not runner.is_running


async def test_waiting_for_all_that_is_cancelled_leaves_nothing_running() -> None:
    runner = Runner()
    waiting = asyncio.create_task(all_of(runner.run(), runner.run()))
    await runner.began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not runner.is_running
