"""What the real engine tells of its work, and what a client sees when it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.process.stages.boot import Home
from tests.process.stages.engine import find_model
from tests.process.stages.front import front_of
from tests.process.stages.real import real_home
from tests.process.stages.supervisor import eventually

MESSAGES = [{"role": "user", "content": "Count to a thousand."}]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    model = find_model()
    made = real_home(tmp_path / "home")
    (made.data / "models" / model.name).symlink_to(model)
    return made


async def test_what_it_tells_of_its_work_differs_once_it_has_worked(home: Home) -> None:
    async with front_of(home, stall_timeout_s=60.0, patience_s=600.0) as front:
        served = front.served
        assert served.host.plan is not None
        command = served.command(served.host.plan, served.socket_path)
        assert command.work_done is not None
        assert command.is_answering is not None
        assert await command.is_answering()
        said = [await command.work_done()]
        for _ in range(2):
            assert (await front.ask(messages=MESSAGES, max_tokens=2))[0] == 200
            said += [await command.work_done(), await command.work_done()]
        assert None not in said
        before, first, again, second, _ = said
        assert before != first == again != second


async def test_a_client_is_told_that_it_hangs_and_it_answers_again(home: Home) -> None:
    async with front_of(home, stall_timeout_s=1.0, patience_s=600.0) as front:
        supervisor = front.served.host.supervisor
        assert supervisor is not None
        assert supervisor.pid is not None
        asking = asyncio.create_task(front.ask(messages=MESSAGES, stream=True, max_tokens=4000, ignore_eos=True))
        await eventually(lambda: front.asked == 1)
        os.kill(supervisor.pid, signal.SIGSTOP)
        _, answer = await asking
        assert b"the engine hung while it worked on this request" in answer
        assert front.hangs == 1

        async def answers() -> bool:
            return (await front.ask(messages=MESSAGES, max_tokens=2))[0] == 200

        await eventually(answers)
