"""How the work on a request ends early: the client leaves, or the appliance stops."""

from __future__ import annotations

import asyncio

import pytest

from appliance.gateway.routes.forward import ClientLeft, unless_over
from appliance.gateway.wire.api_error import ApiError


class Work:
    """Works until it is told to end, and notes how it ended."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> str:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


class Running:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.work = Work()
        self.must_end: asyncio.Future[None] = loop.create_future()
        self.left: asyncio.Future[None] = loop.create_future()
        self.task = asyncio.create_task(unless_over(self.work.run(), must_end=self.must_end, left=self.left))

    async def begin(self) -> None:
        await asyncio.sleep(0)


@pytest.fixture
async def running() -> Running:
    found = Running()
    await found.begin()
    return found


async def test_work_that_ends_by_itself_has_its_result(running: Running) -> None:
    running.work.may_end.set()
    assert await running.task == "done"
    running.left.set_result(None)  # and what comes later cancels nobody
    await asyncio.sleep(0)
    assert running.task.cancelling() == 0


async def test_a_client_that_leaves_ends_it(running: Running) -> None:
    running.left.set_result(None)
    with pytest.raises(ClientLeft):
        await running.task
    assert running.work.was_cancelled


async def test_a_client_that_had_left_before_ends_it() -> None:
    running = Running()
    running.left.set_result(None)
    with pytest.raises(ClientLeft):
        await running.task


async def test_a_stop_ends_it_with_an_error(running: Running) -> None:
    running.must_end.set_result(None)
    with pytest.raises(ApiError) as caught:
        await running.task
    assert caught.value.status == 503
    assert running.work.was_cancelled


async def test_a_task_that_is_cancelled_itself_stays_cancelled(running: Running) -> None:
    running.left.set_result(None)
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert running.work.was_cancelled


async def test_the_task_can_go_on_after_the_end() -> None:
    """What follows, such as telling the client, is not cancelled."""
    must_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    must_end.set_result(None)
    with pytest.raises(ApiError):
        await unless_over(Work().run(), must_end=must_end)
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_end_in_the_turn_in_which_the_work_ends_cancels_nothing_later(running: Running) -> None:
    """Its callback is scheduled by then, and cannot be taken back."""
    went_on = asyncio.Event()

    async def work() -> str:
        await went_on.wait()
        return "done"

    async def request() -> str:
        found = await unless_over(work(), must_end=running.must_end, left=running.left)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return found

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    went_on.set()
    running.must_end.set_result(None)
    assert await task == "done"
    with pytest.raises(ApiError):
        await running.task


async def test_work_that_does_not_wait_is_not_cancelled_after_it() -> None:
    must_end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    must_end.set_result(None)

    async def work() -> str:
        return "done"

    assert await unless_over(work(), must_end=must_end) == "done"
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_the_work_cleans_up_whatever_else_ends(running: Running) -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    loop = asyncio.get_running_loop()
    must_end, left = loop.create_future(), loop.create_future()
    task = asyncio.create_task(unless_over(work(), must_end=must_end, left=left))
    await asyncio.sleep(0)
    left.set_result(None)
    must_end.set_result(None)
    with pytest.raises(ClientLeft):
        await task
    assert cleaned
    running.left.set_result(None)
    with pytest.raises(ClientLeft):
        await running.task
