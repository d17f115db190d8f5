"""The engine that serves, and how another takes its place: beside it where memory holds both, or after it."""

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
"""A plan. Nothing is known of it here: it is made into a Command and told apart by that."""


class Upstream(Protocol):
    """What the gateway's `UpstreamPool` does."""

    def switch_to(self, socket_path: Path) -> None: ...

    async def wait_drained(self) -> None: ...


@dataclass(frozen=True)
class _Present(Generic[P]):
    plan: P
    socket_path: Path
    supervisor: Supervisor


class EngineHost(Generic[P]):
    """`sockets` are two paths for the engines to take turns on; the gateway begins with the first.

    One caller at a time uses `detach`, `load` and `swap`; `stop` may come at any moment, from anybody.
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
        self._others: list[Supervisor] = []  # one that is being loaded, or one whose last requests still run
        self._is_away = True
        self._moved = asyncio.Event()
        self._load_s = 0.0
        self._past_restarts = 0

    @property
    def plan(self) -> P | None:
        """The one that serves, or served when the engine is away."""
        return self._present.plan if self._present else None

    @property
    def socket_path(self) -> Path | None:
        """Where it listens."""
        return self._present.socket_path if self._present else None

    @property
    def supervisor(self) -> Supervisor | None:
        """Of the engine that serves; None while it is away on purpose."""
        return None if self._is_away or self._present is None else self._present.supervisor

    @property
    def is_ready(self) -> bool:
        return self.supervisor is not None and self.supervisor.state is State.READY

    @property
    def load_s(self) -> float:
        """How long the last load took."""
        seconds = self.supervisor.ready_seconds if self.supervisor else None
        return self._load_s if seconds is None else seconds

    @property
    def restarts(self) -> int:
        """After deaths, of all engines that have served."""
        return self._past_restarts + (self._present.supervisor.restarts if self._present else 0)

    def is_another(self, plan: P) -> bool:
        """Whether the engine would be started with other words for it. Its reasons may differ, and nobody waits for
        a reload that changes only those."""
        if self._present is None:
            return True
        wanted, present = (self._command(each, self._sockets[0]) for each in (plan, self._present.plan))
        return (wanted.argv, wanted.environment) != (present.argv, present.environment)

    def recognize(self, plan: P) -> None:
        """`plan` is what serves, by another name or for other reasons: `is_another` is False for it."""
        present = self._in_place()
        self._present = _Present(plan, present.socket_path, present.supervisor)

    def count_restart(self) -> None:
        """Of one that whoever launches it starts again."""
        self._past_restarts += 1

    def launch(self, plan: P) -> None:
        """The first engine, or after `detach` one in place of a first that never served: spawned at once. Its
        `wait_ready` and its death are those of `supervisor`."""
        supervisor = self._supervise(plan)
        supervisor.start(self._command(plan, self._sockets[0]))
        self._set_present(_Present(plan, self._sockets[0], supervisor))

    async def detach(self, *, grace_s: float | None = None) -> P:
        """Stops the engine, which is then away until `load` or `launch`; returns its plan. What it still works on is
        lost: pause requests before. `grace_s` stands for the command's own.

        With it goes one before it whose last requests still run, since its `swap` was cancelled: nobody else would stop
        it, and it holds the memory of another."""
        present = self._in_place()
        self._load_s = self.load_s
        self._is_away = True
        self._moved.set()
        left = tuple(self._others)
        await asyncio.gather(*(supervisor.stop(grace_s=grace_s) for supervisor in (present.supervisor, *left)))
        self._others = [supervisor for supervisor in self._others if supervisor not in left]
        return present.plan

    async def load(self, plan: P) -> Crash | None:
        """After `detach`, in its place. A Crash when the engine did not become ready; it is still away then."""
        present = self._in_place()
        # The same supervisor: it refuses where the last engine outlived SIGKILL and still holds its memory.
        self._past_restarts += present.supervisor.restarts
        present.supervisor.start(self._command(plan, present.socket_path))
        if crash := await present.supervisor.wait_ready():
            return crash
        self._set_present(_Present(plan, present.socket_path, present.supervisor))
        return None

    async def swap(self, plan: P, upstream: Upstream) -> Crash | None:
        """Loads another engine beside, sends new requests there once it is ready, and stops the old one when the last
        of its requests has ended. A Crash when the other did not become ready: then nothing has changed."""
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
        finally:
            if self._in_place().supervisor is not supervisor:
                await supervisor.stop(grace_s=0.0)  # it has served nobody, and a stop of everything may be waiting
            self._others.remove(supervisor)
        # When everything stops the gateway drains both: until then the old engine is left to its requests.
        await upstream.wait_drained()
        await old.supervisor.stop()
        self._others.remove(old.supervisor)
        return None

    async def wait_failed(self) -> Crash:
        """The crash after which the engine that serves is not restarted, whichever serves by then. One that never came
        to serve is the business of who loaded it."""
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
        """Returns when every engine is gone."""
        present = [self._present.supervisor] if self._present else []
        await asyncio.gather(*(supervisor.stop() for supervisor in (*present, *self._others)))

    def _set_present(self, present: _Present[P]) -> None:
        self._present = present
        self._is_away = False
        self._moved.set()

    def _in_place(self) -> _Present[P]:
        if self._present is None:
            message = "no engine was launched yet"
            raise RuntimeError(message)
        return self._present
