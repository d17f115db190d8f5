"""The tuner that ships, on a machine that is simulated or recorded: `Tuner` itself, with its own settings, in simulated
time. Only what starts an engine is replaced."""

from __future__ import annotations

import asyncio
import io
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol, cast

from appliance.console.report import Report
from appliance.engines.engine import Space
from appliance.engines.llama.planning.arguments.launch import KNOB_EFFECTS
from appliance.errors import EngineError, EngineGpuMemoryError
from appliance.plan import Costs, Plan
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement, scored
from appliance.tune.figures.modes import Mode, choose
from appliance.tune.figures.workload import Mix, Workload
from appliance.tune.search.candidates import EMPTY
from appliance.tune.search.cost_terms import Candidate
from appliance.tune.session import SHARE_FOR_LOADER, SHARE_FOR_SPECULATION
from appliance.tune.trials.engine import Bench
from appliance.tune.trials.loader import refined
from appliance.tune.trials.run_trial import DECODE_TOKENS, WARM_TOKENS, FirstSampling, Sampling, now, points_of
from appliance.tune.tuner import Goal, Tuner

LOADER_S = 1.2  # a plan: 0.3 to 1.2 s (tuning.md 1.5)
MODE: Mode = "speed"  # regret is of a job's time
FAILS_AFTER = 0.5  # of a load: when a start that does not fit ends


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What a start that failed lacked."""

    device: str
    mib: float


class World(Protocol):
    """A machine, simulated or recorded. `noise` is the relative deviation of one short time."""

    noise: float

    def fails(self, candidate: Candidate) -> Missing | None: ...
    def load_s(self, candidate: Candidate) -> float: ...
    def decode_ms(self, candidate: Candidate, depth: float) -> float: ...
    def prefill_ms(self, candidate: Candidate, first: int, last: int) -> float: ...
    def cost_s(self, candidate: Candidate, workload: Workload) -> float: ...


class Engine:
    """Running, once it is loaded."""

    def __init__(self, world: World, candidate: Candidate, draw: random.Random) -> None:
        self._world = world
        self._candidate = candidate
        self._draw = draw
        self._filled = 0

    async def load(self) -> None:
        load_s = self._world.load_s(self._candidate)
        if (missing := self._world.fails(self._candidate)) is None:
            return await asyncio.sleep(load_s)
        await asyncio.sleep(load_s * FAILS_AFTER)
        message = f"{missing.device} lacks {missing.mib:.0f} MiB"
        raise EngineGpuMemoryError(message, was_memory=True, needed_mib=missing.mib, device=missing.device)

    async def warm(self) -> Point:
        point = await self.run(EMPTY, WARM_TOKENS)
        self._filled = 0
        return point

    async def run(self, depth: int, tokens: int) -> Point:
        noise = self._world.noise * math.sqrt(DECODE_TOKENS / tokens)
        decode_ms, prefill_ms = (
            ms * math.exp(self._draw.gauss(0, noise))
            for ms in (
                self._world.decode_ms(self._candidate, depth),
                self._world.prefill_ms(self._candidate, self._filled, depth),
            )
        )
        read, self._filled = depth - self._filled, depth
        await asyncio.sleep((prefill_ms + tokens * decode_ms) / 1000)
        return Point(
            depth=depth,
            decode_ms=decode_ms,
            prefill_ms=prefill_ms / read,
            prefill_tokens=read,
            noise_factor=math.sqrt(max(1.0, (DECODE_TOKENS - 1) / (tokens - 1))),
        )


class Planned:
    """What the tuner asks of a space of plans. `found` are the plans as rivals see them, with their predicted work; of
    a planner that is wrong, it is not the space's own."""

    knob_effects = KNOB_EFFECTS

    def __init__(self, plans: Sequence[Plan], found: Sequence[Candidate]) -> None:
        self.plans = tuple(plans)
        self.candidates = {plan.key: candidate for plan, candidate in zip(plans, found, strict=True)}

    @property
    def found(self) -> tuple[Candidate, ...]:
        return tuple(self.candidates.values())

    def costs(self, plan: Plan) -> Costs:
        return self.candidates[plan.key].work

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        return tuple((need.device, need.need_mib, need.room_mib) for need in self.candidates[plan.key].needs)


async def take(engine: Engine, plan: Plan, look: Sampling | FirstSampling) -> Measurement:
    """Measure a plan as `appliance.tune.trials.run_trial.measure` does, on an engine that was not started."""
    began = now()
    await engine.load()
    load_s = now() - began
    return Measurement(
        key=plan.key,
        points=await points_of(engine, plan, look, lambda _: None),
        is_long=isinstance(look, Sampling) and look.is_long,
        load_s=load_s,
        seconds=now() - began,
    )


class Loader:
    """The engine's own loader in place of the engine: it says which plans do not fit, and is asked about as many as
    there is time for."""

    def __init__(self, fails: Callable[[Candidate], Missing | None], planned: Planned) -> None:
        self._fails = fails
        self._planned = planned
        self.seconds = 0.0

    def refine(
        self, plans: Sequence[Plan], install: object, *, budget_s: float, is_wanted: Callable[[], bool]
    ) -> list[Plan]:
        del install
        asked = int(budget_s / LOADER_S) if is_wanted() else 0
        self.seconds = LOADER_S * len(plans[:asked])
        fitting = (plan for plan in plans[:asked] if self._fails(self._planned.candidates[plan.key]) is None)
        return [*fitting, *plans[asked:]]


async def tune(
    planned: Planned,
    world: World,
    start: Callable[[Candidate], Engine],
    mix: Mix,
    budget_s: float,
    picked: Callable[[Candidate | None], None],
) -> None:
    """Tune as `appliance.tune.session` does, up to the chosen plan. Part of the budget is for speculative decoding.

    Tells after each measurement which candidate would serve if it were the last, and in the end which one does.
    """
    possible = await _refined(planned, world, budget_s)
    plans = {plan.key: plan for plan in possible}
    goal = Goal(mix=mix, mode=MODE, native=max(plan.context for plan in planned.plans))
    seen: list[Measurement] = []

    def on_result(measurement: Measurement) -> None:
        seen.append(measurement)
        so_far = scored((plans[key] for key in dict.fromkeys(m.key for m in seen)), seen)
        best = choose(goal.mode, so_far, mix, native=goal.native).scored.key if so_far else None
        picked(planned.candidates[best] if best else None)

    tuner = Tuner(
        cast("Space", planned),  # the mode `speed` asks for no more of one
        possible,
        lambda plan, look: take(start(planned.candidates[plan.key]), plan, look),
        goal,
        budget_s=max(1.0, budget_s * (1 - SHARE_FOR_SPECULATION) - now()),
        on_result=on_result,
    )
    try:
        tuned = await tuner.run()
        picked(planned.candidates[tuned.plan.key])
    except EngineError:
        picked(None)  # every start failed


async def _refined(planned: Planned, world: World, budget_s: float) -> Sequence[Plan]:
    loader = Loader(world.fails, planned)
    bench = cast("Bench", SimpleNamespace(engine=loader, install=None))
    report = Report("json", io.StringIO())
    found = await refined(planned.plans, bench, budget_s=budget_s * SHARE_FOR_LOADER, report=report)
    await asyncio.sleep(loader.seconds)
    return found
