"""The supervisor's side of a hang: a real program, and somebody who says that requests wait for it."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from appliance.command import Command, Silence
from appliance.supervisor import Crash, Restart, State, Supervisor
from tests.process.stages.supervisor import MakeCommand, eventually

QUICK = Restart(max_in_row=2, backoff_s=(0.02,), healthy_after_s=60.0)


@dataclass
class Waiting:
    """Requests that get nothing."""

    requests: int = 1
    patience_s: float = 600.0
    seconds: float = 0.0
    told: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.seconds = 0.0

    def pass_time(self, seconds: float) -> Silence:
        self.seconds += seconds if self.requests else 0.0
        return Silence(requests=self.requests, seconds=self.seconds, patience_s=self.patience_s)

    def give_up(self, why: str) -> None:
        self.told.append(why)


@asynccontextmanager
async def serving(command: Command, demand: Waiting) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(restart=QUICK)
    own = command.is_at_work or (lambda: False)

    def is_at_work() -> bool:
        """True while the program starts too: on a busy machine it may get no CPU for longer than these tests wait."""
        return supervisor.state is State.STARTING or own()

    supervisor.start(replace(command, demand=demand, is_at_work=is_at_work))
    assert await supervisor.wait_ready() is None
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def test_one_that_does_nothing_for_those_who_wait_is_killed_and_started_again(make_command: MakeCommand) -> None:
    demand = Waiting()
    command = make_command("--ignore-sigterm", "--log-every-s", "0.05", stall_timeout_s=0.4, stop_grace_s=0.1)
    async with serving(command, demand) as supervisor:
        first = supervisor.pid
        await eventually(lambda: bool(demand.told))
        demand.requests = 0
        await eventually(lambda: supervisor.restarts == 1 and supervisor.state is State.READY)
        crash = supervisor.crash
        assert crash is not None
        assert (crash.stalled, crash.was_ready, crash.signal) == (True, True, signal.SIGKILL)
        assert crash.hung == demand.told[0]
        assert crash.describe().startswith("hung and was killed (1 request got nothing for")
        assert supervisor.pid != first


async def test_one_that_hangs_at_once_each_time_is_given_up(make_command: MakeCommand) -> None:
    demand = Waiting()
    async with serving(make_command(stall_timeout_s=0.4), demand) as supervisor:
        crash = await supervisor.wait_failed()
        assert (crash.hung, len(demand.told)) == (demand.told[-1], 3)


async def test_work_on_a_gpu_counts(make_command: MakeCommand) -> None:
    asked: list[bool] = []

    def is_at_work() -> bool:
        asked.append(len(asked) < 3)
        return asked[-1]

    demand = Waiting()
    async with serving(replace(make_command(stall_timeout_s=0.4), is_at_work=is_at_work), demand):
        await eventually(lambda: bool(demand.told))
    assert asked == [True, True, True, False]


async def test_nobody_who_waits_is_no_hang(make_command: MakeCommand) -> None:
    demand = Waiting(requests=0)
    async with serving(make_command(stall_timeout_s=0.4), demand) as supervisor:
        await asyncio.sleep(1.0)  # nothing else can be waited for: nothing happens
        assert (supervisor.state, demand.told) == (State.READY, [])


@pytest.mark.parametrize("requests", [0, 1])
async def test_a_machine_that_was_suspended_is_no_hang(make_command: MakeCommand, requests: int) -> None:
    """A `docker pause`: all stands still, and the clock goes on."""
    demand = Waiting(requests=requests)
    command = make_command(stall_timeout_s=1.2)
    command = replace(command, is_answering=command.is_ready)
    async with serving(command, demand) as supervisor:
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        time.sleep(2.5)  # noqa: ASYNC251 - standing still is the point
        os.kill(supervisor.pid, signal.SIGCONT)
        await asyncio.sleep(0.2)
        assert (supervisor.state, demand.told) == (State.READY, [])


@pytest.mark.parametrize("requests", [0, 1])
async def test_a_lack_of_descriptors_here_is_no_hang_of_the_engine(make_command: MakeCommand, requests: int) -> None:
    demand = Waiting(requests=requests)
    command = make_command(stall_timeout_s=0.8)
    async with serving(replace(command, is_answering=command.is_ready), demand) as supervisor:
        await asyncio.sleep(0.1)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(1)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            await asyncio.sleep(1.5)  # nothing else can be waited for: nothing happens
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (supervisor.state, demand.told) == (State.READY, [])


@pytest.mark.parametrize("answers", ["no", "never"])
async def test_one_that_does_not_answer_at_rest_is_found(make_command: MakeCommand, answers: str) -> None:
    async def ask() -> bool:
        if answers == "never":
            await asyncio.Event().wait()
        return False

    demand = Waiting(requests=0)
    async with serving(replace(make_command(stall_timeout_s=0.4), is_answering=ask), demand):
        await eventually(lambda: bool(demand.told))
        assert "while idle" in demand.told[0]


@pytest.mark.parametrize(
    ("said", "is_lost"),
    [
        (lambda n: n, False),  # it works on
        (lambda _: 7, True),  # it answers, and does nothing
        (lambda _: None, True),  # it does not tell
        (lambda n: None if n == 1 else n, False),  # it did not answer once
    ],
)
async def test_patience_lasts_as_long_as_it_tells_that_it_works(
    make_command: MakeCommand, said: Callable[[int], int | None], is_lost: bool
) -> None:
    asked = 0

    async def work_done() -> int | None:
        nonlocal asked
        asked += 1
        return said(asked)

    demand = Waiting(patience_s=0.4)
    command = replace(make_command(stall_timeout_s=0.8), work_done=work_done, is_at_work=lambda: True)
    async with serving(command, demand):
        await eventually(lambda: bool(demand.told) or asked >= 4)
        assert bool(demand.told) is is_lost


@pytest.mark.parametrize("lacks", [(1,), (2,), (1, 2, 3)])
async def test_who_cannot_ask_what_was_worked_off_kills_nothing(
    make_command: MakeCommand, lacks: tuple[int, ...]
) -> None:
    """No descriptor was left for the question: it is asked again, and then the engine tells."""
    asked = 0

    async def work_done() -> int:
        nonlocal asked
        asked += 1
        if asked in lacks:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return asked

    demand = Waiting(patience_s=0.4)
    command = replace(make_command(stall_timeout_s=0.8), work_done=work_done, is_at_work=lambda: True)
    async with serving(command, demand):
        await eventually(lambda: bool(demand.told) or asked >= 6)
        assert not demand.told


async def test_who_cannot_ask_one_at_rest_kills_nothing(make_command: MakeCommand) -> None:
    asked = 0

    async def ask() -> bool:
        nonlocal asked
        asked += 1
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    demand = Waiting(requests=0)
    async with serving(replace(make_command(stall_timeout_s=0.4), is_answering=ask), demand):
        await eventually(lambda: bool(demand.told) or asked >= 16)  # twice as often as it takes to be found
        assert not demand.told


def test_one_that_outlived_sigkill_is_not_started_beside_itself() -> None:
    crash = Crash(exit_code=None, signal=None, first_error=None, hung="it sleeps", stalled=True, seconds=9.0)
    assert QUICK.is_over(crash, 1)
    assert crash.describe().startswith("hung and did not end even after SIGKILL (it sleeps)")
    assert not QUICK.is_over(replace(crash, signal=signal.SIGKILL), 1)
    assert not QUICK.is_over(replace(crash, gave_up=True, hung=""), 1)
