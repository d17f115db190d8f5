"""Finds, kills and reaps every process that an engine has started, even if the process tries to hide.

A process belongs to an engine if any of this holds: it was seen as a member before (same pid and start time); its
session or process group is the engine's; its parent is a member; its environment holds the engine's tag, which finds
double-forked children in sessions of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from appliance.system.lack import is_lack, tell
from appliance.values import dataclass

TAG_NAME = "APPLIANCE_ENGINE_TAG"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Short, because a process forked after one round lives until the next.
_ROUND_S = 0.005
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Loaded at import: between fork and exec, imports and allocations must be avoided.
_LIBC = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make orphans of our descendants our children, so that we can reap them. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Called in a child between fork and exec: the child gets SIGKILL when the thread that forked it ends. Exits at
    once if the parent is already gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process as in /proc/PID/stat. `cpu_ticks` is user and system time of all its threads."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    major_faults: int
    cpu_ticks: int
    start_ticks: int

    @property
    def is_zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """True after SIGSTOP. A process stopped by a debugger has another state."""
        return self.state == "T"

    @property
    def is_runnable(self) -> bool:
        """True if its main thread runs, or waits for a CPU that others have."""
        return self.state == "R"


def parse_stat(text: str) -> Process:
    """Return the process described by a line of /proc/PID/stat. The second field is the program's name in parentheses,
    and may contain spaces and parentheses itself."""
    head, _, tail = text.rpartition(")")
    field = tail.split()
    return Process(
        pid=int(head.split(" ", 1)[0]),
        state=field[0],
        parent=int(field[1]),
        group=int(field[2]),
        session=int(field[3]),
        major_faults=int(field[9]),
        cpu_ticks=int(field[11]) + int(field[12]),
        start_ticks=int(field[19]),
    )


def query_process(pid: int) -> Process | None:
    """Return the process, or None if it no longer exists."""
    try:
        return parse_stat(_read_stat(str(pid)))
    except (FileNotFoundError, ProcessLookupError):
        return None


def query_processes(*, since_ticks: int = 0) -> list[Process]:
    """Return the processes that /proc shows and that are not older, oldest first, so that parents mostly come before
    their children."""
    found = []
    for name in os.listdir(_PROC):  # noqa: PTH208 - names are enough
        if not name.isdecimal():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            text = _read_stat(name)
            if _start_ticks(text) >= since_ticks:  # before parsing: most processes are older than an engine
                found.append(parse_stat(text))
    return sorted(found, key=lambda process: process.start_ticks)


def _read_stat(pid: str) -> str:
    # A sample reads this of every process: Path.read_text would take three times as long.
    handle = os.open(f"{_PROC}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 4096).decode("utf-8", "replace")
    finally:
        os.close(handle)


def _start_ticks(text: str) -> int:
    return int(text.rpartition(")")[2].split()[19])


def has_tag(pid: int, tag: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError as error:
        if is_lack(error):
            raise
        # gone, a zombie, or another user's: never the engine's
        return False
    return f"{TAG_NAME}={tag}".encode() in environment.split(b"\0")


class ProcessTree:
    """An engine and all its descendants. Frequent calls of `sample()` remember even those that clear their
    environment."""

    def __init__(self, *, leader_pid: int, tag: str) -> None:
        leader = query_process(leader_pid)
        self._since_ticks = leader.start_ticks if leader else 0
        self._leader_pid = leader_pid
        self._tag = tag
        self._known: set[tuple[int, int]] = set()
        self._sessions = {leader_pid}

    def sample(self) -> list[Process]:
        """Return the members that exist now, zombies included."""
        # Processes older than the engine are not members, so the environment of most processes need not be read.
        young = query_processes(since_ticks=self._since_ticks)
        members: dict[int, Process] = {}
        for _ in range(2):  # a parent with the same start tick may come after its child
            for process in young:
                if process.pid not in members and process.pid != os.getpid() and self._owns(process, members):
                    members[process.pid] = process
        self._known = {(process.pid, process.start_ticks) for process in members.values()}
        # Never add our own session: a child between fork and setsid is still in it, and the whole appliance would be
        # killed.
        self._sessions |= {process.session for process in members.values()} - {os.getsid(0)}
        return list(members.values())

    def _owns(self, process: Process, members: dict[int, Process]) -> bool:
        identity = (process.pid, process.start_ticks)
        if identity in self._known or process.session in self._sessions or process.group in self._sessions:
            return True
        return process.parent in members or has_tag(process.pid, self._tag)

    def kill(self) -> list[Process]:
        """Send SIGKILL to living members and reap dead ones, once. Returns the members that were not yet gone."""
        members = self.sample()
        pids = {process.pid for process in members} | {os.getpid()}
        for process in members:
            if not process.is_zombie:
                _kill(process)
            elif process.pid != self._leader_pid:  # the supervisor collects the leader's exit status
                _reap(process.pid)
        # A zombie with a parent outside the family must be reaped by that parent.
        return [process for process in members if not process.is_zombie or process.parent in pids]

    async def end(self, *, timeout_s: float) -> tuple[int, ...] | None:
        """Kill and reap until no member is left; returns the pids that outlived `timeout_s`. None if they are unknown,
        because /proc cannot be read for a lack of open files or memory."""
        deadline = time.monotonic() + timeout_s
        while (left := self._left()) is None or left:
            if time.monotonic() > deadline:
                return None if left is None else tuple(process.pid for process in left)
            await asyncio.sleep(_ROUND_S)
        return ()

    def end_now(self, *, timeout_s: float) -> None:
        """Do the same as `end`, blocking, for an event loop that is closing."""
        deadline = time.monotonic() + timeout_s
        while ((left := self._left()) is None or left) and time.monotonic() < deadline:
            time.sleep(_ROUND_S)

    def _left(self) -> list[Process] | None:
        """Return the members left after one round of `kill`; None if a lack of files or memory hides them."""
        try:
            return self.kill()
        except OSError as error:
            if not is_lack(error):
                raise
            tell("ending the engine's processes", error)
            return None


def cpu_seconds(members: list[Process]) -> float:
    return sum(process.cpu_ticks for process in members) / _TICKS_PER_S


def _kill(process: Process) -> None:
    """Send SIGKILL through a pidfd after comparing the start time: the pid may have been given to another process."""
    # We cannot kill a process of another user; it is reported as a survivor.
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            now = query_process(process.pid)
            if now and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _reap(pid: int) -> None:
    """Reap this pid only: reaping any child would take the exit status of another module's child."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
