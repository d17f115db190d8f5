"""A child that hangs in the driver keeps nobody waiting, and leaves no zombie when it ends after all.

No time is measured: what would be waited for here comes only after the wait, or never.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.probe.load.watch import Watch
from appliance.run import RunTimeout, run
from tests.fakes.machines import hardware_of
from tests.process.stages.nvml import PutMachine
from tests.process.stages.supervisor import eventually

PROGRAM = Path(__file__).parents[1] / "fakes/unkillable.py"
FOR_EVER_S = 3600.0
LIMIT_S = 60.0


@dataclass(frozen=True)
class Held:
    """A child that no signal ends until `release` is there."""

    folder: Path

    @property
    def release(self) -> Path:
        return self.folder / "release"

    @property
    def pid_file(self) -> Path:
        return self.folder / "pid"

    def argv(self, line: str = "") -> tuple[str, ...]:
        return (sys.executable, str(PROGRAM), str(self.pid_file), str(self.release), line)

    def is_there(self) -> bool:
        """True once the child is held. Skips the test if the kernel does not allow tracing."""
        if not self.pid_file.exists():
            return False
        if (text := self.pid_file.read_text()).startswith("error"):
            pytest.skip(f"no process can be traced here: {text}")
        return True

    @property
    def state(self) -> str:
        """The child's state: Z if it is a zombie, "" if it is gone."""
        try:
            stat = Path(f"/proc/{self.pid_file.read_text()}/stat").read_text()
        except FileNotFoundError:
            return ""
        return stat.rpartition(")")[2].split()[0]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    child = Held(tmp_path)
    yield child
    child.release.touch()


async def test_cancelled_while_the_driver_hangs_it_ends_without_its_answer(machine_environment: PutMachine) -> None:
    environment = machine_environment("2x4090", hang__nvmlDeviceGetCount_v2=1)
    entering = asyncio.create_task(Watch(hardware_of("2x4090"), environment, timeout_s=FOR_EVER_S).__aenter__())
    await asyncio.sleep(0.5)
    entering.cancel()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await entering


@pytest.mark.parametrize("line", ["", "watching"])
async def test_a_child_that_cannot_be_killed_is_not_waited_for_and_leaves_no_zombie(held: Held, line: str) -> None:
    """Measuring is cancelled before its first look, or in the block. The child ends only afterwards."""
    watch = Watch(hardware_of("2x4090"), {}, child=held.argv(line), timeout_s=FOR_EVER_S)

    async def measure() -> None:
        async with watch:
            await asyncio.sleep(FOR_EVER_S)

    measuring = asyncio.create_task(measure())
    await eventually(held.is_there, timeout_s=LIMIT_S)
    measuring.cancel()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await measuring
    await eventually(lambda: held.state == "Z", timeout_s=LIMIT_S)  # killed, and nobody was told
    held.release.touch()
    await eventually(lambda: held.state == "", timeout_s=LIMIT_S)


async def test_cancelled_while_its_last_look_is_waited_for(held: Held) -> None:
    watch = Watch(hardware_of("2x4090"), {}, child=held.argv("watching"), timeout_s=FOR_EVER_S)
    is_leaving = asyncio.Event()

    async def measure() -> None:
        async with watch:
            is_leaving.set()

    measuring = asyncio.create_task(measure())
    await eventually(held.is_there, timeout_s=LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        await is_leaving.wait()
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring


async def test_a_command_that_outlives_its_killing_keeps_nobody_waiting(held: Held) -> None:
    with pytest.raises(RunTimeout):
        run(held.argv(), timeout_s=FOR_EVER_S, is_wanted=lambda: not held.is_there())
    await eventually(lambda: held.state == "Z", timeout_s=LIMIT_S)
    held.release.touch()
    waiting = [thread for thread in threading.enumerate() if thread.name == f"end of {held.pid_file.read_text()}"]
    for thread in waiting:
        thread.join(LIMIT_S)
    assert held.state == ""
