"""The leader of several hosts: waits for the followers, plans for all, serves, and restarts all after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import Any

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.engines.engine import Node, Space
from appliance.errors import EngineDiedError, EngineError, EngineNotReadyError, FatalError
from appliance.plan import Plan
from appliance.race import first_of
from appliance.serve.engine.load import FALLBACKS_MAX, fallback, launch, on_ready
from appliance.serve.gateway.listen import HostPart
from appliance.serve.hosts.address import free_port, own_address, resolve
from appliance.serve.hosts.group import TICK_S, Failure, Group, RefusedError
from appliance.serve.hosts.member import DOCUMENT, member_of, parse_member
from appliance.serve.model.served_model import ServedModel
from appliance.settings import Settings
from appliance.supervisor import Crash, Restart

SAY_EVERY_S = 10.0
_RESTART = Restart()
LAST_WORDS_S = 3 * TICK_S  # for a follower to report that its engine died first
LEFT_S = 10.0  # for the follower that is the cause to be told, and to leave


class Leader:
    """The leader. `part` has its documents and actions for the gateway, from the first second on."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.group = group = Group(settings.nodes, report)
        self._nodes = settings.nodes
        self._cause = ""  # why the last round is over
        self._row = 0  # number of rounds in a row that did not last
        self._steps = 0  # to smaller plans, in `_space`
        self._space: Space | None = None
        self._smaller: Plan | None = None
        self._is_waiting = False
        self.part = HostPart(documents={DOCUMENT: group.document}, actions={DOCUMENT: self._heard})

    def _heard(self, body: bytes) -> tuple[int, dict[str, Any]]:
        from appliance.gateway.wire.api_error import ApiError  # here: at the top it would delay the engine's start

        try:
            return 200, asdict(self.group.heard(parse_member(body)))
        except ValueError as error:
            raise ApiError(400, "no_member", f"no document of a host: {str(error)[:300]}") from error
        except RefusedError as error:
            raise ApiError(409, "host_refused", str(error)) from error

    async def lead(self, served: ServedModel) -> None:
        """Lead rounds. Never returns; raises the error of an engine that never became ready, or died too often."""
        address = own_address(await resolve(served.settings, served.report), served.settings)
        self.group.own = member_of(served, "leader")
        ended = await first_of(self._rounds(served, address), self._ticks(served))
        failed = next(task for task in ended if not task.cancelled())
        failed.result()
        message = "a leader stopped leading"
        raise RuntimeError(message)  # neither ends by itself

    async def _ticks(self, served: ServedModel) -> None:
        """Count the silence of followers each second, and log every 10 s who is missing."""
        before = said = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.group.tick(now - before)
            before = now
            if self._is_waiting and now - said >= SAY_EVERY_S:
                said = now
                served.report.info("waiting_for_hosts", self._waiting_words())

    async def _rounds(self, served: ServedModel, address: str) -> None:
        while True:
            await self._wait_joined(served)
            plan = self._begin(served, address)
            outcome = await self._loaded(served)
            if outcome is None:
                words = await self._served(served)
            else:
                words = await self._next_words(served, plan, outcome)
            await self._end(served, words)

    async def _wait_joined(self, served: ServedModel) -> None:
        self._is_waiting = True
        while self.group.missing:
            served.report.phase(Phase.RESTARTING if self._cause else Phase.STARTING, self._waiting_words())
            await self.group.wait_change()
        self._is_waiting = False

    def _waiting_words(self) -> str:
        missing = ", ".join(map(str, self.group.missing))
        words = f"waiting for host {missing} of {self._nodes}"
        return f"{self._cause}; {words}" if self._cause else words

    def _begin(self, served: ServedModel, address: str) -> Plan:
        """Begin a round on a new port: a process left of an earlier engine may hold the last one."""
        port = free_port(address)
        node = Node(
            nodes=self._nodes,
            rank=0,
            address=address,
            leader=address,
            port=port,
            environment=served.settings.environment,
        )
        served.join(node, self.group.hosts)
        plan, self._smaller = self._smaller or served.space.predicted, None
        self.group.begin(address, port, asdict(plan))
        launch(served, plan)
        return plan

    async def _loaded(self, served: ServedModel) -> Crash | Failure | None:
        """Wait until the group answers; returns what failed, None if nothing did."""
        supervisor = served.host.supervisor
        if supervisor is None:
            message = "no engine was launched"
            raise RuntimeError(message)
        loading, failed = await first_of(supervisor.wait_ready(), self.group.wait_failed())
        if loading.cancelled():
            failure: Failure = failed.result()
            own = await self._own_crash(served) if failure.by_engine else None
            return own or failure
        crash: Crash | None = loading.result()
        if crash is not None:
            await asyncio.sleep(LAST_WORDS_S)
        return crash

    async def _own_crash(self, served: ServedModel) -> Crash | None:
        """Return a crash of the leader's own engine: a follower's engine may have died of it, and be noticed before."""
        (own,) = await first_of(served.host.wait_failed(), timeout_s=LAST_WORDS_S)
        crash: Crash | None = None if own.cancelled() else own.result()
        return crash

    async def _served(self, served: ServedModel) -> str:
        """Serve until a loss; returns why. Raises EngineDiedError (45) after too many losses in a row."""
        began = time.monotonic()
        await on_ready(served)
        self.group.set_ready()
        self._cause, self._space, self._steps = "", None, 0
        died, failed = await first_of(served.host.wait_failed(), self.group.wait_failed())
        words = self._name_loss(served, died.result()) if failed.cancelled() else failed.result().words
        if failed.cancelled():
            await asyncio.sleep(LAST_WORDS_S)
            words = f"{words}; {self.group.failure.words}" if self.group.failure else words
        self._count(words, lasted=time.monotonic() - began >= _RESTART.healthy_after_s)
        return words

    def _count(self, words: str, *, lasted: bool) -> None:
        self._row = 1 if lasted else self._row + 1
        if self._row > _RESTART.max_in_row:
            message = f"the group was started {self._row} times in a row and did not last: {words}"
            raise EngineDiedError(message, hint="the log of the host that is named says more")

    def _name_loss(self, served: ServedModel, crash: Crash) -> str:
        served.report_death(crash)
        return f"the leader's engine {crash.describe()}"

    async def _next_words(self, served: ServedModel, plan: Plan, outcome: Crash | Failure) -> str:
        """Say why another round follows one that did not come up. Raises its error if the group was never ready."""
        try:
            return self._words_of(served, plan, outcome)
        except FatalError as error:
            if not self.group.was_ready:
                await self._blame()
                raise
            self._count(error.message, lasted=False)
            return error.message

    async def _blame(self) -> None:
        failure = self.group.failure
        if failure and failure.by_engine:
            with contextlib.suppress(TimeoutError):  # a follower that does not leave waits for the next leader
                async with asyncio.timeout(LEFT_S):
                    await self.group.blame(failure.rank)

    def _words_of(self, served: ServedModel, plan: Plan, outcome: Crash | Failure) -> str:
        """Say why another round may come up, with a smaller plan if memory ran out here. Raises the error if not."""
        if isinstance(outcome, Failure):
            if outcome.by_engine:
                message = f"the group did not become ready: {outcome.words}"
                raise EngineNotReadyError(message, hint="that host's log says more")
            return outcome.words
        error = served.start.engine.as_error(outcome)
        if self.group.failure:
            error.message += f"; {self.group.failure.words}"
        supervisor = served.host.supervisor
        lines = served.logs.take(supervisor) if supervisor else ()
        if self._steps == FALLBACKS_MAX or not isinstance(error, EngineError):
            raise error
        self._steps += 1
        self._space, self._smaller = fallback(served, self._space or served.space, plan, error, lines)
        return f"{error.message}; starting with a smaller plan"

    async def _end(self, served: ServedModel, words: str) -> None:
        self._cause = words
        self.group.end(words)
        served.report.phase(Phase.RESTARTING, words)
        served.report.error("group_restarts", f"all hosts start anew: {words}")
        await served.host.stop_current(grace_s=0.0)  # without one of its hosts an engine cannot finish a request
        served.host.count_restart()
        await asyncio.sleep(_RESTART.delay_s(max(1, self._row)))
