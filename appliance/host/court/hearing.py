"""The hearing: old and new build do the same work, in pairs and in idle time, and everything is judged at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from appliance.errors import FatalError
from appliance.host.court import answers, suite
from appliance.host.court.answers import Answers, Token
from appliance.host.court.judge import Pair, Speeds, Times, Verdict, judge
from appliance.host.court.memory import Memory, memory_of
from appliance.host.court.mix import PASS_S, Mix
from appliance.host.court.replay import Build, replay, warm
from appliance.host.court.sides import Side, Sides, status_of
from appliance.host.court.suite import Rows
from appliance.host.court.watch import Sample, disturbance
from appliance.values import dataclass

POLL_S = 0.5

T = TypeVar("T")
Sampler = Callable[[Sequence[str]], Sample]
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the court found. `seconds` is the time in which speeds were compared."""

    mix: str
    together: bool  # True if both builds were loaded at once
    seconds: float
    speeds: Speeds
    memory: Memory
    answers: Answers
    rows: Rows

    @property
    def verdict(self) -> Verdict:
        """Lost if anything is lost. Speeds have to be decided; an engine may not tell the rest."""
        verdicts = (self.speeds.verdict, self.memory.verdict, self.answers.verdict, self.rows.verdict)
        return Verdict.LOST if Verdict.LOST in verdicts else self.speeds.verdict


class Hearing:
    """Compares two builds. `limit_s` is the most time for their speeds."""

    def __init__(self, sides: Sides, mix: Mix, *, limit_s: float, sampler: Sampler, tell: Tell) -> None:
        self._sides = sides
        self._mix = mix
        self._limit_s = limit_s
        self._sampler = sampler
        self._tell = tell
        self._cpus = os.cpu_count() or 1
        self._turn = 0

    def hear(self) -> Finding:
        """Compare everything. Raises FatalError if a build breaks off; its message names which."""
        new, old = self._asked(Side.NEW), self._asked(Side.OLD)  # in this order, since the new build is up
        mix = self.fitted()
        began = time.monotonic()
        speeds = self.speeds(mix)
        return Finding(
            mix=mix.source,
            together=self._sides.passes == 1,
            seconds=time.monotonic() - began,
            speeds=speeds,
            memory=memory_of(old[0], new[0]),
            answers=answers.compare(old[1], new[1]),
            rows=suite.compare(old[2], new[2]),
        )

    def _asked(self, side: Side) -> tuple[dict[str, Any], Sequence[Sequence[Token]], dict[str, bool]]:
        self._tell(f"the {side} image answers fixed prompts and the abilities suite")
        return self._at(side, lambda build: (status_of(build.gateway), answers.ask(build), suite.passes(build)))

    def _at(self, side: Side, work: Callable[[Build], T]) -> T:
        try:
            return work(self._sides.up(side))
        except FatalError as error:
            error.message = f"the {side} image does not do its work: {error.message}"
            raise

    def fitted(self) -> Mix:
        """Return the mix, shortened so that one pass takes `PASS_S` on the old build."""
        self._at(Side.OLD, lambda build: warm(build, self._mix))
        began = time.monotonic()
        self._at(Side.OLD, lambda build: replay(build, self._mix.scaled(0.1), self._next()))
        tenth_s = time.monotonic() - began
        return self._mix.scaled(PASS_S / (10 * tenth_s))

    def speeds(self, mix: Mix) -> Speeds:
        """Compare speeds until they are known precisely or the time is over. Raises FatalError."""
        pairs: list[Pair] = []
        order = (Side.OLD, Side.NEW)  # the old build is up
        waited_s = 0.0
        began = time.monotonic()
        warmed: set[Side] = set()
        while time.monotonic() - began - waited_s < self._limit_s:
            turns = [self._next() for _ in range(self._sides.passes)]
            times: dict[Side, Times] = {}
            disturbances: list[str] = []
            for side in order:
                build = self._at(side, lambda build: build)
                if side not in warmed or self._sides.passes > 1:  # a load has emptied the cache
                    self._at(side, lambda build: warm(build, mix))
                    warmed.add(side)
                waited_s += self._until_idle(build)
                times[side], words = self._passes(side, build, mix, turns)
                disturbances += [words] if words else []
            pairs.append(Pair(old=times[Side.OLD], new=times[Side.NEW], disturbance=next(iter(disturbances), "")))
            speeds = judge(pairs)
            self._tell(_progress(speeds))
            if speeds.is_precise:
                return speeds
            order = order[::-1]
        return judge(pairs)

    def _passes(self, side: Side, build: Build, mix: Mix, turns: Sequence[int]) -> tuple[Times, str]:
        """Return the times of one pass for each of `turns`, and what disturbed them; "" if nothing did."""
        posted = build.posted()
        before = self._sampler(self._sides.working)
        times = [self._at(side, partial(replay, mix=mix, turn=turn)) for turn in turns]
        after = self._sampler(self._sides.working)
        own = len(turns) * sum(map(len, mix.bursts))
        words = disturbance(before, after, cpus=self._cpus)
        if build.came_since(posted, own):
            words = "requests of clients came"
        whole = Times(prefill_s=sum(t.prefill_s for t in times), decode_s=sum(t.decode_s for t in times))
        return whole, words

    def _until_idle(self, build: Build) -> float:
        """Wait until no client's request runs; return the seconds. What still runs after the time limit disturbs the
        pair."""
        began = time.monotonic()
        while build.running() and time.monotonic() - began < self._limit_s:
            self._tell("waiting for a pause between requests")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def _next(self) -> int:
        self._turn += 1
        return self._turn


def _progress(speeds: Speeds) -> str:
    words = f"comparing speeds: {speeds.pairs} pairs"
    words += f", {speeds.disturbed} disturbed" if speeds.disturbed else ""
    figures = (f", {each.what} time {each.share:+.1%} ±{each.half:.1%}" for each in speeds.slowdowns)
    return words + "".join(figures)
