"""A follower: reports to the leader each second, and starts and stops its engine as the leader says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace

import aiohttp

from appliance.console.progress import Phase
from appliance.engines.engine import Node
from appliance.errors import ConfigError
from appliance.plan import Plan
from appliance.profile.record import parse_plan
from appliance.race import first_of
from appliance.serve.engine.load import launch, on_ready
from appliance.serve.gateway.listen import HostPart
from appliance.serve.hosts.address import address_towards, is_loopback, leader_of, resolve
from appliance.serve.hosts.group import LOST_S, TICK_S
from appliance.serve.hosts.member import DOCUMENT, FollowerStatus, LeaderReply, member_of, parse_word, shortened
from appliance.serve.model.served_model import ServedModel
from appliance.settings import Settings
from appliance.supervisor import Crash
from appliance.volume import read_or_make_key

ANSWER_S = 5.0
JUDGED_S = 5.0  # how long a silent leader is waited for, once the engine died
LEAVE_S = 1.0  # longest time that a stop waits for the good-bye
SAY_EVERY_S = 10.0
_ALIKE = "give all hosts the same image, the same model and GPUs of one kind, and each a rank of its own"
_REMEDIES = {
    400: _ALIKE,
    401: "all hosts of a group have one API key: give this one the leader's /data/secrets/api_key",
    404: "the leader serves alone, or is no appliance of this release: give it the same --nodes",
    409: _ALIKE,
}


class Silence:
    """The time since the leader was last heard. A pause of this host itself does not count."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._before = clock()
        self._silent_s = 0.0

    @property
    def is_over(self) -> bool:
        """True once the leader was silent for too long."""
        return self._silent_s >= self._limit_s

    def turn(self, *, is_heard: bool) -> None:
        """Count the time since the last call as silence, or begin anew."""
        now = self._clock()
        elapsed_s, self._before = min(now - self._before, TICK_S + ANSWER_S), now
        self._silent_s = 0.0 if is_heard else self._silent_s + elapsed_s


class Follower:
    """One follower. `part` has its documents and actions for the gateway."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        host, port = leader_of(settings)
        self._leader = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._url = f"http://{self._leader}/appliance/v1/{DOCUMENT}"
        words = f"this is host {settings.node_rank} of {settings.nodes}, which takes no requests: ask {self._leader}"
        self.part = HostPart(elsewhere=words)
        self._is_group_ready = False
        self._was_group_ready = False  # True if it was ready in any round
        self._why_silent = ""

    async def follow(self, served: ServedModel) -> None:
        """Take part in rounds. Never returns.

        Raises ConfigError (10) if the leader refuses this host, and the error of an engine that never became ready.
        """
        found = await resolve(self._settings, served.report)
        address = address_towards(found, self._settings)
        me = member_of(served, secrets.token_hex(8))
        async with self.session() as session:
            try:
                while True:
                    word = await self._wait_word(session, served, me)
                    await self._one_round(session, served, me, word, address)
            finally:
                await self._leave(session, me)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        key = read_or_make_key(self._settings.key_path) if self._settings.auth else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            yield session

    async def _wait_word(self, session: aiohttp.ClientSession, served: ServedModel, me: FollowerStatus) -> LeaderReply:
        """Wait until the leader names a round to start."""
        said = float("-inf")
        while True:
            word = await self.tell(session, me)
            if word and word.plan is not None:
                return word
            words = f"waiting for the leader, {self._leader}: {word.message if word else self._why_silent}"
            served.report.phase(Phase.STARTING, words)
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                served.report.info("waiting_for_leader", words)
            await asyncio.sleep(TICK_S)

    async def _one_round(
        self, session: aiohttp.ClientSession, served: ServedModel, me: FollowerStatus, word: LeaderReply, address: str
    ) -> None:
        """Run one round, until the leader ends it, the leader is silent for too long, or the engine dies."""
        self._is_group_ready = False
        me = replace(me, round=word.round)
        self.check_leader(word, address)
        served.join(self._node(word, address))
        launch(served, self._plan(served, word))
        ended = (served.host.wait_failed(), self._until_over(session, me), _announce(served))
        died, over, announced = await first_of(*ended)
        if not announced.cancelled():
            announced.result()  # it ends only by an error
        elif not died.cancelled():
            await self._tell_death(session, served, me, died.result())
        else:
            served.report.warning("round_over", f"this host starts anew: {over.result()}")
        served.report.phase(Phase.RESTARTING)
        await served.host.stop_current(grace_s=0.0)  # without one of its hosts an engine cannot finish a request
        served.host.count_restart()

    def check_leader(self, word: LeaderReply, address: str) -> None:
        """Raise ConfigError (10) if the leader's name is a loopback address there, and so useless to engines here."""
        if is_loopback(word.leader) and not is_loopback(address):
            message = f"the leader's name is loopback there: {word.leader}, and this host's address is {address} "
            message += f"({self._settings.sources['leader']})"
            raise ConfigError(message, hint="give its address, on all hosts: --leader ADDRESS")

    def _node(self, word: LeaderReply, address: str) -> Node:
        return Node(
            nodes=self._settings.nodes,
            rank=self._settings.node_rank,
            address=address,
            leader=word.leader,
            port=word.port,
            environment=self._settings.environment,
            is_ready=self._is_ready,
        )

    async def _is_ready(self) -> bool:
        return self._is_group_ready

    def _plan(self, served: ServedModel, word: LeaderReply) -> Plan:
        """Return the leader's plan with the path of the model here. Raises ConfigError (10) for another release's."""
        try:
            plan = parse_plan(word.plan)
        except ValueError as error:
            message = f"the leader's plan cannot be read: {str(error)[:200]}"
            raise ConfigError(message, hint=_ALIKE) from error
        return replace(plan, model_path=str(served.inputs.model.path))

    async def _until_over(self, session: aiohttp.ClientSession, me: FollowerStatus) -> str:
        """Report each second until the round is over; returns why."""
        silent = Silence(LOST_S)
        while not silent.is_over:
            await asyncio.sleep(TICK_S)
            word = await self.tell(session, me)
            silent.turn(is_heard=word is not None)
            if word and word.round != me.round:
                return word.message or "the leader began anew"
            self._is_group_ready = self._is_group_ready or bool(word and word.is_ready)
        return f"nothing was heard of the leader, {self._leader}, for {LOST_S:.0f} s: {self._why_silent}"

    async def _tell_death(
        self, session: aiohttp.ClientSession, served: ServedModel, me: FollowerStatus, crash: Crash
    ) -> None:
        """Report the death of this engine, and raise its error if this host has to end.

        It ends if the group was never ready and the leader says that this engine failed first: it would fail the same
        way again. An engine that died of another host's is no reason to end.
        """
        error = served.start.engine.as_error(crash, served=self._is_group_ready)
        if await self._is_blamed(session, replace(me, ended=shortened(error.message))) and not self._was_group_ready:
            raise error
        served.report_death(crash)

    async def _is_blamed(self, session: aiohttp.ClientSession, me: FollowerStatus) -> bool:
        """True if the leader says that this host's engine failed first. The leader looks at its own engine before."""
        silent = Silence(JUDGED_S)
        while not silent.is_over:
            word = await self.tell(session, me)
            silent.turn(is_heard=word is not None)
            if word and (word.blames is not None or word.round not in ("", me.round) or word.was_ready):
                return word.blames == me.rank
            await asyncio.sleep(TICK_S)
        return False

    async def _leave(self, session: aiohttp.ClientSession, me: FollowerStatus) -> None:
        with contextlib.suppress(TimeoutError, ConfigError):  # harmless: the leader notices the silence
            async with asyncio.timeout(LEAVE_S):
                await self.tell(session, replace(me, is_leaving=True))

    async def tell(self, session: aiohttp.ClientSession, me: FollowerStatus) -> LeaderReply | None:
        """Report to the leader and return its word; None if it does not answer, with `_why_silent`.

        Raises ConfigError (10) if it refuses this host.
        """
        try:
            async with session.post(self._url, data=json.dumps(asdict(me)), allow_redirects=False) as reply:
                body = await reply.read()
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            self._why_silent = str(error) or type(error).__name__
            return None
        if reply.status == 200:
            word = self._word_in(body)
            self._was_group_ready = self._was_group_ready or word.was_ready
            return word
        self._why_silent = f"{reply.status}: {_message_of(body)}"
        if reply.status in _REMEDIES:
            source = self._settings.sources["leader"]
            message = f"the leader, {self._leader} ({source}), refuses this host: {self._why_silent}"
            raise ConfigError(message, hint=_REMEDIES[reply.status])
        return None

    def _word_in(self, body: bytes) -> LeaderReply:
        """Parse the leader's word. Raises ConfigError (10) for one of another release."""
        try:
            return parse_word(body)
        except ValueError as error:
            source = self._settings.sources["leader"]
            message = f"what the leader, {self._leader} ({source}), says cannot be read: {str(error)[:200]}"
            raise ConfigError(message, hint=_ALIKE) from error


async def _announce(served: ServedModel) -> None:
    """Log the readiness of this host's engine. Never returns."""
    supervisor = served.host.supervisor
    if supervisor and await supervisor.wait_ready() is None:
        await on_ready(served)
    await asyncio.Event().wait()


def _message_of(body: bytes) -> str:
    """Return the message of an error in the API's form; else the beginning of the body."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
