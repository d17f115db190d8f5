"""Machines that are simulated, with effects that no predictor knows. The tuner must not import this; a test holds it.

What can be tried, what it needs and what it is predicted to take are the product's own: `Space.all()` of a published
model on a described machine (tests/golden). The truth (`Machine`) is drawn from a seed. Each of its effects is an
assumption, with where it comes from, in `EFFECTS`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.hardware.assumptions import PAGEABLE_SHARE
from appliance.engines.llama.planning.placement.batch import PINNED
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR
from appliance.engines.llama.planning.space import Space
from appliance.model import Model
from appliance.plan import Costs, Plan
from appliance.probe import Hardware, Speeds
from appliance.settings import resolve_settings
from appliance.tune.figures.workload import Workload, excess_s
from appliance.tune.search.candidates import needs
from appliance.tune.search.cost_terms import Candidate, Value
from benchmarks.tuner_ours import MODE, Missing, Planned
from tests.builders import facts_for, model
from tests.golden.matrix import machine

START_S = 0.5  # of a server without a model: the recorded table's smallest took so long
LOAD_GB_S = 2.5  # a model's bytes, out of the page cache into memory that is not pinned, or from an NVMe drive
QUANTIZATION = "Q4_K_M"

# Range of each effect, or the standard deviation of ln(true / predicted) for rates.
EFFECTS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "gpu": ((0.15,), "eta of 0.70 to 0.85 of a card's bandwidth (tuning.md 2.4), doubled"),
    "cpu": ((0.2,), "eta of 0.75 to 0.9 of STREAM (tuning.md 2.4), doubled"),
    "cpu_depth": ((0.3,), "chosen: a cache is read in other patterns than weights"),
    "pcie": ((0.2,), "0.80 to 0.90 of a link's rate, small copies much lower (tuning.md 2.5)"),
    "fixed": ((0.3,), "40 to 91 us a layer fit as well (planning/assumptions.py)"),
    "prefill": ((0.25,), "benchmarks/speed_model.yaml: rows within 50 %"),
    "noise": ((0.03, 0.10), "3 to 10 % of a short time is usual; the recorded table has 11 to 13 %"),
    "threads": ((0.05, 0.25), "chosen: what each doubling of threads beyond the cliff costs, twice"),
    "ubatch": ((0.1,), "chosen: of each size on its own, since ubatches are no line"),
    "kv_type": ((0.0, 0.15), "chosen: what a rounded cache costs a token beyond its bytes; two thirds of it a prompt"),
    "tensor": ((0.2,), "43.8 to 59.5, 120.6 to 84.2 tok/s against its constants, from one report (llama.cpp#19378)"),
    "mapped": ((0.43, 0.83), "of pinned copies: 11 of 25.6 GB/s, and 1 / 1.21 (tuning.md 1.5, llama.cpp#25859)"),
    "load_mode": ((0.97, 1.05), "0.97 to 1.05 a token without mmap: medians of the recorded table's three models"),
    "knee": ((300, 2000), "tokens: 14.5, 17.7, 25.6, 55.5, 94 ms at 0 to 4,096 on a CPU (tune/README.md)"),
    "steep": ((2, 4), "times as steep beyond it: the same"),
    "contention": ((0.1, 0.6), "copies and cores share DRAM: 29.97 and 13.09 alone, 21.89 + 8.41 (tuning.md 0.1)"),
    "need": ((0.98, 1.03), "of predicted memory: chosen; the loader's own figures are exact (tuning.md 2.8)"),
    "need_ubatch": ((0.0, 0.25), "MiB for each token of a ubatch: chosen; compute buffers are predicted worst"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine."""

    name: str
    machine: str
    model: str
    is_server: bool = False  # the card beside 32 cores and 512 GB on twelve channels

    @cached_property
    def of(self) -> Model:
        return model(self.model, QUANTIZATION)

    @cached_property
    def hardware(self) -> Hardware:
        found = machine(self.machine)
        if not self.is_server:
            return found
        memory = replace(found.memory, total_mib=524_288, available_mib=512_000)
        cpu = replace(found.cpu, logical=64, physical=32)
        return replace(found, cpu=cpu, memory=memory, speeds=Speeds(dram_gb_s=290.0))

    @cached_property
    def space(self) -> Space:
        image, engine = facts_for(self.hardware)
        return Space(resolve_settings({"mode": MODE, "moe_slots": "off"}, {}), image, engine, self.hardware, self.of)

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(self.space.all())

    @cached_property
    def costs(self) -> Mapping[str, Costs]:
        """Costs that the product predicts, by plan."""
        return {plan.key: self.space.costs(plan) for plan in self.plans}

    @cached_property
    def cores(self) -> int:
        return self.hardware.cpu.cores

    def planned(self, off: random.Random | None = None) -> Planned:
        """With `off`, each rate of the prediction is wrong by 2, either way; the plans stay those of the right one."""
        costs = self.costs if off is None else mistaken(self.costs, off)
        return Planned(self.plans, [candidate_of(self.space, plan, costs[plan.key]) for plan in self.plans])


CASES = (
    Case(name="8 GB laptop, Qwen3-30B-A3B", machine="L8", model="qwen3-30b-a3b"),
    Case(name="2x RTX 4090, Llama 3.3 70B", machine="2x4090", model="llama-3.3-70b"),
    Case(name="RTX 4090, DeepSeek-V3 in 512 GB", machine="4090", model="deepseek-v3", is_server=True),
    Case(name="2x RTX 2080 Ti, Qwen3-32B", machine="2x2080Ti", model="qwen3-32b"),
)


def mistaken(costs: Mapping[str, Costs], draw: random.Random) -> dict[str, Costs]:
    """Costs as a planner predicts them that is wrong about its rates."""
    off = {name: draw.choice((0.5, 2.0)) for name in ("gpu", "cpu", "pcie", "prefill")}
    return {
        key: replace(
            each,
            gpu_ms=each.gpu_ms * off["gpu"],
            gpu_depth_us=each.gpu_depth_us * off["gpu"],
            cpu_ms=each.cpu_ms * off["cpu"],
            cpu_depth_us=each.cpu_depth_us * off["cpu"],
            copy_ms=each.copy_ms * off["pcie"],
            gpu_prefill_ms=each.gpu_prefill_ms * off["prefill"],
        )
        for key, each in costs.items()
    }


def candidate_of(space: Space, plan: Plan, work: Costs) -> Candidate:
    """Candidate as the rivals see it: their knobs are numbers and words of their own."""
    launch, placement = launch_of(plan), plan.placement
    knobs: tuple[tuple[str, Value], ...] = (
        ("cpu_layers", on_host(plan)),
        ("gpu_layers", placement.gpu_layers),
        ("kv_type", plan.kv_type),
        ("load_mode", launch.load_mode),
        ("split", placement.split_mode),
        ("threads", launch.threads),
        ("ubatch", launch.ubatch),
        ("context", plan.context),
    )
    return Candidate(key=plan.key, knobs=knobs, context=plan.context, work=work, needs=needs(space, plan))


class Machine:
    """The truth of one seed. `noise` is the relative deviation of one short time."""

    def __init__(self, case: Case, seed: int) -> None:
        draw = random.Random(f"{case.name} {seed}")
        self.case = case
        self._seed = f"{case.name} {seed}"
        self._plans = {plan.key: plan for plan in case.plans}
        self.noise = _drawn(draw, "noise")
        self._rate = {name: _factor(draw, name) for name in RATES}
        threads = {launch_of(plan).threads for plan in case.plans}
        self._cliff = draw.choice(sorted(t for t in threads if case.cores / 2 <= t <= case.cores))
        self._fall = _drawn(draw, "threads")
        ubatches = sorted({launch_of(plan).ubatch for plan in case.plans})
        self._ubatch = {size: _factor(draw, "ubatch") for size in ubatches}
        self._rounded = _drawn(draw, "kv_type")
        self._tensor = (_factor(draw, "tensor"), _factor(draw, "tensor"))
        self._mapped = PAGEABLE_SHARE.value / _drawn(draw, "mapped")
        self._unmapped = _drawn(draw, "load_mode")
        self._knee, self._steep = _drawn(draw, "knee"), _drawn(draw, "steep")
        self._contention = _drawn(draw, "contention")
        self._need = (_drawn(draw, "need"), _drawn(draw, "need_ubatch"))

    def fails(self, candidate: Candidate) -> Missing | None:
        factor, per_ubatch = self._need
        extra = per_ubatch * launch_of(self._plans[candidate.key]).ubatch
        for need in candidate.needs:
            missing = need.need_mib * factor + extra - need.room_mib
            if missing > 0:
                return Missing(device=need.device, mib=missing)
        return None

    def decode_ms(self, candidate: Candidate, depth: float) -> float:
        plan = self._plans[candidate.key]
        work, rate = self.case.costs[plan.key], self._rate
        beyond = max(0.0, depth - self._knee) * (self._steep - 1)
        gpu = (work.gpu_ms + work.gpu_depth_us * depth / 1000) * rate["gpu"]
        cpu = work.cpu_ms * rate["cpu"] + work.cpu_depth_us * (depth + beyond) / 1000 * rate["cpu_depth"]
        cpu *= self._slowed(plan) * (self._unmapped if launch_of(plan).load_mode == "none" else 1.0)
        rounded = 1.0 if plan.kv_type == "f16" else 1 + self._rounded
        split = self._tensor[0] if plan.placement.split_mode == TENSOR else 1.0
        return (gpu + cpu + work.fixed_ms * rate["fixed"]) * rounded * split

    def prefill_ms(self, candidate: Candidate, first: int, last: int) -> float:
        plan = self._plans[candidate.key]
        work, rate, launch = self.case.costs[plan.key], self._rate, launch_of(plan)
        read = work.gpu_prefill_ms * (last - first) * rate["prefill"] + work.cpu_prefill_ms * (last - first)
        depth = work.prefill_depth_us * (last**2 - first**2) / 2000
        batches = _batches(first, last, launch.ubatch)
        copied = work.copy_ms * sum(self._touched(tokens, launch.ubatch) for tokens in batches) * self._copying(plan)
        rounded = 1.0 if plan.kv_type == "f16" else 1 + self._rounded * 2 / 3
        split = self._tensor[1] if plan.placement.split_mode == TENSOR else 1.0
        return (read + depth + copied) * self._ubatch[launch.ubatch] * rounded * split

    def cost_s(self, candidate: Candidate, workload: Workload) -> float:
        """Without noise; infinite for what fails."""
        if self.fails(candidate):
            return math.inf
        steps = 4
        depths = (workload.tokens_in + (i + 0.5) * workload.tokens_out / steps for i in range(steps))
        decode = sum(self.decode_ms(candidate, depth) for depth in depths) * workload.tokens_out / steps
        prefill = self.prefill_ms(candidate, workload.tokens_reused, workload.tokens_in)
        ttft_ms = prefill + self.decode_ms(candidate, workload.tokens_in)
        return (prefill + decode) / 1000 + excess_s(ttft_ms / 1000, workload)

    def load_s(self, candidate: Candidate) -> float:
        del candidate
        return START_S + self.case.of.weights_bytes / 1e9 / LOAD_GB_S

    def _touched(self, tokens: int, ubatch: int) -> float:
        """Experts that so many tokens use, of those that a full batch does, were they drawn evenly."""
        model = self.case.of
        if not model.experts:
            return 1.0
        some, all_of = (1 - (1 - model.experts_used / model.experts) ** count for count in (tokens, ubatch))
        return some / all_of

    def _copying(self, plan: Plan) -> float:
        """How many times the predicted time a copy takes: beside cores at work, and from mapped pages."""
        shared = 1 + self._contention * on_host(plan) / self.case.of.layers
        return self._rate["pcie"] * shared * (1.0 if launch_of(plan).load_mode in PINNED else self._mapped)

    def _slowed(self, plan: Plan) -> float:
        """Slow a cell down by threads beyond the cliff and, a little, by each pair of threads and placement.

        No model of costs has all of it."""
        threads = launch_of(plan).threads
        past = max(0.0, math.log2(threads / self._cliff))
        pair = f"{self._seed} {threads} {plan.placement.summary()}"
        chance = int.from_bytes(hashlib.sha256(pair.encode()).digest()[:4], "big") / 2**32
        return math.pow(1 + self._fall, 2 * past) * (1 + 0.04 * (chance - 0.5))


RATES = ("gpu", "cpu", "cpu_depth", "pcie", "fixed", "prefill")


def on_host(plan: Plan) -> int:
    """Layers of which all or the experts lie in host memory."""
    return max(plan.placement.cpu_layers, plan.placement.cpu_expert_layers)


def _drawn(draw: random.Random, effect: str) -> float:
    low, high = EFFECTS[effect][0]
    return draw.uniform(low, high)


def _factor(draw: random.Random, effect: str) -> float:
    (deviation,) = EFFECTS[effect][0]
    return math.exp(draw.gauss(0, deviation))


def _batches(first: int, last: int, ubatch: int) -> Iterator[int]:
    """Tokens of each."""
    for at in range(first, last, ubatch):
        yield min(ubatch, last - at)
