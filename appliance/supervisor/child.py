"""One life of one program: spawned, its log read, its exit seen, its family buried."""

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
from appliance.system.lack import is_lack, tell
from appliance.values import dataclass

PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# How much may still be read of a dead engine's log; more can only come from a survivor that keeps writing.
_DRAIN_BYTES = 4 * PIPE_BYTES
_BURIAL_S = 0.5
_ASK_S = 5.0
LACK_HINT = "the container lacks open files, memory or processes: raise its --ulimit nofile, --memory or --pids-limit"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters of the whole family; they move while it works. Major faults: a mapped model is being read from disk."""

    lines: int
    cpu_s: float
    major_faults: int
    stopped: tuple[int, ...] = ()  # pids that were stopped by a signal: what the others do leads to nothing


class Child:
    """Spawned by its constructor, which raises EngineNotReadyError when the program cannot be executed.

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
        """Seconds since the start."""
        self.was_ready = True
        self.log.mark_ready()
        if self._upkeep:
            self._upkeep.ready()
        # Who has left the group and the session is seen while its parents still live.
        self._note_segments()
        return time.monotonic() - self._started_at

    def _note_segments(self) -> None:
        """Nothing while /proc cannot be read: what comes after it is not to wait."""
        try:
            self._segments.note(self._tree.sample())
        except OSError as error:
            if not is_lack(error):
                raise
            tell("looking at the engine's processes", error)

    def progress(self) -> Progress:
        members = self._tree.sample()
        self._segments.note_now_and_then(members)  # a process that is killed as it loads takes its mappings with it
        self._oom_kills.note()
        return Progress(
            lines=self.log.signs_of_work,
            cpu_s=cpu_seconds(members),
            major_faults=sum(process.major_faults for process in members),
            stopped=tuple(process.pid for process in members if process.is_stopped),
        )

    def seen_progress(self) -> Progress | None:
        """None while a lack of open files or memory hides the processes, which is no fault of the child's."""
        try:
            return self.progress()
        except OSError as error:
            if not is_lack(error):
                raise
            tell("watching the engine", error)
            return None

    async def is_at_work(self) -> bool:
        """In a way that `progress` does not show. No where it cannot be told in time."""
        if self._is_at_work is None:
            return False
        try:
            async with asyncio.timeout(_ASK_S):
                return await asyncio.to_thread(self._is_at_work)
        except TimeoutError:
            return False
        except Exception as error:
            if not is_lack(error):
                raise
            tell("watching the engine", error)
            return True  # nobody can tell, and the supervisor's patience ends anyway

    def signal_group(self, number: signal.Signals) -> None:
        """Nothing once the leader is reaped: its number may be somebody else's group then."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def reap(self, *, exit_timeout_s: float | None = None) -> None:
        """SIGKILL to the group, then its end is awaited; kills and reaps all descendants, closes everything."""
        self._note_segments()
        self.signal_group(signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(exit_timeout_s):
                await self.exited.wait()
        self._process.poll()
        await self.is_buried()
        self._close()

    async def is_buried(self) -> bool:
        """False while it cannot be known who is left: the next engine would share its memory with them."""
        if not self._is_buried:
            survivors = await self._tree.end(timeout_s=_BURIAL_S)
            if survivors:
                _log.warning("processes of the engine outlived SIGKILL, which a stuck driver can cause: %s", survivors)
            self._is_buried = survivors is not None
        return self._is_buried

    def kill_now(self) -> None:
        """The loop is going away: the same as `reap()` without it, blocking for a second at most."""
        self._note_segments()
        self.signal_group(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_BURIAL_S)
        self._tree.end_now(timeout_s=_BURIAL_S)
        self._close()

    def crash(
        self, *, stalled: bool = False, stopped: bool = False, gave_up: bool = False, hang: Hang | None = None
    ) -> Crash:
        """After `reap()`. With `gave_up` the signal was ours."""
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
        """The family, and a pidfd of its leader."""
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
        # The descriptor stays readable for good: without this the loop would spin until the burial.
        self._loop.remove_reader(self._pidfd)
        self._seconds = time.monotonic() - self._started_at
        self.exited.set()

    def _read_log(self) -> None:
        """One piece a call: a program that floods its log shares the loop with everybody else."""
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
        # Where it cannot be removed the next start says so.
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
    # The loop may be busy for half a second with imports, and the engine must not wait on its log meanwhile. Where the
    # limit for pipes forbids it, the default size is only slower.
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
            start_new_session=True,  # a group of its own, and a session by which its children are known
            preexec_fn=lambda: die_with_parent(parent_pid),
        )
    except OSError as error:
        message = f"the engine cannot be started: {command.argv[0]}: {error.strerror}"
        hint = LACK_HINT if is_lack(error) else "the image may be damaged or of another architecture"
        raise EngineNotReadyError(message, hint=hint) from error
