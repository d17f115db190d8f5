"""The same lives under uvloop, which is what serves: libuv polls descriptors and children in its own way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from appliance.supervisor import Restart, Supervisor
from tests.process import test_supervisor_lives as lives
from tests.process.stages.supervisor import MakeCommand

Scenario = Callable[[Supervisor, MakeCommand], Awaitable[None]]
SCENARIOS: list[tuple[Scenario, Restart | None]] = [
    (lives.test_sigterm_ignored_is_followed_by_sigkill, None),
    (lives.test_death_before_ready_tells_the_first_error, None),
    (lives.test_death_after_ready_restarts_and_keeps_the_crash, lives.QUICK),
    (lives.test_restarts_are_exhausted, lives.QUICK),
    (lives.test_a_hung_engine_is_stalled, None),
    (lives.test_stop_while_starting, None),
    (lives.test_stop_twice_at_once_and_again, None),
    (lives.test_a_busy_loop_does_not_block_the_engine, None),
    (lives.test_no_descriptor_and_no_child_is_left_after_many_lives, None),
]


@pytest.mark.parametrize(("scenario", "restart"), SCENARIOS, ids=[scenario.__name__ for scenario, _ in SCENARIOS])
def test_under_uvloop(scenario: Scenario, restart: Restart | None, make_command: MakeCommand) -> None:
    async def live() -> None:
        supervisor = Supervisor(restart=restart)
        try:
            await scenario(supervisor, make_command)
        finally:
            await supervisor.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
