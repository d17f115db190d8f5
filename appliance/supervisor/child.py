"""One run of one program: starts it, reads its log, notices its exit, and kills and reaps all its processes."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from appliance.command import Command
from appliance.errors import EngineNotReadyError
from appliance.supervisor.crash import Crash, Hang
from appliance.supervisor.log import Log
from appliance.supervisor.oom_kills import OomKills
from appliance.supervisor.reaper import TAG_NAME, ProcessTree, cpu_seconds, die_with_parent
from appliance.supervisor.shared_memory import SharedMemory
from appliance.system.detached import detached
from appliance.system.lack import is_lack, tell
from appliance.values import dataclass

PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# Limit for reading the rest of a dead engine's log; only a surviving process that keeps writing exceeds it.
_DRAIN_BYTES = 4 * PIPE_BYTES
_BURIAL_S = 0.5
_ASK_S = 5.0
LACK_HINT = "the container lacks open files, memory or processes: raise its --ulimit nofile, --memory or --pids-limit"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters over all processes of the program; they change while it works. Major faults: a mapped model is being
    read from disk."""

    lines: int
    cpu_s: float
    major_faults: int
    stopped: tuple[int, ...] = ()  # pids stopped by a signal; work of the other processes leads to nothing then
    is_runnable: bool = False  # one of them runs or waits for a CPU


class Child:
    """One run of a program, started by the constructor, which raises EngineNotReadyError if the program cannot be
    executed.

    Must be made in the main thread, inside a running loop. `reap()` or `kill_now()` ends its use.
    """

    def __init__(self, command: Command, on_line: Callable[[str], None] | None) -> None:
        self.gave_up = asyncio.Event()
        self._is_fatal = command.is_fatal
        self._on_line = on_line
        self.log = Log(command.is_error, self._take_line, command.is_waiting)
        self.was_ready = False
        self.exited = asyncio.Event()
        self._started_at = time.monotonic()
        self._seconds: float | None = None
        self._loop = asyncio.get_running_loop()
        self._socket_path = command.socket_path
        self._scratch = command.scratch
        self._upkeep = command.upkeep
        self._is_at_work = command.is_at_work
        self._segments = SharedMemory()
        self._oom_kills = OomKills(command.oom_kills or (lambda: None))
        self._is_closed = self._is_buried = False
        _free(command.socket_path, command.scratch)
        tag = secrets.token_hex(8)
        self._pipe, write_end = _open_pipe()
        try:
            if self._upkeep:
                self._upkeep.begin()
            self._process = _spawn(command, {**command.environment, TAG_NAME: tag}, write_end)
        except BaseException:
            os.close(self._pipe)
            if self._upkeep:
                self._upkeep.end()
            raise
        finally:
            os.close(write_end)
        self._tree, self._pidfd = self._watched(tag)
        self._loop.add_reader(self._pipe, self._read_log)
        self._loop.add_reader(self._pidfd, self._see_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    def mark_ready(self) -> float:
        """Note that the program is ready. Returns the seconds since its start."""
        self.was_ready = True
        self.log.mark_ready()
        if self._upkeep:
            self._upkeep.ready()
        # A process that left the group and the session can be found only while its parents live.
        self._note_segments()
        return time.monotonic() - self._started_at

    def _note_segments(self) -> None:
        """Note the shared memory of all processes. Skipped if /proc cannot be read: the caller's next step must not
        wait."""
        try:
            self._segments.note(self._tree.sample())
        except OSError as error:
            if not is_lack(error):
                raise
            tell("looking at the engine's processes", error)

    def progress(self) -> Progress:
        members = self._tree.sample()
        # the mappings of a process that is killed while it loads are lost with it
        self._segments.note_now_and_then(members)
        self._oom_kills.note()
        return Progress(
            lines=self.log.signs_of_work,
            cpu_s=cpu_seconds(members),
            major_faults=sum(process.major_faults for process in members),
            stopped=tuple(process.pid for process in members if process.is_stopped),
            is_runnable=any(process.is_runnable for process in members),
        )

    def seen_progress(self) -> Progress | None:
        """Return the counters; None if a lack of open files or memory hides the processes, which is not the child's
        fault."""
        try:
            return self.progress()
        except OSError as error:
            if not is_lack(error):
                raise
            tell("watching the engine", error)
            return None

    async def is_at_work(self) -> bool:
        """True if the program works in a way that `progress` does not show. False if the answer takes longer than
        _ASK_S."""
        if self._is_at_work is None:
            return False
        try:
            async with asyncio.timeout(_ASK_S):
                return await detached(self._is_at_work)
        except TimeoutError:
            return False
        except Exception as error:
            if not is_lack(error):
                raise
            tell("watching the engine", error)
            return True  # unknown; the supervisor's time limit ends the wait in any case

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group. Does nothing once the leader is reaped: the number may be another group's
        then."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def reap(self, *, exit_timeout_s: float | None = None) -> None:
        """Kill the group with SIGKILL, wait for the leader's end, kill and reap all descendants, close all
        descriptors."""
        self._note_segments()
        self.signal_group(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(exit_timeout_s):
                await self.exited.wait()
        self._process.poll()
        await self.is_buried()
        self._close()

    async def is_buried(self) -> bool:
        """Kill and reap all processes. False if it is unknown whether any is left: the next engine would share its
        memory with them."""
        if not self._is_buried:
            survivors = await self._tree.end(timeout_s=_BURIAL_S)
            if survivors:
                _log.warning("processes of the engine outlived SIGKILL, which a stuck driver can cause: %s", survivors)
            self._is_buried = survivors is not None
        return self._is_buried

    def kill_now(self) -> None:
        """Do the same as `reap()` without an event loop, for a loop that is closing. Blocks for about a second at
        most."""
        self._note_segments()
        self.signal_group(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_BURIAL_S)
        self._tree.end_now(timeout_s=_BURIAL_S)
        self._close()

    def crash(
        self, *, stalled: bool = False, stopped: bool = False, gave_up: bool = False, hang: Hang | None = None
    ) -> Crash:
        """Return how the program ended; call it after `reap()`. `gave_up` means that we sent the signal that ended
        it."""
        code = None if gave_up else self._process.returncode
        return Crash(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            first_error=self.log.first_error(),
            log=self.log.lines,
            was_ready=self.was_ready,
            stalled=stalled or hang is not None,
            hung=hang.words if hang else "",
            hung_s=hang.seconds if hang else 0.0,
            gave_up=gave_up,
            seconds=self._seconds if self._seconds is not None else time.monotonic() - self._started_at,
            stopped=stopped,
            oom_kills=self._oom_kills.lately(),
        )

    def _take_line(self, line: str) -> None:
        if self.was_ready and self._is_fatal(line):
            self.gave_up.set()
        if self._on_line:
            self._on_line(line)

    def _watched(self, tag: str) -> tuple[ProcessTree, int]:
        """Return the process tree and a pidfd of its leader. Raises EngineNotReadyError if either cannot be had."""
        try:
            return ProcessTree(leader_pid=self._process.pid, tag=tag), os.pidfd_open(self._process.pid)
        except OSError as error:
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            if self._upkeep:
                self._upkeep.end()
            message = f"the engine cannot be watched: {error.filename or 'pidfd_open'}: {error.strerror}"
            hint = LACK_HINT if is_lack(error) else "this needs Linux 5.3 and a seccomp profile that allows it"
            raise EngineNotReadyError(message, hint=hint) from error

    def _see_exit(self) -> None:
        # The descriptor stays readable from now on: without this line the loop would spin until the child is reaped.
        self._loop.remove_reader(self._pidfd)
        self._seconds = time.monotonic() - self._started_at
        self.exited.set()

    def _read_log(self) -> None:
        """Read one piece of the log per call: a program that floods its log shares the event loop with all other
        work."""
        with suppress(BlockingIOError):
            data = os.read(self._pipe, _READ_BYTES)
            if not data:
                self._loop.remove_reader(self._pipe)
            self.log.feed(data)

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._pipe)
        left = _DRAIN_BYTES
        with suppress(BlockingIOError):
            while left > 0 and (data := os.read(self._pipe, _READ_BYTES)):
                self.log.feed(data)
                left -= len(data)
        self.log.close()
        os.close(self._pipe)
        os.close(self._pidfd)
        self._segments.remove()
        if self._upkeep:
            self._upkeep.end()
        # If the socket cannot be removed, the next start reports it.
        with suppress(OSError):
            _unlink(self._socket_path)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _free(socket_path: Path | None, scratch: Path | None) -> None:
    try:
        _unlink(socket_path)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
    except OSError as error:
        message = f"the engine's socket cannot be replaced: {error.filename or socket_path}: {error.strerror}"
        hint = LACK_HINT if is_lack(error) else "remove it, or give /tmp a tmpfs of its own"
        raise EngineNotReadyError(message, hint=hint) from error


def _unlink(socket_path: Path | None) -> None:
    if socket_path:
        socket_path.unlink(missing_ok=True)


def _open_pipe() -> tuple[int, int]:
    try:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        message = f"the engine cannot be started: pipe2: {error.strerror}"
        raise EngineNotReadyError(message, hint=LACK_HINT) from error
    os.set_blocking(read_end, False)
    # The event loop may be busy with imports for half a second, and a full pipe would block the engine. If the limit
    # for pipes forbids this size, the default size only makes it slower.
    with suppress(PermissionError):
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read_end, write_end


def _spawn(command: Command, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    parent_pid = os.getpid()
    try:
        return subprocess.Popen(
            command.argv,
            env=environment,
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # own process group, and own session, by which its children are recognized
            preexec_fn=lambda: die_with_parent(parent_pid),
        )
    except OSError as error:
        message = f"the engine cannot be started: {command.argv[0]}: {error.strerror}"
        hint = LACK_HINT if is_lack(error) else "the image may be damaged or of another architecture"
        raise EngineNotReadyError(message, hint=hint) from error
