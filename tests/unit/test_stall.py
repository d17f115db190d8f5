"""What counts as silence of a program that should work."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from appliance.supervisor.child import Child, Progress
from appliance.supervisor.stall import until_stalled

LIMIT_S = 0.2


class Silent:
    """A program that gets no CPU time and says nothing."""

    def __init__(self, *, is_runnable: bool) -> None:
        self.is_runnable = is_runnable

    def seen_progress(self) -> Progress:
        return Progress(lines=0, cpu_s=1.0, major_faults=0, is_runnable=self.is_runnable)

    async def is_at_work(self) -> bool:
        return False


async def test_a_program_that_waits_for_a_cpu_is_not_stalled() -> None:
    program = Silent(is_runnable=True)
    waiting = asyncio.create_task(until_stalled(cast("Child", program), LIMIT_S))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 4 * LIMIT_S)
    program.is_runnable = False
    await asyncio.wait_for(waiting, 60)


async def test_a_program_that_sleeps_is_stalled() -> None:
    await asyncio.wait_for(until_stalled(cast("Child", Silent(is_runnable=False)), LIMIT_S), 60)
