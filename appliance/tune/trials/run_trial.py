"""Trial of one plan on the real engine: start it, fill its context step by step, read its own timings."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from appliance.engines.engine import Client, Completion
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.probe.load.conditions import Conditions
from appliance.probe.load.watch import Watch
from appliance.tune.figures.curve import LONGER, Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.search.candidates import EMPTY, deep_depth, empty_depth, reading_s, work_depth
from appliance.tune.trials.engine import Bench, unless_stalled

TEXT = Path(__file__).with_name("text.txt")
DECODE_TOKENS = 24
# If the first measurement of a slow machine would exceed the time, it decodes fewer tokens, at least FEWEST_TOKENS. If
# these do not fit either, the warm-up's time is the result. A measurement of at most AT_LEAST_S is never shortened.
FEWEST_TOKENS = 4
WARM_TOKENS = 3
AT_LEAST_S = 1.0
LOG_LINES = 5000  # sizes of buffers are within the first few hundred lines


@dataclass(frozen=True, kw_only=True)
class Step:
    """Current step of a tuning, for showing progress."""

    plan: Plan
    what: str


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Depths at which a plan is measured, and number of tokens decoded at each."""

    depths: tuple[int, ...]
    is_long: bool = False
    copied_batch: int = 0  # tokens for which host weights are copied at once; 0: none are copied
    most_s: float | None = None  # limit from readiness on, which only an engine that never ends exceeds

    @property
    def tokens(self) -> int:
        return DECODE_TOKENS * (LONGER if self.is_long else 1)


@dataclass(frozen=True, kw_only=True)
class FirstSampling:
    """Limits for measuring the first plan, whose prefill speed decides the depths at which all others are measured."""

    wanted: int  # the workload's depth
    work_s: float  # time for filling the context up to the workload's depth
    deep_s: float  # time for filling it further
    copied_batch: int = 0  # as in Sampling
    until: float = float("inf")  # by now(): no deeper point is begun that would end later
    end: float = float("inf")  # by now(): the first point ends before, with fewer tokens if necessary
    most_s: float | None = None  # as in Sampling


def now() -> float:
    """Return seconds by the event loop's clock, which timeouts use too, so that a simulation can replace both."""
    return asyncio.get_running_loop().time()


async def measure(
    plan: Plan,
    look: Sampling | FirstSampling,
    *,
    bench: Bench,
    on_step: Callable[[Step], None],
    watch: Callable[[], Watch],
    begun: Measurement | None = None,
    on_depth: Callable[[Measurement], None] = lambda _: None,
) -> Measurement:
    """Measure on the engine that serves if it has this plan, else load one. Raises the engine's error if it fails.

    `begun` is an interrupted measurement whose depths are not measured again. `on_depth` gets the measurement so far
    after each depth. Other load on the machine is watched from readiness on: during a load the kernel's work is our
    own.
    """
    began = now()
    lines: deque[str] = deque(maxlen=LOG_LINES)
    on_step(Step(plan=plan, what="loading"))
    async with bench.opened(plan, on_line=lines.append) as opened:
        command, load_s = opened.command, opened.load_s
        if opened.serves:
            began -= load_s  # `seconds` is what a measurement with a load takes

        def so_far(points: tuple[Point, ...], conditions: Conditions) -> Measurement:
            """Return the measurement so far. A disturbance of an earlier part counts for the whole."""
            seconds = now() - began + (begun.seconds - begun.load_s if begun else 0.0)
            return Measurement(
                key=plan.key,
                points=points,
                is_long=is_long(look),
                load_s=load_s,
                cost_s=seconds - load_s if opened.serves else None,
                seconds=seconds,
                conditions=begun.conditions if begun and begun.disturbance else conditions,
            )

        if not opened.serves:
            bench.engine.loaded(plan, tuple(lines), bench.install, is_trial=True)
        async with bench.engine.client(command) as client, watch() as watching:
            probe = await Probe.of(client)

            def reached(points: tuple[Point, ...]) -> None:
                on_depth(so_far(points, watching.so_far()))

            work = points_of(probe, plan, look, on_step, known=begun.points if begun else (), on_points=reached)
            points = await unless_stalled(work, opened.supervisor, command.stall_timeout_s, most_s=look.most_s)
        if opened.serves:
            return replace(so_far(points, watching.conditions), allocated=opened.allocated)
        allocated, _ = await bench.engine.confirm_allocated(plan, bench.engine.allocated(lines), bench.socket_path)
    return replace(so_far(points, watching.conditions), allocated=allocated)


def is_long(look: Sampling | FirstSampling) -> bool:
    return isinstance(look, Sampling) and look.is_long


class Asks(Protocol):
    """Interface of a running engine for measuring."""

    async def warm(self) -> Point: ...
    async def run(self, depth: int, tokens: int) -> Point: ...


async def points_of(
    probe: Asks,
    plan: Plan,
    look: Sampling | FirstSampling,
    on_step: Callable[[Step], None],
    *,
    known: Sequence[Point] = (),
    on_points: Callable[[tuple[Point, ...]], None] = lambda _: None,
) -> tuple[Point, ...]:
    """Return the points of a plan. `known` points are not measured again. `on_points` gets all points after each new
    one."""
    points: list[Point] = []
    by_depth = {point.depth: point for point in known}

    async def add(depth: int, tokens: int = DECODE_TOKENS) -> Point:
        if depth in by_depth:
            points.append(by_depth[depth])
            return points[-1]
        if points and points[-1].depth in by_depth:  # this engine has not read the tokens up to the known point yet
            await probe.run(points[-1].depth, WARM_TOKENS)
        on_step(Step(plan=plan, what=f"decoding with {depth:,} tokens in the context"))
        points.append(replace(await probe.run(depth, tokens), copied_batch=look.copied_batch))
        on_points(tuple(points))
        return points[-1]

    warmed = replace(await probe.warm(), copied_batch=look.copied_batch)
    if isinstance(look, Sampling):
        for depth in look.depths:
            await add(depth, look.tokens)
        return tuple(points)
    empty = empty_depth(plan.context, DECODE_TOKENS)
    tokens = tokens_within(warmed, empty, look.end - now())
    if tokens is None:
        return (warmed,)
    last = await add(empty, tokens)
    room = {"context": plan.context, "tokens_each": DECODE_TOKENS * LONGER}
    batch = look.copied_batch
    work = work_depth(**room, wanted=look.wanted, prefill_ms=last.prefill_ms, seconds=look.work_s, copied_batch=batch)
    if work and _ends_at(last, work, copied_batch=batch) <= look.until:
        last = await add(work)
        deep = deep_depth(**room, prefill_ms=last.prefill_ms, seconds=look.deep_s, work=work)
        if deep and _ends_at(last, deep) <= look.until:
            await add(deep)
    return tuple(points)


def tokens_within(warmed: Point, depth: int, left_s: float) -> int | None:
    """Return the number of tokens that can be decoded at this depth in the time left, prefill included, by the speed of
    the warm-up. None if they would be fewer than FEWEST_TOKENS."""
    left_ms = 1000 * max(left_s, AT_LEAST_S) - depth * warmed.prefill_ms
    tokens = 1 + min(DECODE_TOKENS - 1, left_ms / warmed.decode_ms)
    return int(tokens) if tokens >= FEWEST_TOKENS else None


def _ends_at(last: Point, depth: int, *, copied_batch: int = 0) -> float:
    """Return when the next point would be done, by now(), if tokens took as long as at the last point."""
    read_s = reading_s(depth - last.depth, last.prefill_ms, first=last.prefill_tokens, copied_batch=copied_batch)
    return now() + read_s + DECODE_TOKENS * last.decode_ms / 1000


class Probe:
    """Client that asks a running engine for completions of growing prefixes of one natural text, and checks that it did
    the work that was asked."""

    def __init__(self, client: Client, ids: Sequence[int]) -> None:
        self._client = client
        self._ids = list(ids)

    @classmethod
    async def of(cls, client: Client) -> Probe:
        """Make a probe. Raises EngineNotReadyError if the model's tokenizer makes too few tokens of the text."""
        ids = await client.tokenize(TEXT.read_text(encoding="utf-8"))
        if len(ids) < 2 * EMPTY:
            message = f"engine made {len(ids)} tokens of the text that is measured with, too few of {2 * EMPTY}"
            raise EngineNotReadyError(message)
        return cls(client, ids)

    async def run(self, depth: int, tokens: int) -> Point:
        """Decode `tokens` with `depth` tokens in the context. A cached shorter prefix is not read again."""
        return point_of(await self._client.complete(self.prompt(depth), tokens, slot=0), depth, tokens)

    async def warm(self) -> Point:
        """Make the first request, which is slower than later ones, since it touches memory pages for the first time.
        Its text is not a prefix of any other request."""
        found = await self._client.complete(self._ids[EMPTY : 2 * EMPTY], WARM_TOKENS, uses_cache=False, slot=0)
        return point_of(found, EMPTY, WARM_TOKENS)

    async def complete(self, prompt: Sequence[int], tokens: int) -> Completion:
        """Complete a prompt in a slot that the engine chooses, like any client's request."""
        return await self._client.complete(prompt, tokens)

    async def repeat(self, depth: int, tokens: int, *, is_speculating: bool) -> Point:
        """Measure like `run` on an engine that serves clients: in a slot that the engine chooses, with the whole prompt
        read.

        With speculative decoding, decode time depends on the text, and no request can turn draft tokens off. So such an
        engine is asked for two tokens at a time, each request continuing the last one. An engine drafts at most the
        tokens left after the next one, so the second token is a plain step.
        """
        warmed = await self._client.complete(self._ids[EMPTY : 2 * EMPTY], WARM_TOKENS, uses_cache=False)
        slot = warmed.slot  # the same slot again, so that only one slot loses its cached prompt
        prompt, each = self.prompt(depth), 2 if is_speculating else tokens
        found = await self._client.complete(prompt, each, uses_cache=False, slot=slot)
        first = plain_point_of(found, depth, each)
        steps_ms = [first.decode_ms]
        for _ in range(each, tokens, 2):
            prompt = [*prompt, *found.tokens]
            found = await self._client.complete(prompt, each, slot=slot)
            steps_ms.append(plain_point_of(found, len(prompt), each).decode_ms)
        return replace(first, decode_ms=sum(steps_ms) / len(steps_ms))

    def prompt(self, depth: int) -> list[int]:
        """Return the first `depth` tokens of the text, repeated as often as needed. Each repetition begins a little
        later in the text, so that no long passage repeats at the same distance."""
        ids: list[int] = []
        turn = 0
        while len(ids) < depth:
            cut = turn * 97 % len(self._ids)
            ids += self._ids[cut:] + self._ids[:cut]
            turn += 1
        return ids[:depth]


def plain_point_of(found: Completion, depth: int, tokens: int) -> Point:
    """Return the point, like `point_of`. Also raises EngineNotReadyError if there were draft tokens, with which the
    time depends on the text."""
    if found.drafted:
        message = f"engine made {found.drafted} draft tokens while plain decode steps were measured"
        raise EngineNotReadyError(message)
    return point_of(found, depth, tokens)


def point_of(found: Completion, depth: int, tokens: int) -> Point:
    """Return the point of a completion. Raises EngineNotReadyError if the engine did other work than asked: another
    number of tokens, a prompt that does not add up to `depth`, or no time."""
    if found.read + found.cached != depth or found.made != tokens:
        message = (
            f"engine did other work than asked: read {found.read} + cached {found.cached} of {depth}, "
            f"made {found.made} of {tokens}"
        )
        raise EngineNotReadyError(message)
    if found.prefill_ms <= 0 or found.decode_ms <= 0:
        message = (
            f"engine gave no times: {found.prefill_ms:g} ms for the prompt, {found.decode_ms:g} ms for {found.made} "
            "tokens"
        )
        raise EngineNotReadyError(message)
    return Point(
        depth=depth,
        decode_ms=found.decode_ms / max(1, found.made - 1),
        prefill_ms=found.prefill_ms / max(1, found.read),
        prefill_tokens=found.read,
        noise_factor=math.sqrt(max(1.0, (DECODE_TOKENS - 1) / max(1, found.made - 1))),
    )
