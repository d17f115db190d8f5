"""Nothing is left behind when the supervising program itself goes: killed, or without a stop()."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from appliance.supervisor import Supervisor
from tests.process.stages.supervisor import MakeCommand, children, descriptor_count, is_alive, is_known, read_pid

ROOT = Path(__file__).parents[2]
DRIVER = """
import asyncio, os, sys
from pathlib import Path
from tests.process.stages.supervisor import children, eventually, fake_command
from appliance.supervisor import State, Supervisor, become_subreaper

async def drive(verb, socket_path, knobs):
    become_subreaper()
    supervisor = Supervisor()
    supervisor.start(fake_command(Path(socket_path), *knobs))
    assert await supervisor.wait_ready() is None
    print(supervisor.pid, flush=True)
    if verb == "wait":
        await asyncio.Event().wait()
    os.kill(supervisor.pid, 9)
    await supervisor.wait_failed()
    print("children left" if children() else "no children left", flush=True)

asyncio.run(drive(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""


def start_driver(verb: str, socket_path: Path, *knobs: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, verb, str(socket_path), *knobs],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.005)


def test_the_engine_dies_with_a_killed_supervisor(socket_path: Path) -> None:
    with start_driver("wait", socket_path, "--ignore-sigterm") as driver:
        assert driver.stdout is not None
        engine = int(driver.stdout.readline())
        assert is_alive(engine)
        driver.kill()
        driver.wait()
        wait_until(lambda: not is_alive(engine))


def test_a_subreaper_reaps_what_a_killed_engine_left(socket_path: Path, tmp_path: Path) -> None:
    with start_driver("kill", socket_path, "--double-fork", "--pid-file", str(tmp_path / "pid")) as driver:
        assert driver.stdout is not None
        engine = int(driver.stdout.readline())
        assert driver.stdout.readline() == "no children left\n"
        assert driver.wait() == 0
    assert not is_known(engine)
    assert not is_known(read_pid(tmp_path / "pid")), "reaped, not only killed"


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_engine_goes_with_its_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop], make_command: MakeCommand
) -> None:
    async def forget_to_stop() -> int:
        supervisor = Supervisor()
        supervisor.start(make_command("--ignore-sigterm"))
        assert await supervisor.wait_ready() is None
        assert supervisor.pid is not None
        return supervisor.pid

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.get_loop()  # libuv opens two descriptors for signals with its first loop, and keeps them
    before, others = descriptor_count(), children()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        engine = runner.run(forget_to_stop())
    assert not is_known(engine)
    assert children() <= others  # of which some may have gone meanwhile
    assert descriptor_count() <= before
