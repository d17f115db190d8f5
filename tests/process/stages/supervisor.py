"""The fake engine as a Command, and questions to it over its socket without an HTTP library."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from appliance.command import Command
from appliance.engines.llama.process.log import is_error
from tests.fakes.quick import program


class MakeCommand(Protocol):
    def __call__(self, *knobs: str, stall_timeout_s: float = 60.0, stop_grace_s: float = 5.0) -> Command: ...


def fake_command(socket_path: Path, *knobs: str, stall_timeout_s: float = 60.0, stop_grace_s: float = 5.0) -> Command:
    return Command(
        argv=(*program("fake_engine"), "--host", str(socket_path), *knobs),
        environment={"PATH": "/usr/bin:/bin"},
        is_ready=lambda: is_healthy(socket_path),
        is_error=is_error,
        socket_path=socket_path,
        stall_timeout_s=stall_timeout_s,
        stop_grace_s=stop_grace_s,
    )


async def is_healthy(socket_path: Path) -> bool:
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket_path))
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
        return (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False
    finally:
        writer.close()


async def eventually(condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 60.0) -> None:
    """Polls until `condition` holds; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """True if the process runs. A zombie does not; `is_known` is True for it as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_known(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Return the pids of this process's children, zombies included. They are not waited for: another test's may be
    among them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for text in lists for pid in text.read_text(encoding="ascii").split()}


def read_pid(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


def leave_file(path: Path) -> None:
    path.touch()
