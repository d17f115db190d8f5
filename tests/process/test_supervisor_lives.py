"""The supervisor against a real program with knobs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.command import Command
from appliance.errors import EngineNotReadyError
from appliance.supervisor import Crash, Restart, State, Supervisor
from appliance.supervisor.oom_kills import OomKills
from tests.process.stages.supervisor import (
    MakeCommand,
    children,
    descriptor_count,
    eventually,
    is_alive,
    is_known,
    leave_file,
    read_pid,
)

QUICK = Restart(max_in_row=2, backoff_s=(0.02, 0.04), healthy_after_s=60.0)
STREAM = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: 70\r\n\r\n"
    + b'{"stream": true, "messages": [{"role": "user", "content": "hi"}]}'.ljust(70)
)


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    made = Supervisor()
    yield made
    await made.stop()


@pytest.fixture
async def restarting() -> AsyncIterator[Supervisor]:
    made = Supervisor(restart=QUICK)
    yield made
    await made.stop()


async def started(supervisor: Supervisor, command: Command) -> int:
    """Start the command, wait until it is ready, and return its pid."""
    supervisor.start(command)
    assert await supervisor.wait_ready() is None
    pid = supervisor.pid
    assert pid is not None
    return pid


async def failed_start(supervisor: Supervisor, command: Command) -> Crash:
    supervisor.start(command)
    crash = await supervisor.wait_ready()
    assert crash is not None
    assert supervisor.state is State.FAILED
    assert supervisor.crash is crash
    assert await supervisor.wait_failed() is crash
    return crash


async def test_it_waits_for_a_slow_load(supervisor: Supervisor, make_command: MakeCommand, socket_path: Path) -> None:
    supervisor.start(make_command("--load-seconds", "0.3"))
    assert supervisor.state.value == "starting"  # `is State.STARTING` would convince mypy that it stays so
    assert supervisor.pid is not None
    assert is_alive(supervisor.pid)
    assert await supervisor.wait_ready() is None
    assert supervisor.state.value == "ready"
    assert supervisor.ready_seconds is not None
    assert 0.3 <= supervisor.ready_seconds < 60
    pid = supervisor.pid
    await supervisor.stop()
    assert supervisor.state is State.STOPPED
    assert supervisor.pid != pid
    assert not is_known(pid)
    assert "e.sock" not in os.listdir(socket_path.parent)  # noqa: PTH208 - Path is not for async functions
    assert any("main: model loaded" in line for line in supervisor.log_tail)


async def test_sigterm_ignored_is_followed_by_sigkill(supervisor: Supervisor, make_command: MakeCommand) -> None:
    pid = await started(supervisor, make_command("--ignore-sigterm", stop_grace_s=0.3))
    begin = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - begin > 0.2  # of 0.3: a loop's clock may be another one
    assert supervisor.state is State.STOPPED
    assert not is_known(pid)


async def test_a_held_stream_does_not_hold_the_stop(
    supervisor: Supervisor, make_command: MakeCommand, socket_path: Path
) -> None:
    command = make_command("--hold-streams", "--chunks", "1000", "--chunk-interval", "0.02", stop_grace_s=0.3)
    pid = await started(supervisor, command)
    reader, writer = await asyncio.open_unix_connection(str(socket_path))
    writer.write(STREAM)
    await reader.readuntil(b"data: ")
    begin = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - begin > 0.2, "the fake engine should have held on until SIGKILL"
    assert not is_known(pid)
    writer.close()


async def test_death_before_ready_tells_the_first_error(supervisor: Supervisor, make_command: MakeCommand) -> None:
    crash = await failed_start(supervisor, make_command("--error-line", "no such tensor", "--die-before-ready", "1"))
    assert (crash.exit_code, crash.signal, crash.was_ready, crash.stalled) == (1, None, False, False)
    assert crash.first_error is not None
    assert crash.first_error.endswith("no such tensor")
    assert crash.log[-1].endswith("bye"), "the cause is not the last line"
    assert crash.describe() == f"exited with code 1 before it was ready: {crash.first_error}"


async def test_death_before_ready_is_not_tried_again(restarting: Supervisor, make_command: MakeCommand) -> None:
    crash = await failed_start(restarting, make_command("--port-taken"))
    assert restarting.restarts == 0
    assert "Address already in use" in crash.describe()


async def test_death_after_ready_restarts_and_keeps_the_crash(
    restarting: Supervisor, make_command: MakeCommand
) -> None:
    first = await started(restarting, make_command())
    os.kill(first, signal.SIGSEGV)
    await eventually(lambda: restarting.restarts == 1)
    assert await restarting.wait_ready() is None
    assert restarting.pid not in (None, first)
    assert not is_known(first)
    crash = restarting.crash
    assert crash is not None
    assert crash.was_ready
    assert crash.signal == signal.SIGSEGV
    assert "SIGSEGV (segmentation fault) while serving" in crash.describe()


async def kill_when_ready(supervisor: Supervisor) -> int:
    """Kill the ready program. Returns its pid once the supervisor has noticed."""
    assert await supervisor.wait_ready() is None
    pid = supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: supervisor.pid != pid)
    return pid


async def test_what_would_die_of_the_same_again_is_not_tried_again(make_command: MakeCommand) -> None:
    supervisor = Supervisor(restart=Restart(backoff_s=(600.0,), not_after=frozenset({signal.SIGILL})))
    os.kill(await started(supervisor, make_command()), signal.SIGILL)
    crash = await asyncio.wait_for(supervisor.wait_failed(), 60)
    assert (crash.signal, crash.was_ready, supervisor.restarts) == (signal.SIGILL, True, 0)


async def test_restarts_are_exhausted(restarting: Supervisor, make_command: MakeCommand) -> None:
    restarting.start(make_command())
    pids = {await kill_when_ready(restarting) for _ in range(QUICK.max_in_row + 1)}
    crash = await asyncio.wait_for(restarting.wait_failed(), 60)
    assert restarting.state is State.FAILED
    assert restarting.restarts == QUICK.max_in_row
    assert crash.signal == signal.SIGKILL
    assert len(pids) == QUICK.max_in_row + 1


@pytest.mark.parametrize(("counts", "found"), [((3, 4), 1), ((3, 3), 0), ((None, 4), None), ((3, None), None)], ids=str)
async def test_memory_kills_are_counted_from_start_to_end(
    supervisor: Supervisor, make_command: MakeCommand, counts: tuple[int | None, int | None], found: int | None
) -> None:
    counter = iter(counts)
    await started(supervisor, replace(make_command(), oom_kills=lambda: next(counter)))
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    crash = await asyncio.wait_for(supervisor.wait_failed(), 60)
    assert (crash.signal, crash.oom_kills) == (signal.SIGKILL, found)


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ([3, 4, 4, 4], 0),  # another process, long ago: the engine lived on
        ([3, 3, 4, 4], 1),  # a part of it, shortly before its end
        ([3, 3, 3, 4], 1),
        ([3, 4, 4, 5], 1),
        ([3, None, None, 4], None),
    ],
    ids=str,
)
def test_a_memory_kill_that_an_engine_outlived_is_not_its_end(counts: list[int | None], found: int | None) -> None:
    counter = iter(counts)
    kills = OomKills(lambda: next(counter), lately_s=0.0)
    kills.note()
    kills.note()
    assert kills.lately() == found


async def test_healthy_time_ends_the_row(make_command: MakeCommand) -> None:
    supervisor = Supervisor(restart=Restart(max_in_row=1, backoff_s=(0.01,), healthy_after_s=0.0))
    supervisor.start(make_command())
    for _ in range(3):
        await kill_when_ready(supervisor)
    assert await supervisor.wait_ready() is None
    assert supervisor.restarts == 3
    await supervisor.stop()
    assert supervisor.state is State.STOPPED


async def test_death_while_serving_tells_an_error_of_that_time(
    supervisor: Supervisor, make_command: MakeCommand, socket_path: Path
) -> None:
    await started(supervisor, make_command("--error-line", "only while loading", "--die-on-request"))
    _, writer = await asyncio.open_unix_connection(str(socket_path))
    writer.write(STREAM)
    crash = await asyncio.wait_for(supervisor.wait_failed(), 60)
    writer.close()
    assert (crash.exit_code, crash.was_ready) == (1, True)
    assert crash.first_error is not None
    assert crash.first_error.endswith("fake engine was asked to die")


async def test_stop_during_backoff(make_command: MakeCommand) -> None:
    supervisor = Supervisor(restart=Restart(backoff_s=(600.0,)))
    pid = await started(supervisor, make_command())
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: supervisor.state is State.BACKOFF)
    assert supervisor.pid is None
    assert supervisor.crash is not None
    assert "memory killer" in supervisor.crash.describe()
    await supervisor.stop()
    assert supervisor.state is State.STOPPED


async def grandchild_of(pid_file: Path) -> int:
    await eventually(pid_file.exists)
    pid = read_pid(pid_file)
    assert is_alive(pid)
    return pid


async def test_a_detached_grandchild_goes_with_a_stop(
    supervisor: Supervisor, make_command: MakeCommand, tmp_path: Path
) -> None:
    await started(supervisor, make_command("--double-fork", "--pid-file", str(tmp_path / "pid")))
    grandchild = await grandchild_of(tmp_path / "pid")
    await supervisor.stop()
    assert not is_alive(grandchild)


async def test_a_detached_grandchild_goes_with_a_crash(
    supervisor: Supervisor, make_command: MakeCommand, tmp_path: Path
) -> None:
    command = make_command("--double-fork", "--pid-file", str(tmp_path / "pid"), "--die-before-ready", "3")
    crash = await failed_start(supervisor, command)
    assert crash.exit_code == 3
    assert not is_alive(read_pid(tmp_path / "pid"))


async def test_a_flooded_log_holds_nothing_up(make_command: MakeCommand) -> None:
    seen = [0]

    def count(line: str) -> None:
        seen[0] += "flood line" in line

    supervisor = Supervisor(on_line=count)
    await started(supervisor, make_command("--flood-log", "100000"))
    assert len(supervisor.log_tail) <= 200
    await supervisor.stop()
    assert seen[0] == 100_000


async def test_a_busy_loop_does_not_block_the_engine(supervisor: Supervisor, make_command: MakeCommand) -> None:
    # 9,000 lines of 90 bytes are more than a pipe holds by default (64 KiB) and less than ours (1 MiB).
    supervisor.start(make_command("--flood-log", "9000", "--die-before-ready", "7"))
    pid = supervisor.pid
    assert pid is not None
    deadline = time.monotonic() + 60
    while is_alive(pid):  # the loop stands still meanwhile, as it does while modules are imported
        assert time.monotonic() < deadline, "the engine waits for somebody to read its log"
        time.sleep(0.01)  # noqa: ASYNC251 - standing still is the point
    crash = await supervisor.wait_ready()
    assert crash is not None
    assert crash.exit_code == 7
    assert crash.log[-1].startswith("0.00.000.000 I flood line 8999 ")


async def test_a_hung_engine_is_stalled(supervisor: Supervisor, make_command: MakeCommand) -> None:
    crash = await failed_start(supervisor, make_command("--hang", stall_timeout_s=0.4))
    assert crash.stalled
    assert crash.seconds >= 0.4
    assert crash.signal == signal.SIGKILL
    assert crash.describe().startswith("made no progress")
    assert "memory killer" not in crash.describe()


async def test_an_unanswered_readiness_check_does_not_hide_a_stall(
    supervisor: Supervisor, make_command: MakeCommand
) -> None:
    async def never() -> bool:
        await asyncio.Event().wait()
        return True

    crash = await failed_start(supervisor, replace(make_command("--hang", stall_timeout_s=0.4), is_ready=never))
    assert crash.stalled


async def test_stop_while_starting(supervisor: Supervisor, make_command: MakeCommand) -> None:
    supervisor.start(make_command("--load-seconds", "600"))
    pid = supervisor.pid
    assert pid is not None
    waiting = asyncio.create_task(supervisor.wait_ready())
    await supervisor.stop()
    assert supervisor.state is State.STOPPED
    assert not is_known(pid)
    crash = await waiting
    assert crash is not None
    assert crash.stopped
    assert crash.describe() == "was stopped on request before it was ready"


async def test_stop_twice_at_once_and_again(supervisor: Supervisor, make_command: MakeCommand) -> None:
    await supervisor.stop()
    await started(supervisor, make_command())
    await asyncio.gather(supervisor.stop(), supervisor.stop())
    await supervisor.stop()
    assert supervisor.state is State.STOPPED
    await started(supervisor, make_command())
    assert supervisor.crash is None


async def test_a_stale_socket_is_replaced(supervisor: Supervisor, make_command: MakeCommand, socket_path: Path) -> None:
    leave_file(socket_path)
    await started(supervisor, make_command())


async def test_a_socket_path_that_is_a_folder_is_told_in_words(
    supervisor: Supervisor, make_command: MakeCommand, socket_path: Path
) -> None:
    os.mkdir(socket_path)  # noqa: PTH102 - Path.mkdir is not for async functions
    with pytest.raises(EngineNotReadyError, match=r"socket cannot be replaced: .*e\.sock: Is a directory"):
        supervisor.start(make_command())
    assert supervisor.state is State.STOPPED


async def test_a_missing_binary_is_told_in_words(supervisor: Supervisor, make_command: MakeCommand) -> None:
    descriptors = descriptor_count()
    with pytest.raises(EngineNotReadyError, match="cannot be started: /nowhere/llama-server: No such file") as caught:
        supervisor.start(replace(make_command(), argv=("/nowhere/llama-server", "-m", "x")))
    assert caught.value.exit_code == 43
    assert supervisor.state is State.STOPPED
    assert descriptor_count() == descriptors


async def test_a_binary_that_vanishes_fails_at_the_restart(
    restarting: Supervisor, make_command: MakeCommand, tmp_path: Path
) -> None:
    binary = tmp_path / "engine"
    command = make_command()
    binary.write_text("#!/bin/sh\nexec " + shlex.join(command.argv) + "\n")
    binary.chmod(0o755)
    pid = await started(restarting, replace(command, argv=(str(binary),)))
    binary.unlink()
    os.kill(pid, signal.SIGKILL)
    crash = await asyncio.wait_for(restarting.wait_failed(), 60)
    assert crash.not_executed
    assert crash.describe().startswith("could not be started again: the engine cannot be started: ")


async def test_a_readiness_check_that_raises_is_a_bug_for_everybody(
    make_command: MakeCommand, socket_path: Path
) -> None:
    async def broken() -> bool:
        raise LookupError(socket_path)

    supervisor = Supervisor()
    supervisor.start(replace(make_command(), is_ready=broken))
    pid = supervisor.pid
    assert pid is not None
    with pytest.raises(LookupError, match=r"e\.sock"):
        await supervisor.wait_ready()
    with pytest.raises(LookupError, match=r"e\.sock"):
        await supervisor.stop()
    assert not is_known(pid)


async def test_a_readiness_check_that_swallows_its_cancellation_does_not_hide_an_exit(
    supervisor: Supervisor, make_command: MakeCommand
) -> None:
    async def stubborn() -> bool:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return False

    command = replace(make_command("--die-before-ready", "1"), is_ready=stubborn)
    crash = await asyncio.wait_for(failed_start(supervisor, command), 60)
    assert crash.exit_code == 1


async def test_no_descriptor_and_no_child_is_left_after_many_lives(
    supervisor: Supervisor, make_command: MakeCommand
) -> None:
    await started(supervisor, make_command())
    await supervisor.stop()
    descriptors, others = descriptor_count(), children()
    for _ in range(3):
        await started(supervisor, make_command())
        await supervisor.stop()
    assert descriptor_count() <= descriptors
    assert children() <= others  # of which some may have gone meanwhile


async def test_another_thread_may_not_start(make_command: MakeCommand) -> None:
    caught: list[BaseException] = []

    async def start() -> None:
        try:
            Supervisor().start(make_command())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(start()))
    thread.start()
    await eventually(lambda: not thread.is_alive())
    thread.join()
    assert "outside the main thread" in str(caught[0])


async def test_a_second_start_is_refused(supervisor: Supervisor, make_command: MakeCommand) -> None:
    await started(supervisor, make_command())
    with pytest.raises(RuntimeError, match="while the engine is ready"):
        supervisor.start(make_command())


async def test_waiting_before_any_start_is_refused(supervisor: Supervisor) -> None:
    with pytest.raises(RuntimeError, match="never started"):
        await supervisor.wait_ready()
