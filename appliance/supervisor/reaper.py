"""Finding, killing and reaping everything that an engine has started, whatever it did to hide.

A process belongs to an engine's family when any of this holds:
- it was seen in the family before (same pid and start time);
- its session or process group is one of the family's;
- its parent is in the family;
- its environment holds the engine's tag: this finds double-forked children in sessions of their own.
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
# Short: what forks after one round lives until the next.
_ROUND_S = 0.005
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Loaded at import: between fork and exec nothing may be imported or allocated that can be avoided.
_LIBC = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans of our descendants become our children, so that we can reap them. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """For a child between fork and exec: SIGKILL when the thread that forked it ends, also when that was just now."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


@dataclass(frozen=True, kw_only=True)
class Process:
    """One line of /proc/PID/stat. `cpu_ticks` counts user and system time of all its threads."""

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
        """True after SIGSTOP. A debugger's stop is another state."""
        return self.state == "T"


def parse_stat(text: str) -> Process:
    """The second field is the program's name in parentheses and may itself hold spaces and parentheses."""
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
    """None when it is gone."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def query_processes() -> list[Process]:
    """All that /proc shows, oldest first, so that parents mostly come before their children."""
    found = [query_process(int(name)) for name in os.listdir(_PROC) if name.isdecimal()]  # noqa: PTH208 - names are enough
    return sorted((process for process in found if process), key=lambda process: process.start_ticks)


def has_tag(pid: int, tag: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError as error:
        if is_lack(error):
            raise
        # Gone, a zombie, or another user's: not ours in any of the cases.
        return False
    return f"{TAG_NAME}={tag}".encode() in environment.split(b"\0")


class ProcessTree:
    """An engine and all its descendants. `sample()` often enough remembers even those that wipe their environment."""

    def __init__(self, *, leader_pid: int, tag: str) -> None:
        leader = query_process(leader_pid)
        self._since_ticks = leader.start_ticks if leader else 0
        self._leader_pid = leader_pid
        self._tag = tag
        self._known: set[tuple[int, int]] = set()
        self._sessions = {leader_pid}

    def sample(self) -> list[Process]:
        """Members that exist now, zombies included."""
        # Nothing older than the engine is of it, and the environment of most processes need not be read.
        young = [process for process in query_processes() if process.start_ticks >= self._since_ticks]
        members: dict[int, Process] = {}
        for _ in range(2):  # a parent with the same start tick may come after its child
            for process in young:
                if process.pid not in members and process.pid != os.getpid() and self._owns(process, members):
                    members[process.pid] = process
        self._known = {(process.pid, process.start_ticks) for process in members.values()}
        # Never our own, which a child between fork and setsid is still in: all of the appliance would be killed.
        self._sessions |= {process.session for process in members.values()} - {os.getsid(0)}
        return list(members.values())

    def _owns(self, process: Process, members: dict[int, Process]) -> bool:
        identity = (process.pid, process.start_ticks)
        if identity in self._known or process.session in self._sessions or process.group in self._sessions:
            return True
        return process.parent in members or has_tag(process.pid, self._tag)

    def kill(self) -> list[Process]:
        """One round of SIGKILL for the living and reaping of the dead; returns who was not yet gone."""
        members = self.sample()
        pids = {process.pid for process in members} | {os.getpid()}
        for process in members:
            if not process.is_zombie:
                _kill(process)
            elif process.pid != self._leader_pid:  # whose exit status is the supervisor's to collect
                _reap(process.pid)
        # A zombie whose parent is neither we nor one of the family is its parent's business.
        return [process for process in members if not process.is_zombie or process.parent in pids]

    async def end(self, *, timeout_s: float) -> tuple[int, ...] | None:
        """Kills and reaps until nobody is left; returns the pids that outlived `timeout_s`. None if they cannot be
        known, since /proc cannot be read for a lack of open files or memory."""
        deadline = time.monotonic() + timeout_s
        while (left := self._left()) is None or left:
            if time.monotonic() > deadline:
                return None if left is None else tuple(process.pid for process in left)
            await asyncio.sleep(_ROUND_S)
        return ()

    def end_now(self, *, timeout_s: float) -> None:
        """As `end`, blocking: for an event loop that is going away."""
        deadline = time.monotonic() + timeout_s
        while ((left := self._left()) is None or left) and time.monotonic() < deadline:
            time.sleep(_ROUND_S)

    def _left(self) -> list[Process] | None:
        """After a round of `kill`; None for a lack."""
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
    """Through a pidfd, compared by start time: the number may have been given to somebody else since."""
    # One that runs as another user cannot be killed by us: it is reported as a survivor.
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            now = query_process(process.pid)
            if now and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _reap(pid: int) -> None:
    """By number, never "any child": that would steal the exit status of somebody else's child."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
