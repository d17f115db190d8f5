"""The followers as the leader sees them: who has joined, who was lost, and why a round is over. No I/O."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Any

from appliance.console.report import Report
from appliance.engines.engine import Host
from appliance.serve.hosts.member import FollowerStatus, LeaderReply, why_refused
from appliance.values import dataclass

LOST_S = 30.0  # silence after which a host is lost; it reports each second
TICK_S = 1.0
TOKENS_MAX = 1000  # most tokens remembered: each restarted process has a new one


class RefusedError(Exception):
    """The reason why a host does not belong to the group, for its log."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a round is over. `by_engine` is True if an engine failed, which may fail the same way again."""

    words: str
    by_engine: bool
    rank: int


class _FollowerState:
    def __init__(self, member: FollowerStatus) -> None:
        self.member = member
        self.silent_s = 0.0
        self.rivals: set[str] = set()  # tokens of other processes with the same rank


class Group:
    """The group in one running loop. `own` is None until the leader knows its own model.

    One caller uses `missing`, `begin`, `wait_failed` and `end`, in this order, round after round. `heard` and `tick`
    are called at any moment.
    """

    def __init__(self, nodes: int, report: Report) -> None:
        self.own: FollowerStatus | None = None
        self.message = "the leader is starting"  # sent to followers that have nothing to run
        self._nodes = nodes
        self._report = report
        self._seen: dict[int, _FollowerState] = {}
        self._refused: set[str] = set()  # tokens whose refusal was logged
        self._duplicates: set[str] = set()
        self._word: LeaderReply | None = None  # the word for the round that runs
        self._was_ready = False
        self._failure: Failure | None = None
        self._changed = asyncio.Event()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not join, or still run an earlier round."""
        current = self._word.round if self._word else ""
        there = {rank for rank, seen in self._seen.items() if seen.member.round in ("", current)}
        return tuple(rank for rank in range(1, self._nodes) if rank not in there)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts by rank, once all have joined."""
        members = [self._seen[rank].member for rank in sorted(self._seen)]
        return tuple(Host(name=each.name, gpus=each.gpus, shm_mib=each.shm_mib) for each in members)

    @property
    def was_ready(self) -> bool:
        """True if the group was ready in this round or an earlier one."""
        return self._was_ready

    def heard(self, member: FollowerStatus) -> LeaderReply:
        """Note a follower's report and return the answer. Raises RefusedError."""
        return replace(self._answer(member), was_ready=self._was_ready)

    def _answer(self, member: FollowerStatus) -> LeaderReply:
        if self.own is None:
            return LeaderReply(message=self.message)
        if why := why_refused(self.own, member):
            raise self._refusal(member, why)
        if member.token in self._duplicates:
            name = self._seen[member.rank].member.name if member.rank in self._seen else "another host"
            raise self._refusal(member, f"node rank twice: {member.rank} is that of {name} as well")
        seen = self._seen.get(member.rank)
        if seen and seen.member.token != member.token:
            # The earlier process counts as gone unless it is heard again.
            if len(seen.rivals) < TOKENS_MAX:
                seen.rivals.add(member.token)
            return LeaderReply(message=f"node rank {member.rank} was that of {seen.member.name}, which may be gone")
        if seen:
            self._duplicates |= seen.rivals
        if member.is_leaving:
            self._lose(member.rank, "it was stopped")
            return LeaderReply(message="good-bye")
        return self._take(member)

    def tick(self, elapsed_s: float) -> None:
        """Count silence by the leader's clock; a pause of the leader itself does not count."""
        for rank, seen in list(self._seen.items()):
            seen.silent_s += min(elapsed_s, 2 * TICK_S)
            if seen.silent_s >= LOST_S:
                self._lose(rank, f"nothing was heard of it for {LOST_S:.0f} s")

    def begin(self, leader: str, port: int, plan: dict[str, Any]) -> None:
        """Begin the next round: followers start the engine with `plan`."""
        self._failure = None
        self._word = LeaderReply(
            round=secrets.token_hex(8), message="", blames=None, leader=leader, port=port, plan=plan
        )

    def set_ready(self) -> None:
        """Tell followers that the whole group answers."""
        if self._word:
            self._was_ready = True
            self._word = replace(self._word, is_ready=True)

    def end(self, words: str) -> None:
        """End the round: followers stop their engines."""
        self._word, self.message = None, words
        self._note()

    async def blame(self, rank: int) -> None:
        """Tell followers whose engine ended the round for good; returns once that host has left."""
        if self._word:
            self._word = replace(self._word, blames=rank)
        while rank in self._seen:
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until a host joins, leaves or fails."""
        self._changed.clear()
        await self._changed.wait()

    @property
    def failure(self) -> Failure | None:
        """Why this round is over; None while it runs."""
        return self._failure

    async def wait_failed(self) -> Failure:
        """Wait until this round is over."""
        while self._failure is None:
            await self.wait_change()
        return self._failure

    def document(self) -> dict[str, Any]:
        """Return the group for /appliance/v1/group."""
        return {
            "nodes": self._nodes,
            "round": self._word.round if self._word else None,
            "is_ready": bool(self._word and self._word.is_ready),
            "missing": list(self.missing),
            "hosts": [_shown(self._seen[rank].member) for rank in sorted(self._seen)],
        }

    def _take(self, member: FollowerStatus) -> LeaderReply:
        word = self._word
        is_new = member.rank not in self._seen
        seen = self._seen.setdefault(member.rank, _FollowerState(member))
        before, seen.member, seen.silent_s = seen.member.round, member, 0.0
        if is_new:
            words = f"host {member.rank} has joined: {member.name}, {len(member.gpus)} GPUs, {member.chips}"
            self._report.info("host_joined", words, node_rank=member.rank, name=member.name)
        if word and (before or member.round) == word.round and (member.ended or member.round != word.round):
            why = member.ended or "it does not run its engine any more"
            self._fail(f"host {member.rank} ({member.name}): {why}", rank=member.rank, by_engine=True)
        if is_new or before != member.round:
            self._note()
        if word is None:
            return LeaderReply(message=self.message)
        if self._failure:  # a round that is over takes no new host
            return LeaderReply(message=self._failure.words, is_ready=word.is_ready, blames=word.blames)
        return replace(word, plan=None) if member.round == word.round else word

    def _lose(self, rank: int, why: str) -> None:
        seen = self._seen.pop(rank, None)
        if seen is None:
            return
        self._duplicates -= seen.rivals
        words = f"host {rank} ({seen.member.name}) was lost: {why}"
        self._report.warning("host_lost", words, node_rank=rank, name=seen.member.name)
        if self._word:
            self._fail(words, rank=rank, by_engine=False)
        self._note()

    def _fail(self, words: str, *, rank: int, by_engine: bool) -> None:
        if self._failure is None:
            self._failure = Failure(words=words, rank=rank, by_engine=by_engine)
            self._note()

    def _note(self) -> None:
        self._changed.set()

    def _refusal(self, member: FollowerStatus, why: str) -> RefusedError:
        if member.token not in self._refused and len(self._refused) < TOKENS_MAX:
            self._refused.add(member.token)
            self._report.warning("host_refused", f"host {member.rank} ({member.name}) is refused: {why}")
        return RefusedError(why)


def _shown(member: FollowerStatus) -> dict[str, Any]:
    gpus = [gpu.name for gpu in member.gpus]
    return {"node_rank": member.rank, "name": member.name, "gpus": gpus, "round": member.round or None}
