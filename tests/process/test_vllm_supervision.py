"""vLLM's processes under the supervisor: whichever is killed, nothing of the tree is left and it serves again."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Command
from appliance.engines.vllm.process.endings import as_error
from appliance.engines.vllm.startup.caches import Caches
from appliance.engines.vllm.startup.progress import CompileCache, compile_cache
from appliance.engines.vllm.startup.ready import one_token
from appliance.errors import EngineNotReadyError
from appliance.supervisor import Crash, Restart, State, Supervisor, become_subreaper
from appliance.supervisor.reaper import PR_SET_CHILD_SUBREAPER
from tests.process.stages.supervisor import eventually, is_known
from tests.process.stages.vllm import family, vllm_command

TWO_RANKS = ("--tensor-parallel-size", "2")
WAITING = "No available shared memory broadcast block found in 60 seconds."
ENDLESS = {"model": "m", "prompt": "a", "max_tokens": 10**6, "stream": True}


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    become_subreaper()
    yield
    # Orphans of other tests' programs would otherwise become children of this process.
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


async def ask(socket_path: Path, path: str, body: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_unix_connection(str(socket_path))
    method = "POST" if data else "GET"
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: e\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    )
    writer.write(data)
    return reader, writer


async def counts(socket_path: Path) -> dict[str, int]:
    reader, writer = await ask(socket_path, "/fake/ledger")
    found: dict[str, int] = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["counts"]
    writer.close()
    return found


async def streaming(socket_path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin an endless stream and return it in its middle."""
    reader, writer = await ask(socket_path, "/v1/completions", ENDLESS)
    assert b"word" in await reader.readuntil(b"word")
    return reader, writer


def leftovers(segments: Path) -> list[str]:
    """Return the names of shared memory that the engines made and that is still there."""
    return [name for name in segments.read_text().split() if Path(name).exists()]


async def failed(command: Command) -> Crash:
    supervisor = Supervisor()
    supervisor.start(command)
    try:
        crash = await supervisor.wait_ready()
    finally:
        await supervisor.stop()
    assert crash
    return crash


@pytest.mark.parametrize("member", range(4), ids=["api", "core", "rank0", "rank1"])
def test_whichever_process_is_killed_in_mid_stream_all_go_and_it_serves_again(
    member: int, socket_path: Path, tmp_path: Path
) -> None:
    segments = tmp_path / "segments"

    async def live() -> None:
        supervisor = Supervisor(restart=Restart(backoff_s=(0.01,)))
        command = vllm_command(socket_path, *TWO_RANKS, "--fake-segments", str(segments))
        supervisor.start(command)
        assert await supervisor.wait_ready() is None
        assert supervisor.pid
        old = family(supervisor.pid)
        assert len(old) == 4
        _, writer = await streaming(socket_path)
        os.kill(old[member], signal.SIGKILL)
        await eventually(lambda: supervisor.restarts == 1)
        assert not [pid for pid in old if is_known(pid)], "before the next one begins"
        assert await supervisor.wait_ready() is None
        assert supervisor.crash
        assert as_error(supervisor.crash).exit_code == 45
        writer.close()
        (await streaming(socket_path))[1].close()
        assert leftovers(segments) == segments.read_text().split()[-2:], "those of the one that serves"
        assert command.scratch
        assert len(list(command.scratch.iterdir())) == 1
        new = family(supervisor.pid)
        await supervisor.stop()
        assert not [pid for pid in new if is_known(pid)]
        assert leftovers(segments) == []
        assert not command.scratch.exists()

    asyncio.run(live())
    assert not socket_path.exists()


def test_an_exit_with_code_0_is_no_good_end(socket_path: Path) -> None:
    async def live() -> Crash:
        supervisor = Supervisor()
        supervisor.start(replace(vllm_command(socket_path), is_fatal=lambda _: False))
        assert await supervisor.wait_ready() is None
        assert supervisor.pid
        os.kill(family(supervisor.pid)[1], signal.SIGKILL)
        return await supervisor.wait_failed()

    crash = asyncio.run(live())
    found = as_error(crash)
    assert (crash.exit_code, found.exit_code) == (0, 45)
    assert "engine core exited unexpectedly" in found.message


@pytest.mark.parametrize("member", [1, 2], ids=["core", "worker"])
def test_one_that_lost_a_process_is_not_waited_for(member: int, socket_path: Path) -> None:
    """vLLM's watchdog looks every five seconds; here it never does."""

    async def live() -> tuple[Crash, bytes]:
        supervisor = Supervisor()
        # Long enough for its last words where others have the CPUs.
        supervisor.start(replace(vllm_command(socket_path, "--fake-watchdog-s", "600"), last_words_s=5.0))
        assert await supervisor.wait_ready() is None
        assert supervisor.pid
        tree = family(supervisor.pid)
        reader, writer = await streaming(socket_path)
        os.kill(tree[member], signal.SIGKILL)
        crash = await supervisor.wait_failed()
        assert not [pid for pid in tree if is_known(pid)]
        rest = await reader.read()
        writer.close()
        return crash, rest

    crash, rest = asyncio.run(live())
    found = as_error(crash)
    assert (crash.gave_up, crash.exit_code, crash.signal, found.exit_code) == (True, None, None, 45)
    assert "lost a process that it needs and was ended while serving" in found.message
    assert "unexpectedly" in found.message
    assert b'"error"' in rest, "its clients were told first"


def test_a_stop_that_the_engine_hangs_in_ends_all_the_same(socket_path: Path, tmp_path: Path) -> None:
    segments = tmp_path / "segments"

    async def live() -> None:
        supervisor = Supervisor()
        knobs = ("--fake-hang-at-sigterm", "--fake-segments", str(segments))
        supervisor.start(vllm_command(socket_path, *knobs, stop_grace_s=3.0))
        assert await supervisor.wait_ready() is None
        assert supervisor.pid
        tree = family(supervisor.pid)
        _, writer = await streaming(socket_path)
        await supervisor.stop()
        assert supervisor.state is State.STOPPED
        assert not [pid for pid in tree if is_known(pid)]
        assert leftovers(segments) == []
        writer.close()

    asyncio.run(live())


def test_one_that_dies_of_its_first_request_was_never_ready(socket_path: Path) -> None:
    """A pipeline on the CPU build does this: it reports that it is healthy, and dies with the first token."""
    crash = asyncio.run(failed(vllm_command(socket_path, "--fake-worker-error", "first")))
    found = as_error(crash)
    assert (crash.was_ready, crash.exit_code, found.exit_code) == (False, 0, 43)
    assert "AssertionError" in found.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has", 41),
        ("RuntimeError: Cannot find any model weights with `/m`", 30),
        ("KeyError: 'nobody knows'", 43),
    ],
)
def test_what_a_worker_died_of_as_it_loaded_is_the_cause(error: str, code: int, socket_path: Path) -> None:
    crash = asyncio.run(failed(vllm_command(socket_path, "--fake-worker-error", "load", "--fake-error", error)))
    found = as_error(crash)
    assert found.exit_code == code
    assert error in found.message
    assert any("Engine core initialization failed" in line for line in crash.log)


def test_a_start_that_hangs_is_stalled_although_it_says_that_it_waits(socket_path: Path) -> None:
    command = vllm_command(socket_path, "--fake-hang-at", "profile", "--fake-hang-line", WAITING, stall_timeout_s=3.0)
    crash = asyncio.run(failed(command))
    assert crash.stalled
    assert sum(WAITING in line for line in crash.log) > 1
    assert as_error(crash).exit_code == 43


def test_one_whose_gpu_works_is_not_stalled(socket_path: Path) -> None:
    asked: list[bool] = []

    def is_at_work() -> bool:
        asked.append(len(asked) < 3)
        return asked[-1]

    command = vllm_command(socket_path, "--fake-hang-at", "profile", stall_timeout_s=1.0)
    assert asyncio.run(failed(replace(command, is_at_work=is_at_work))).stalled
    assert asked == [True, True, True, False]


def test_readiness_asks_for_one_token_once_however_long_it_takes(socket_path: Path) -> None:
    async def live() -> None:
        supervisor = Supervisor()
        supervisor.start(vllm_command(socket_path, "--fake-interval", "2.5"))
        assert await supervisor.wait_ready() is None
        assert (await counts(socket_path))["POST /v1/completions"] == 1
        await supervisor.stop()

    asyncio.run(live())


def test_an_engine_that_refuses_its_first_request_is_no_endless_start(socket_path: Path) -> None:
    async def live() -> None:
        supervisor = Supervisor()
        command = vllm_command(socket_path)
        supervisor.start(replace(command, is_ready=one_token(socket_path, "other", is_embedding=False)))
        with pytest.raises(EngineNotReadyError, match=r"refused its first request.*404.*`other` does not exist"):
            await supervisor.wait_ready()

    asyncio.run(live())


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept in order", "as vLLM does it"])
def test_a_compile_cache_that_was_cut_off_breaks_no_later_start(
    is_kept: bool, socket_path: Path, tmp_path: Path
) -> None:
    """A kill in the middle of writing cuts the file off. The second row shows that such a file breaks a start."""
    build_dir = tmp_path / "cache/b1"

    def command(*knobs: str) -> Command:
        made = vllm_command(socket_path, *knobs)
        environment = {**made.environment, "VLLM_CACHE_ROOT": str(build_dir / "vllm")}
        return replace(made, environment=environment, upkeep=Caches(build_dir, "a") if is_kept else None)

    def halves() -> list[Path]:
        return [path for path in build_dir.rglob("vllm_compile_cache.py") if path.stat().st_size]

    async def live() -> Crash | None:
        supervisor = Supervisor()
        supervisor.start(command("--fake-write-s", "600"))
        await eventually(lambda: bool(halves()))
        assert supervisor.pid
        os.killpg(supervisor.pid, signal.SIGKILL)
        assert await supervisor.wait_ready()
        supervisor.start(command())
        crash = await supervisor.wait_ready()
        await supervisor.stop()
        return crash

    crash = asyncio.run(live())
    assert (crash is None) == is_kept
    assert crash is None or "SyntaxError" in str(crash.first_error)


def test_the_second_start_finds_what_the_first_compiled(socket_path: Path, tmp_path: Path) -> None:
    found: list[CompileCache] = []

    async def live() -> None:
        for _ in range(2):
            lines: list[str] = []
            supervisor = Supervisor(on_line=lines.append)
            made = vllm_command(socket_path)
            environment = {**made.environment, "VLLM_CACHE_ROOT": str(tmp_path / "b1/vllm")}
            supervisor.start(replace(made, environment=environment, upkeep=Caches(tmp_path / "b1", "a")))
            assert await supervisor.wait_ready() is None
            await supervisor.stop()
            found.append(compile_cache(lines))

    asyncio.run(live())
    assert [each.is_hit for each in found] == [False, True]
    assert found[0].key == found[1].key
