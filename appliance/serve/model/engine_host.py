"""The engine that serves, and its replacement: loaded in parallel if memory holds both, else after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from appliance.command import Command
from appliance.race import first_of
from appliance.supervisor import Crash, State, Supervisor

P = TypeVar("P")
"""A plan. Only its Command is compared here, nothing inside it."""


class Upstream(Protocol):
    """The part of the gateway's `UpstreamPool` that a swap needs."""

    def switch_to(self, socket_path: Path) -> None: ...

    async def wait_drained(self) -> None: ...


@dataclass(frozen=True)
class _Present(Generic[P]):
    plan: P
    socket_path: Path
    supervisor: Supervisor


class EngineHost(Generic[P]):
    """The engine of one model. `sockets` are two paths that engines use by turns; the gateway begins with the first.

    One caller at a time uses `launch`, `stop_current`, `load` and `swap`; anyone may call `stop` at any moment.
    """

    def __init__(
        self,
        *,
        sockets: tuple[Path, Path],
        command: Callable[[P, Path], Command],
        supervise: Callable[[P], Supervisor],
    ) -> None:
        self._sockets = sockets
        self._command = command
        self._supervise = supervise
        self._present: _Present[P] | None = None
        self._others: list[Supervisor] = []  # engines that load, or whose last requests still run
        self._is_away = True
        self._is_stopped = False
        self._moved = asyncio.Event()
        self._load_s = 0.0
        self._past_restarts = 0

    @property
    def plan(self) -> P | None:
        """The plan that serves; while the engine is away, the last one that did."""
        return self._present.plan if self._present else None

    @property
    def socket_path(self) -> Path | None:
        """The socket that the engine listens on."""
        return self._present.socket_path if self._present else None

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the engine that serves; None while the engine is away on purpose."""
        return None if self._is_away or self._present is None else self._present.supervisor

    @property
    def is_launched(self) -> bool:
        """True from `launch` until `stop`, whatever state the engine is in."""
        return self._present is not None and not self._is_stopped

    @property
    def is_ready(self) -> bool:
        """True if the engine answers."""
        return self.supervisor is not None and self.supervisor.state is State.READY

    @property
    def load_s(self) -> float:
        """Duration of the last load."""
        seconds = self.supervisor.ready_seconds if self.supervisor else None
        return self._load_s if seconds is None else seconds

    @property
    def restarts(self) -> int:
        """Number of restarts after deaths, of all engines that have served."""
        return self._past_restarts + (self._present.supervisor.restarts if self._present else 0)

    def is_another(self, plan: P) -> bool:
        """True if the engine would be started with other arguments for this plan.

        A plan that differs only in its reasons is not another one: it needs no reload.
        """
        if self._present is None:
            return True
        wanted, present = (self._command(each, self._sockets[0]) for each in (plan, self._present.plan))
        return (wanted.argv, wanted.environment) != (present.argv, present.environment)

    def recognize(self, plan: P) -> None:
        """Take `plan`, for which `is_another` is False, as the plan that serves: its name or its reasons are newer."""
        present = self._in_place()
        self._present = _Present(plan, present.socket_path, present.supervisor)

    def count_restart(self) -> None:
        """Count a restart that the caller of `launch` made, not the supervisor."""
        self._past_restarts += 1

    def launch(self, plan: P) -> None:
        """Spawn the first engine, or one after `stop`, or one after `stop_current` if none has served yet.

        It listens where the last one did: the gateway sends requests there. Returns at once: `supervisor` tells
        readiness and death.
        """
        last = self._present
        socket_path = last.socket_path if last else self._sockets[0]
        supervisor = self._supervise(plan)
        supervisor.start(self._command(plan, socket_path))
        self._past_restarts += last.supervisor.restarts if last else 0
        self._set_present(_Present(plan, socket_path, supervisor))

    async def stop_current(self, *, grace_s: float | None = None) -> P:
        """Stop the engine and return its plan. The engine is away until `load` or `launch`.

        Running requests are lost, so pause requests before. `grace_s` replaces the command's own. An earlier engine
        whose `swap` was cancelled is stopped as well: it would hold its memory for ever.
        """
        present = self._in_place()
        self._load_s = self.load_s
        self._is_away = True
        self._moved.set()
        left = tuple(self._others)
        await asyncio.gather(*(supervisor.stop(grace_s=grace_s) for supervisor in (present.supervisor, *left)))
        self._others = [supervisor for supervisor in self._others if supervisor not in left]
        return present.plan

    async def load(self, plan: P) -> Crash | None:
        """Load an engine after `stop_current`. Returns a Crash if it did not become ready, and is still away."""
        present = self._in_place()
        # The same supervisor: it refuses if the last engine outlived SIGKILL and still holds its memory.
        self._past_restarts += present.supervisor.restarts
        present.supervisor.start(self._command(plan, present.socket_path))
        if crash := await present.supervisor.wait_ready():
            return crash
        self._set_present(_Present(plan, present.socket_path, present.supervisor))
        return None

    async def swap(self, plan: P, upstream: Upstream, *, on_switch: Callable[[], None] = lambda: None) -> Crash | None:
        """Load another engine in parallel, send new requests to it, and stop the old one after its last request.

        Returns a Crash if the new engine did not become ready; nothing has changed then. `on_switch` is called when new
        requests go to it, which may be long before the last request of the old one ends.
        """
        old = self._in_place()
        socket_path = next(path for path in self._sockets if path != old.socket_path)
        supervisor = self._supervise(plan)
        self._others.append(supervisor)
        try:
            supervisor.start(self._command(plan, socket_path))
            if crash := await supervisor.wait_ready():
                return crash
            upstream.switch_to(socket_path)
            self._past_restarts += old.supervisor.restarts
            self._others.append(old.supervisor)
            self._set_present(_Present(plan, socket_path, supervisor))
            on_switch()
        finally:
            if self._in_place().supervisor is not supervisor:
                await supervisor.stop(grace_s=0.0)  # it has no requests, and a stop may be waiting for it
            self._others.remove(supervisor)
        # When everything stops the gateway drains both: until then the old engine is left to its requests.
        await upstream.wait_drained()
        await old.supervisor.stop()
        self._others.remove(old.supervisor)
        return None

    async def wait_failed(self) -> Crash:
        """Wait for a crash after which the supervisor does not restart the engine that serves then.

        The caller of `load` or `swap` is told of an engine that never became ready.
        """
        while True:
            self._moved.clear()
            supervisor = self.supervisor
            if supervisor is None:
                await self._moved.wait()
                continue
            _, failing = await first_of(self._moved.wait(), supervisor.wait_failed())
            if not failing.cancelled() and supervisor is self.supervisor:
                crash: Crash = failing.result()
                return crash

    async def stop(self) -> None:
        """Stop every engine; returns when all are gone. `launch` may follow."""
        self._is_stopped = True
        present = [self._present.supervisor] if self._present else []
        await asyncio.gather(*(supervisor.stop() for supervisor in (*present, *self._others)))

    def _set_present(self, present: _Present[P]) -> None:
        self._present = present
        self._is_away = self._is_stopped = False
        self._moved.set()

    def _in_place(self) -> _Present[P]:
        if self._present is None:
            message = "no engine was launched yet"
            raise RuntimeError(message)
        return self._present
