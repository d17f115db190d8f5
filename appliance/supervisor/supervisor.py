"""The supervisor: one task owns the child and every change of state; callers ask for an outcome and wait for it."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from enum import Enum
from typing import Any

from appliance.command import Command
from appliance.errors import EngineNotReadyError
from appliance.race import first_of
from appliance.supervisor.child import Child
from appliance.supervisor.crash import Crash, Hang
from appliance.supervisor.stall import until_hung, until_stalled
from appliance.supervisor.state import State, checked
from appliance.system.lack import RETRY_S, is_lack, tell
from appliance.values import dataclass

# At most a twentieth of the load time is lost between two readiness checks, and an engine that loads long is asked
# seldom.
_POLL_MIN_S, _POLL_MAX_S, _POLL_SHARE = 0.01, 0.1, 0.05
_PROBE_TIMEOUT_S = 5.0
_UNKILLABLE_S = 30.0  # freeing 100 GB of pinned memory takes seconds; with a hung driver it never ends
_STOP_MARGIN_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Restarts after a crash: wait `backoff_s[n]` (then the last value again and again) and start again, `max_in_row`
    times.

    The count starts anew after an engine was ready for `healthy_after_s`. An engine that was never ready since
    `start()` is not restarted: a bad flag would fail the same way five times while the user waits for the reason.
    """

    max_in_row: int = 5
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    healthy_after_s: float = 60.0
    # signals after which no restart is tried, because the engine would die of the same again
    not_after: frozenset[int] = frozenset()

    def is_over(self, crash: Crash, deaths_in_row: int) -> bool:
        """True if the engine is not started again. An engine that outlived SIGKILL still holds the memory that a new
        one needs."""
        return deaths_in_row > self.max_in_row or crash.signal in self.not_after or crash.outlived_kill

    def delay_s(self, deaths_in_row: int) -> float:
        return self.backoff_s[min(deaths_in_row, len(self.backoff_s)) - 1]


class _Event(Enum):
    STOP = "stop"
    EXIT = "exit"
    STALL = "stall"
    GAVE_UP = "gave up"
    HUNG = "hung"
    READY = "ready"


class Supervisor:
    """Runs one child process. Made and used inside one running loop, in the main thread.

    `restart=None` never restarts. `on_line` gets every line of the log as it comes; it must not block or raise.
    """

    def __init__(self, *, restart: Restart | None = None, on_line: Callable[[str], None] | None = None) -> None:
        self._restart = restart
        self._on_line = on_line
        self._state = State.STOPPED
        self._child: Child | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop_requested: asyncio.Event | None = None
        self._changed: asyncio.Future[None] | None = None
        self._command: Command | None = None
        self._crash: Crash | None = None
        self._hang: Hang | None = None
        self._ready_seconds: float | None = None
        self._restarts = 0
        self._was_ever_ready = False
        self._grace_s = 0.0

    @property
    def state(self) -> State:
        """Current state; it may have changed by the time the caller acts on it."""
        return self._state

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None if it does not run."""
        is_alive = self._state in (State.STARTING, State.READY, State.HUNG, State.STOPPING)
        return self._child.pid if self._child and is_alive else None

    @property
    def crash(self) -> Crash | None:
        """The last crash since `start()`, even if the engine runs again; None if there was none."""
        return self._crash

    @property
    def hang(self) -> Hang | None:
        """Why the engine is being killed as hung; None otherwise."""
        return self._hang if self._state is State.HUNG else None

    @property
    def log_tail(self) -> tuple[str, ...]:
        """The last lines, at most 200, of the engine that runs or ran last."""
        return self._child.log.lines if self._child else ()

    @property
    def ready_seconds(self) -> float | None:
        """Seconds from the last start to readiness; None while the engine is not ready."""
        return self._ready_seconds

    @property
    def restarts(self) -> int:
        """Number of restarts since `start()`."""
        return self._restarts

    def start(self, command: Command) -> None:
        """Start the program at once, or as soon as there are enough open files, memory and processes. Raises
        EngineNotReadyError if it cannot be executed, or if the previous engine still lives."""
        if threading.current_thread() is not threading.main_thread():
            # PR_SET_PDEATHSIG follows the thread that forked: in a short-lived one the engine would die with it.
            message = "start() was called outside the main thread"
            raise RuntimeError(message)
        if self._state in (State.HUNG, State.STOPPING):
            message = f"the last engine has not ended yet: process {self.pid}"
            raise EngineNotReadyError(message, hint="a stuck driver can cause this; restart the container")
        if self._state not in (State.STOPPED, State.FAILED):
            message = f"start() was called while the engine is {self._state}"
            raise RuntimeError(message)
        child = self._spawn(command)
        self._command, self._crash, self._restarts, self._was_ever_ready = command, None, 0, False
        self._grace_s = command.stop_grace_s
        stop = self._stop_requested = asyncio.Event()
        self._begin(child)  # the owner does not exist yet, so there is still one writer
        self._owner = asyncio.create_task(self._own(command, stop), name="supervisor")

    async def wait_ready(self) -> Crash | None:
        """Return None once the engine is ready, or the Crash if it will not become ready. `stopped` of the Crash is
        True if `stop()` was the reason."""
        await self._wait_for(State.READY, State.FAILED, State.STOPPED)
        if self._state is State.READY:
            return None
        if self._state is State.FAILED and self._crash:
            return self._crash
        if self._child is None:
            return Crash(exit_code=None, signal=None, first_error=None, seconds=0.0, stopped=True)
        return self._child.crash(stopped=True)

    async def wait_ended(self) -> Crash:
        """Return how a program that never gets ready ended."""
        return await self.wait_ready() or await self.wait_failed()

    async def wait_stalled(self, timeout_s: float) -> None:
        """Return once the engine did nothing for `timeout_s` (no log line, no CPU time, no page from disk), or one of
        its processes was stopped for so long.

        For a caller that waits for an answer which must come, such as a measurement; a serving engine may well be idle.
        """
        await until_stalled(self._current(), timeout_s)

    async def wait_failed(self) -> Crash:
        """Return the crash after which the engine is not restarted any more. Never returns after `stop()`: cancel it
        then."""
        await self._wait_for(State.FAILED)
        if self._crash is None:
            message = "failed without a crash"
            raise RuntimeError(message)
        return self._crash

    async def stop(self, *, grace_s: float | None = None) -> None:
        """Stop the engine; may be called in any state. Returns when the engine and all processes that it started are
        gone, at the latest 1 s after the grace.

        `grace_s` replaces the command's own: 0 kills at once an engine whose work is not needed.
        """
        if self._owner is None or self._command is None or self._stop_requested is None:
            return
        if grace_s is not None:
            self._grace_s = grace_s
        self._stop_requested.set()
        done, _ = await asyncio.wait({self._owner}, timeout=self._grace_s + _STOP_MARGIN_S)
        if not done:
            _log.warning("the engine outlived SIGKILL, which a stuck driver can cause: process %s", self.pid)
        elif not self._owner.cancelled():
            self._owner.result()

    async def _own(self, command: Command, stop: asyncio.Event) -> None:
        try:
            await self._supervise(command, stop)
        finally:
            if self._state in (State.STARTING, State.READY, State.HUNG, State.STOPPING):
                # cancelled with its loop, or a bug: kill the engine in any case
                if self._state is not State.STOPPING:
                    self._go(State.STOPPING)
                if self._child is not None:
                    self._child.kill_now()
                self._go(State.STOPPED)

    async def _supervise(self, command: Command, stop: asyncio.Event) -> None:
        deaths_in_row = 0
        if self._child is None:
            try:
                self._child = await self._spawned(command, stop)
            except EngineNotReadyError as error:
                self._crash = _not_executed(error)
                return self._go(State.FAILED)
            if self._child is None:
                self._go(State.STOPPING)
                return self._go(State.STOPPED)
        while crash := await self._live(self._current(), command, stop):
            self._crash = crash
            deaths_in_row = 1 if self._was_healthy(crash) else deaths_in_row + 1
            if self._restart is None or not self._was_ever_ready or self._restart.is_over(crash, deaths_in_row):
                return self._go(State.FAILED)
            self._go(State.BACKOFF)
            if await _is_set_within(stop, self._restart.delay_s(deaths_in_row)):
                self._go(State.STOPPING)
                break
            try:
                child = await self._spawned(command, stop)
            except EngineNotReadyError as error:
                self._crash = _not_executed(error)
                return self._go(State.FAILED)
            if child is None:
                self._go(State.STOPPING)
                break
            self._restarts += 1
            self._begin(child)
        return self._go(State.STOPPED)

    def _spawn(self, command: Command) -> Child | None:
        """Start the program. None if open files, memory or processes are lacking."""
        try:
            return Child(command, self._on_line)
        except (EngineNotReadyError, OSError) as error:
            if not is_lack(error):
                raise
            tell("starting the engine", error)
            return None

    async def _spawned(self, command: Command, stop: asyncio.Event) -> Child | None:
        """Start the program as soon as it is possible. None once `stop` is set."""
        while True:
            if self._child is None or await self._child.is_buried():
                child = self._spawn(command)
                if child is not None:
                    return child
            if await _is_set_within(stop, RETRY_S):
                return None

    async def _live(self, child: Child, command: Command, stop: asyncio.Event) -> Crash | None:
        """Follow the child from STARTING to its end. Returns None if the end was requested; the state is STOPPING
        then."""
        event = await _first_of(
            {
                _Event.STOP: stop.wait(),
                _Event.EXIT: child.exited.wait(),
                _Event.STALL: until_stalled(child, command.stall_timeout_s),
                _Event.READY: _until_ready(command),
            }
        )
        if event is _Event.READY:
            self._ready_seconds = child.mark_ready()
            self._was_ever_ready = True
            self._go(State.READY)
            event = await _first_of(
                {
                    _Event.STOP: stop.wait(),
                    _Event.EXIT: child.exited.wait(),
                    _Event.GAVE_UP: _until_given_up(child, command.last_words_s),
                    _Event.HUNG: self._note_hang(child, command),
                }
            )
        if event is _Event.STOP:
            self._go(State.STOPPING)
            child.signal_group(signal.SIGTERM)
            await _is_set_within(child.exited, self._grace_s)
            await child.reap()
            return None
        hang = self._hang if event is _Event.HUNG else None
        if hang and command.demand:
            self._go(State.HUNG)
            command.demand.give_up(hang.words)
        await child.reap(exit_timeout_s=_UNKILLABLE_S)
        return child.crash(stalled=event is _Event.STALL, gave_up=event is _Event.GAVE_UP, hang=hang)

    async def _note_hang(self, child: Child, command: Command) -> None:
        self._hang = await until_hung(child, command)

    def _was_healthy(self, crash: Crash) -> bool:
        if self._restart is None or not crash.was_ready or self._ready_seconds is None:
            return False
        return crash.seconds - crash.hung_s - self._ready_seconds >= self._restart.healthy_after_s

    def _begin(self, child: Child | None) -> None:
        self._child = child
        self._ready_seconds = None
        self._go(State.STARTING)

    def _go(self, state: State) -> None:
        """Change the state. Called only by the owner task, and by `start()` before that task exists."""
        self._state = checked(self._state, state)
        if self._changed:
            self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    async def _wait_for(self, *states: State) -> None:
        while True:
            if self._owner is None or self._changed is None:
                message = "the engine was never started"
                raise RuntimeError(message)
            changes: list[asyncio.Future[None]] = [self._changed]
            if self._owner.done():
                self._owner.result()  # a bug in the owner must not leave callers waiting
            else:
                changes.append(self._owner)
            if self._state in states:
                return
            # Shielded, because other callers wait for the same futures.
            await first_of(*(asyncio.shield(change) for change in changes))

    def _current(self) -> Child:
        if self._child is None:
            message = "the engine was never started"
            raise RuntimeError(message)
        return self._child


def _not_executed(error: EngineNotReadyError) -> Crash:
    return Crash(exit_code=None, signal=None, first_error=error.message, seconds=0.0, not_executed=True)


async def _first_of(waits: Mapping[_Event, Coroutine[Any, Any, object]]) -> _Event:
    """Return the event that happened first; if several happened together, the first in the mapping."""
    ended = zip(waits, await first_of(*waits.values()), strict=True)
    happened = {event: future for event, future in ended if not future.cancelled()}
    for future in happened.values():
        future.result()  # a readiness check that raises is a bug, which surfaces here
    return next(iter(happened))


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    # asyncio.timeout, here and below: wait_for of Python 3.11 can swallow a cancellation, and its task then never ends.
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _until_ready(command: Command) -> None:
    begin = time.monotonic()
    task = asyncio.current_task()
    while not await _is_ready(command):
        if task and task.cancelling():
            # the readiness check swallowed the cancellation; without this the loop would never end
            raise asyncio.CancelledError
        elapsed_s = time.monotonic() - begin
        await asyncio.sleep(min(_POLL_MAX_S, max(_POLL_MIN_S, _POLL_SHARE * elapsed_s)))


async def _is_ready(command: Command) -> bool:
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            return await command.is_ready()
    except TimeoutError:
        return False  # the check got no answer; the stall timer decides what that means
    except OSError as error:
        if not is_lack(error):
            raise
        return False  # we could not ask it


async def _until_given_up(child: Child, last_words_s: float) -> None:
    await child.gave_up.wait()
    await asyncio.sleep(last_words_s)
