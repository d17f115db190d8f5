"""One plan on the real engine: start it, fill its context step by step, read its own timings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from appliance.command import Command
from appliance.engines.llama_server import ending, parse_allocated
from appliance.errors import EngineError, EngineNotReadyError
from appliance.plan import Plan
from appliance.supervisor import Crash, Supervisor
from appliance.tune.candidates import EMPTY, depths
from appliance.tune.search import Measurement, Point

TEXT = Path(__file__).with_name("text.txt")
DECODE_TOKENS = 24
SHARE_FOR_DEPTH = 0.2  # of what is left of the budget, for filling the deep context of one plan


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is being done, for whoever shows progress."""

    plan: Plan
    what: str


async def measure(
    plan: Plan, start: Callable[[Plan], Command], *, left_s: float, deep: int | None, tell: Callable[[Step], None]
) -> Measurement:
    """One start, two or three depths. A failure of the engine is a Measurement with its words, not an exception.

    `deep` is the deepest depth of the plans measured before, so that all are compared at the same depths; None lets
    this plan choose it by its own prefill speed and `left_s`.
    """
    began = time.monotonic()
    lines: list[str] = []
    supervisor = Supervisor(on_line=lines.append)
    tell(Step(plan=plan, what="loading"))
    try:
        supervisor.start(start(plan))
        crash = await supervisor.wait_ready()
        if crash is not None:
            raise _as_error(crash)
        load_s = time.monotonic() - began
        async with Probe(start(plan)) as probe:
            points = await _points(probe, plan, left_s - load_s, deep, tell)
    except EngineError as error:
        return Measurement(
            threads=plan.threads, ubatch=plan.ubatch, error=error.message, seconds=time.monotonic() - began
        )
    finally:
        await supervisor.stop()
    return Measurement(
        threads=plan.threads,
        ubatch=plan.ubatch,
        points=points,
        load_s=load_s,
        seconds=time.monotonic() - began,
        allocated=parse_allocated(lines),
    )


async def _points(
    probe: Probe, plan: Plan, left_s: float, deep: int | None, tell: Callable[[Step], None]
) -> tuple[Point, ...]:
    points: list[Point] = []
    wanted = depths(plan.context, DECODE_TOKENS)
    if deep is not None:
        wanted = (*wanted, deep)
    await probe.warm()
    for depth in wanted:
        tell(Step(plan=plan, what=f"decoding with {depth:,} tokens in the context"))
        points.append(await probe.run(depth, DECODE_TOKENS))
    if deep is None:
        chosen = depths(plan.context, DECODE_TOKENS, prefill_ms=points[-1].prefill_ms, seconds=left_s * SHARE_FOR_DEPTH)
        for depth in chosen[len(points) :]:
            tell(Step(plan=plan, what=f"decoding with {depth:,} tokens in the context"))
            points.append(await probe.run(depth, DECODE_TOKENS))
    return tuple(points)


class Probe:
    """Asks a running engine for completions of growing prefixes of one natural text, and checks what it really did."""

    def __init__(self, command: Command) -> None:
        self._connector = aiohttp.UnixConnector(path=str(command.socket_path))
        self._session = aiohttp.ClientSession(connector=self._connector, timeout=aiohttp.ClientTimeout(total=None))
        self._ids: list[int] = []

    async def __aenter__(self) -> Probe:
        reply = await self._post("/tokenize", {"content": TEXT.read_text(encoding="utf-8")})
        self._ids = reply["tokens"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, depth: int, tokens: int) -> Point:
        """Decodes `tokens` with `depth` tokens in the context; what is cached of a shorter prefix is not read again."""
        reply = await self._post(
            "/completion",
            {
                "prompt": self.prompt(depth),
                "n_predict": tokens,
                "cache_prompt": True,
                "id_slot": 0,
                "ignore_eos": True,
                "temperature": 0,
            },
        )
        return parse_timings(reply, depth, tokens)

    async def warm(self) -> None:
        """The first request of a process pays for pages that no later one pays; its text is the start of no other."""
        tokens = self._ids[EMPTY : 2 * EMPTY]
        await self._post("/completion", {"prompt": tokens, "n_predict": 1, "cache_prompt": False, "id_slot": 0})

    def prompt(self, depth: int) -> list[int]:
        """The text over and over, each round begun a little further on, so that no long stretch repeats."""
        ids: list[int] = []
        turn = 0
        while len(ids) < depth:
            cut = turn * 97 % len(self._ids)
            ids += self._ids[cut:] + self._ids[:cut]
            turn += 1
        return ids[:depth]

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(f"http://engine{route}", json=body) as reply:
                data = await reply.json()
                if reply.status != 200:
                    message = f"engine refused {route} while measuring: {reply.status}: {data}"
                    raise EngineNotReadyError(message)
        except (aiohttp.ClientError, ValueError) as error:
            message = f"engine broke off {route} while measuring: {type(error).__name__}: {error}"
            raise EngineNotReadyError(message) from error
        return dict(data)


def parse_timings(reply: dict[str, Any], depth: int, tokens: int) -> Point:
    """The engine's own `timings`. Raises EngineNotReadyError when it did not do what was asked, so that no figure is of
    something else: fewer tokens than asked for, or a prompt that does not add up to the depth."""
    timings = reply.get("timings", {})
    read, cached, made = (timings.get(name, 0) for name in ("prompt_n", "cache_n", "predicted_n"))
    if read + cached != depth or made != tokens:
        message = f"engine did other work than asked: read {read} + cached {cached} of {depth}, made {made} of {tokens}"
        raise EngineNotReadyError(message)
    # The first token comes out of the prefill, so the engine's own figure spreads n - 1 steps over n tokens when n > 1.
    return Point(
        depth=depth,
        decode_ms=timings["predicted_ms"] / made,
        prefill_ms=timings["prompt_ms"] / max(1, read),
        prefill_tokens=read,
    )


def _as_error(crash: Crash) -> EngineError:
    return ending(crash.describe(), first_error=crash.first_error, log=crash.log, was_ready=crash.was_ready)


def deepest(measurements: Sequence[Measurement]) -> int | None:
    """The third depth that the first good measurement chose, for those that follow."""
    for measurement in measurements:
        if len(measurement.points) > 2:
            return measurement.points[-1].depth
    return None
