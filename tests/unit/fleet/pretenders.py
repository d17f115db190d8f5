"""Members of a fleet that only pretend to load, and the memory that they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from io import StringIO

from appliance.console.report import Report
from appliance.fleet.admit import Places, Variant
from appliance.fleet.fleet import Fleet
from appliance.fleet.member import Weighed
from appliance.keep_alive import FOREVER

ROOM_MIB = 100.0


class Memory:
    """The memory of the machine that the members share."""

    def __init__(self, mib: float = ROOM_MIB) -> None:
        self.mib = mib
        self.held: dict[str, float] = {}

    @property
    def free_mib(self) -> float:
        return self.mib - sum(self.held.values())


class Pretender:
    """A member whose load takes until `may_load` is set, and that holds exactly what it said."""

    def __init__(
        self, name: str, mib: float, memory: Memory, *, smaller: Sequence[float] = (), pin: bool = False
    ) -> None:
        self.name = name
        self.is_pinned = pin
        self.keep_alive_s = FOREVER
        self.reload_s, self.cache_s = mib, 0.0
        self.progress = f"{name} is being loaded"
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.fails: BaseException | None = None
        self.fails_to_prepare: Exception | None = None
        self.fails_to_weigh: Exception | None = None
        self.fails_to_unload: Exception | None = None
        self.may_end = asyncio.Event()  # a load that was cancelled ends with it
        self.may_end.set()
        self.is_preparing = 0
        self.loads = 0
        self.cancelled = 0
        self._sizes = (mib, *smaller)
        self._memory = memory

    @property
    def holds(self) -> Places:
        return {"host": self._memory.held.get(self.name, 0.0)}

    async def prepare(self) -> None:
        assert not self.is_preparing, "prepared twice at the same time"
        self.is_preparing += 1
        try:
            await self.may_prepare.wait()
            if self.fails_to_prepare is not None:
                raise self.fails_to_prepare
        finally:
            await self.may_end.wait()
            self.is_preparing -= 1

    async def weigh(self, returnable: Mapping[str, Places]) -> Weighed:
        await asyncio.sleep(0)
        if self.fails_to_weigh is not None:
            raise self.fails_to_weigh
        variants = tuple(
            Variant(key=str(mib), needs={"host": mib}, speed=10.0 - number) for number, mib in enumerate(self._sizes)
        )
        return Weighed(variants=variants, free={"host": self._memory.free_mib})

    async def load(self) -> None:
        self.loads += 1
        mib = next((mib for mib in self._sizes if mib <= self._memory.free_mib), None)
        assert mib is not None, "loaded without room"
        self._memory.held[self.name] = mib
        try:
            await self.may_load.wait()
            if self.fails is not None:
                raise self.fails
        except BaseException as error:
            self.cancelled += isinstance(error, asyncio.CancelledError)
            await self.may_end.wait()
            del self._memory.held[self.name]
            raise

    async def unload(self) -> None:
        await asyncio.sleep(0)
        del self._memory.held[self.name]
        if self.fails_to_unload is not None:
            raise self.fails_to_unload


@asynccontextmanager
async def running(
    *members: Pretender,
    turn_s: float = 20.0,
    lock: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    log: StringIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Fleet]:
    """A fleet whose first member is loaded."""
    fleet = Fleet(Report("json", log or StringIO()), turn_s=turn_s, lock=lock, clock=clock)
    for member in members:
        fleet.add(member)
    fleet.want(members[0].name)
    run = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(20):
            await until(lambda: fleet.is_loaded(members[0].name) or run.done())
            if run.done():
                run.result()
            yield fleet
            if run.done():
                run.result()
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


async def until(is_true: object) -> None:
    assert callable(is_true)
    while not is_true():  # noqa: ASYNC110 - many conditions, none of which has an event
        await asyncio.sleep(0.005)


async def ask(fleet: Fleet, name: str, *, seconds: float = 0.0, wait_s: float = 10.0) -> str:
    async with fleet.held(name, wait_s=wait_s):
        await asyncio.sleep(seconds)
    return name
