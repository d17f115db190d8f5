"""The tuner that ships, on a machine that is simulated or recorded: `Tuner` itself, with its own settings, in simulated
time. Only what starts an engine is replaced."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from appliance.engines.engine import Space
from appliance.engines.llama.planning.launch import KNOB_EFFECTS, LlamaLaunch
from appliance.errors import EngineError, EngineGpuMemoryError
from appliance.plan import Costs, Device, GpuAllocation, Memory, Placement, Plan
from appliance.tune.candidates import EMPTY
from appliance.tune.curve import Point
from appliance.tune.measure import DECODE_TOKENS, WARM_TOKENS, FirstSampling, Sampling, now, points_of
from appliance.tune.measurement import Measurement, scored
from appliance.tune.modes import choose
from appliance.tune.terms import Candidate
from appliance.tune.tuner import Goal, Tuner
from appliance.tune.workload import Mix, Workload
from benchmarks.tuner_machines import Missing

FAILS_AFTER = 0.5  # of a load: when a start that does not fit ends
CARD = Device(
    id="", name="", index=0, free_mib=0, held_back_mib=0, bandwidth_gb_s=1, upload_gb_s=1, pinned_gb_s=1
)  # what it holds is not of interest, only that it is used
NOTHING = Memory(weights=0, kv=0, compute=0, output=0, cache=0, overhead=0)


class World(Protocol):
    """A machine, simulated or recorded. `noise` is the relative deviation of one short time."""

    noise: float

    def fails(self, candidate: Candidate) -> Missing | None: ...
    def load_s(self, candidate: Candidate) -> float: ...
    def decode_ms(self, candidate: Candidate, depth: float) -> float: ...
    def prefill_ms(self, candidate: Candidate, first: int, last: int) -> float: ...
    def job_s(self, candidate: Candidate, workload: Workload) -> float: ...


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
    """What the tuner asks of a space of plans, of candidates."""

    def __init__(self, found: Sequence[Candidate]) -> None:
        self.candidates = {plan_of(candidate).key: candidate for candidate in found}
        self.plans = [plan_of(candidate) for candidate in found]

    knob_effects = KNOB_EFFECTS

    def costs(self, plan: Plan) -> Costs:
        return self.candidates[plan.key].work

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        return tuple((need.device, need.need_mib, need.room_mib) for need in self.candidates[plan.key].needs)


def plan_of(candidate: Candidate) -> Plan:
    knobs = candidate.by_knob
    away, threads, ubatch = (int(knobs[name]) for name in ("cpu_layers", "threads", "ubatch"))
    split = str(knobs.get("split", "none"))
    card = GpuAllocation(gpu=CARD, device="", layers=0, memory=NOTHING)
    cards = () if "split" not in knobs else (card,) if split == "none" else (card, card)
    return Plan(
        engine="",
        model_path="",
        alias="",
        context=candidate.context,
        kv_type=str(knobs["kv_type"]),
        parallel=1,
        is_embedding=False,
        launch=LlamaLaunch(
            threads=threads,
            threads_batch=threads,
            batch=ubatch,
            ubatch=ubatch,
            cache_ram_mib=0,
            flash_attention=True,
            load_mode=str(knobs.get("load_mode", "mmap")),
        ),
        memory=NOTHING,
        usable_mib=0,
        placement=Placement(shares=cards, cpu_expert_layers=away, split_mode=split),
    )


async def take(engine: Engine, plan: Plan, look: Sampling | FirstSampling) -> Measurement:
    """As `appliance.tune.measure.measure` does, of an engine that was not started."""
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


async def tune(
    found: Sequence[Candidate],
    start: Callable[[Candidate], Engine],
    mix: Mix,
    budget_s: float,
    picked: Callable[[Candidate | None], None],
) -> None:
    """Tells after each measurement which candidate would serve if it were the last, and in the end which one does."""
    space = Planned(found)
    plans = {plan.key: plan for plan in space.plans}
    goal = Goal(mix=mix, mode="speed", native=max(plan.context for plan in space.plans))
    seen: list[Measurement] = []

    def on_result(measurement: Measurement) -> None:
        seen.append(measurement)
        so_far = scored((plans[key] for key in dict.fromkeys(m.key for m in seen)), seen)
        best = choose(goal.mode, so_far, mix, native=goal.native).scored.key if so_far else None
        picked(space.candidates[best] if best else None)

    tuner = Tuner(
        cast("Space", space),  # the mode `speed` asks for no more of one
        space.plans,
        lambda plan, look: take(start(space.candidates[plan.key]), plan, look),
        goal,
        budget_s=budget_s,
        on_result=on_result,
    )
    try:
        tuned = await tuner.run()
        picked(space.candidates[tuned.plan.key])
    except EngineError:
        picked(None)  # every start failed
