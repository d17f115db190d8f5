"""Machines that are simulated, with effects that no predictor knows. The tuner must not import this; a test holds it.

A planner's figures (`Spec`) make candidates with their predicted work. The truth (`Machine`) is drawn from a seed:
rates that differ from the planner's, a KV type that costs what bytes do not tell, a knee in the cache over depth, a
cliff where threads reach slow cores, ubatches that are no line, PCIe that shares its memory with the CPU, needs that
are more than predicted, and 3 to 10 % noise.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from appliance.plan import Costs
from appliance.tune.terms import Candidate, Need, Value
from appliance.tune.workload import Workload

KV_BYTES = {"f16": 2.0, "q8_0": 1.0625}
UBATCHES = (128, 256, 512, 1024, 2048)
CONTEXTS = (8192, 16384, 32768, 65536, 131072)
START_S = 0.5  # of a server without a model: the recorded table's smallest took so long
LOAD_GB_S = 2.5  # a model's bytes, out of the page cache into memory that is not pinned, or from an NVMe drive
BEYOND_FIT = (-1, 0, 1, 2, 4, 8, 16)  # layers away from the fewest on the CPU that are predicted to fit


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a planner knows. Sizes in MB (10^6 bytes), rates in GB/s: a MB at a GB/s takes a millisecond."""

    name: str
    layers: int
    dense_mb: float  # a layer's weights that every token reads
    expert_mb: float  # its routed experts, all of them
    used_share: float  # of which a token reads so much
    output_mb: float
    kv_values: int  # a token, a layer
    native: int
    gpus: int
    gpu_gb_s: float
    vram_mib: float
    ram_mib: float
    dram_gb_s: float
    pcie_gb_s: float
    gpu_prefill_us: float  # a token, a layer
    fast_cores: int
    threads: tuple[int, ...]

    @property
    def model_mb(self) -> float:
        return self.layers * (self.dense_mb + self.expert_mb) + self.output_mb


# Bytes of layers and bandwidths: facts of the models and cards (tuning.md sections 2.4 to 2.6).
SPECS = (
    Spec(
        name="8 GB laptop, Qwen3-30B-A3B", layers=48, dense_mb=11, expert_mb=339, used_share=8 / 128, output_mb=255,
        kv_values=1024, native=40960, gpus=1, gpu_gb_s=256 * 0.75, vram_mib=7300, ram_mib=28000, dram_gb_s=62,
        pcie_gb_s=11, gpu_prefill_us=14, fast_cores=6, threads=(2, 4, 6, 8, 10, 14),
    ),
    Spec(
        name="2x RTX 4090, 70B", layers=80, dense_mb=500, expert_mb=0, used_share=0, output_mb=700,
        kv_values=2048, native=131072, gpus=2, gpu_gb_s=1008 * 0.8, vram_mib=46500, ram_mib=60000, dram_gb_s=70,
        pcie_gb_s=25, gpu_prefill_us=10, fast_cores=16, threads=(2, 4, 8, 16, 32),
    ),
    Spec(
        name="24 GB card, DeepSeek-V3 in RAM", layers=61, dense_mb=130, expert_mb=6350, used_share=8 / 256,
        output_mb=760, kv_values=576, native=131072, gpus=1, gpu_gb_s=1008 * 0.75, vram_mib=23300, ram_mib=500000,
        dram_gb_s=230, pcie_gb_s=25, gpu_prefill_us=60, fast_cores=32, threads=(8, 16, 24, 32, 48, 64),
    ),
    Spec(
        name="2x RTX 2080 Ti, 32B", layers=64, dense_mb=290, expert_mb=0, used_share=0, output_mb=640,
        kv_values=2048, native=40960, gpus=2, gpu_gb_s=616 * 0.75, vram_mib=21000, ram_mib=60000, dram_gb_s=40,
        pcie_gb_s=12, gpu_prefill_us=22, fast_cores=8, threads=(2, 4, 6, 8, 16),
    ),
)  # fmt: skip


def candidates(spec: Spec, *, off: random.Random | None = None) -> tuple[Candidate, ...]:
    """What a planner enumerates, with its prediction. With `off`, each of its rates is wrong by 2, either way."""
    planner = spec
    if off is not None:
        rates = ("gpu_gb_s", "dram_gb_s", "pcie_gb_s", "gpu_prefill_us")
        planner = replace(spec, **{name: getattr(spec, name) * off.choice((0.5, 2.0)) for name in rates})
    return tuple(sorted(_candidates(spec, planner), key=lambda candidate: _preference(spec, candidate)))


def _preference(spec: Spec, candidate: Candidate) -> tuple[bool, ...]:
    """The order in which a real start has its plans: as the planner would have it without a prediction."""
    preferred: dict[str, Value] = {"kv_type": "f16", "threads": spec.fast_cores, "ubatch": 512}
    return tuple(candidate.by_knob[name] != value for name, value in preferred.items())


def _candidates(spec: Spec, planner: Spec) -> Iterator[Candidate]:
    splits = ("layer", "row") if spec.gpus > 1 else ("none",)
    for context in (w for w in CONTEXTS if w <= spec.native or w == CONTEXTS[0]):
        for kv_type in KV_BYTES:
            for ubatch in UBATCHES:
                for away in _layers_away(spec, context, kv_type, ubatch):
                    for threads in spec.threads:
                        for split in splits:
                            yield _candidate(planner, spec, context, kv_type, ubatch, away, threads, split)


def _layers_away(spec: Spec, context: int, kv_type: str, ubatch: int) -> list[int]:
    fitting = [n for n in range(spec.layers + 1) if vram_mib(spec, context, kv_type, ubatch, n) <= spec.vram_mib]
    if not fitting:
        return []
    return sorted({n for step in BEYOND_FIT if 0 <= (n := fitting[0] + step) <= spec.layers})


def vram_mib(spec: Spec, context: int, kv_type: str, ubatch: int, away: int) -> float:
    """Away: layers whose experts, or all of whose weights where there are none, are in host memory."""
    kv = spec.layers * spec.kv_values * KV_BYTES[kv_type] * context / 1e6
    kept = spec.dense_mb * spec.layers + spec.expert_mb * (spec.layers - away)
    if not spec.expert_mb:
        kept, kv = spec.dense_mb * (spec.layers - away), kv * (spec.layers - away) / spec.layers
    return (kept + spec.output_mb + kv + 0.35 * ubatch + 300) / 1.048576


def _candidate(
    planner: Spec, spec: Spec, context: int, kv_type: str, ubatch: int, away: int, threads: int, split: str
) -> Candidate:
    knobs: tuple[tuple[str, Value], ...] = (
        ("cpu_layers", away), ("kv_type", kv_type), ("split", split), ("threads", threads), ("ubatch", ubatch),
        ("context", context),
    )  # fmt: skip
    host_mib = away * (spec.expert_mb or spec.dense_mb) / 1.048576
    needs = (
        Need(device="vram", need_mib=vram_mib(spec, context, kv_type, ubatch, away), room_mib=spec.vram_mib),
        Need(device="ram", need_mib=host_mib, room_mib=spec.ram_mib),
    )
    work = predicted_work(planner, kv_type, ubatch, away, threads)
    return Candidate(
        key="/".join(str(value) for _, value in knobs), knobs=knobs, context=context, work=work, needs=needs
    )


def predicted_work(spec: Spec, kv_type: str, ubatch: int, away: int, threads: int) -> Costs:
    """A roofline: bytes over bandwidth, threads up to the fast cores."""
    near, host = spec.layers - away, min(1.0, threads / spec.fast_cores) ** 0.7
    read_away = spec.expert_mb * spec.used_share if spec.expert_mb else spec.dense_mb
    dense_near = spec.dense_mb * (spec.layers if spec.expert_mb else near)
    cache = spec.kv_values * KV_BYTES[kv_type] / 1e3  # us at a GB/s
    cached_near = spec.layers if spec.expert_mb else near
    touched = 1 - (1 - spec.used_share) ** ubatch if spec.expert_mb else 1.0
    full = 1 + 60 / ubatch  # a small batch fills a GPU less
    return Costs(
        gpu_ms=(dense_near + near * spec.expert_mb * spec.used_share + spec.output_mb) / spec.gpu_gb_s,
        cpu_ms=away * read_away / (spec.dram_gb_s * host),
        fixed_ms=0.02 * spec.layers + (0.03 * away if spec.expert_mb else 0.0),
        gpu_depth_us=cached_near * cache / spec.gpu_gb_s,
        cpu_depth_us=(spec.layers - cached_near) * cache / (spec.dram_gb_s * host),
        gpu_prefill_ms=spec.layers * spec.gpu_prefill_us / 1000 * full,
        batch=ubatch,
        copy_ms=away * (spec.expert_mb or spec.dense_mb) * touched / spec.pcie_gb_s,
        prefill_depth_us=0.0005 * spec.layers,
    )


@dataclass(frozen=True, kw_only=True)
class Missing:
    device: str
    mib: float


class Machine:
    """The truth of one seed. `noise` is the relative deviation of one short time."""

    def __init__(self, spec: Spec, seed: int) -> None:
        draw = random.Random(f"{spec.name} {seed}")
        self.spec = spec
        self.noise = draw.uniform(0.03, 0.10)
        self._seed = f"{spec.name} {seed}"
        self._rate = {name: math.exp(draw.gauss(0, sd)) for name, sd in _RATE_SPREAD.items()}
        self._cliff = draw.choice(tuple(t for t in spec.threads if spec.fast_cores / 2 <= t <= spec.fast_cores))
        self._fall = draw.uniform(0.05, 0.25)
        self._ubatch = {u: math.exp(draw.gauss(0, 0.1)) for u in UBATCHES}
        self._kv = {"f16": (1.0, 1.0), "q8_0": (1 + draw.uniform(0, 0.15), 1 + draw.uniform(0, 0.1))}
        self._row = (draw.uniform(0.85, 1.3), draw.uniform(0.9, 1.6))
        self._knee, self._steep = draw.uniform(300, 2000), draw.uniform(2, 4)
        self._contention = draw.uniform(0.1, 0.6)
        self._need = (draw.uniform(0.98, 1.03), draw.uniform(0, 0.25))

    def fails(self, candidate: Candidate) -> Missing | None:
        factor, per_ubatch = self._need
        ubatch = _number(candidate, "ubatch")
        for need in candidate.needs:
            extra = per_ubatch * ubatch if need.device == "vram" else 0.0
            missing = need.need_mib * factor + extra - need.room_mib
            if missing > 0:
                return Missing(device=need.device, mib=missing)
        return None

    def decode_ms(self, candidate: Candidate, depth: float) -> float:
        work = self._work(candidate)
        kv = self._kv[str(candidate.by_knob["kv_type"])][0]
        row = self._row[0] if candidate.by_knob["split"] == "row" else 1.0
        beyond = max(0.0, depth - self._knee) * (self._steep - 1)
        gpu = (work.gpu_ms + work.gpu_depth_us * depth / 1000) * self._rate["gpu"] * row
        cpu = work.cpu_ms * self._rate["cpu"] + work.cpu_depth_us * (depth + beyond) / 1000 * self._rate["cpu_depth"]
        return (gpu + cpu * self._slowed(candidate) + work.fixed_ms * self._rate["fixed"]) * kv

    def prefill_ms(self, candidate: Candidate, first: int, last: int) -> float:
        work, ubatch = self._work(candidate), _number(candidate, "ubatch")
        row = self._row[1] if candidate.by_knob["split"] == "row" else 1.0
        batches = math.ceil((last - first) / ubatch)
        shared = 1 + self._contention * _number(candidate, "cpu_layers") / self.spec.layers
        read = work.gpu_prefill_ms * (last - first) * self._rate["prefill"] * row
        depth = work.prefill_depth_us * (last**2 - first**2) / 2000
        copied = work.copy_ms * batches * self._rate["pcie"] * shared
        return (read + depth + copied) * self._ubatch[ubatch] * self._kv[str(candidate.by_knob["kv_type"])][1]

    def job_s(self, candidate: Candidate, workload: Workload) -> float:
        """Without noise; infinite for what fails."""
        if self.fails(candidate):
            return math.inf
        steps = 4
        depths = (workload.tokens_in + (i + 0.5) * workload.tokens_out / steps for i in range(steps))
        decode = sum(self.decode_ms(candidate, depth) for depth in depths) * workload.tokens_out / steps
        return (self.prefill_ms(candidate, workload.tokens_reused, workload.tokens_in) + decode) / 1000

    def load_s(self, candidate: Candidate) -> float:
        del candidate
        return START_S + self.spec.model_mb / 1000 / LOAD_GB_S

    def _work(self, candidate: Candidate) -> Costs:
        """By the figures of the card, not those of a planner that is wrong about it."""
        knobs = candidate.by_knob
        return predicted_work(
            self.spec,
            str(knobs["kv_type"]),
            _number(candidate, "ubatch"),
            _number(candidate, "cpu_layers"),
            _number(candidate, "threads"),
        )

    def _slowed(self, candidate: Candidate) -> float:
        """By threads beyond the cliff, and a little by each pair of threads and layers: no model has it all."""
        threads = _number(candidate, "threads")
        past = max(0.0, math.log2(threads / self._cliff))
        pair = f"{self._seed} {threads} {_number(candidate, 'cpu_layers')}"
        chance = int.from_bytes(hashlib.sha256(pair.encode()).digest()[:4], "big") / 2**32
        return math.pow(1 + self._fall, 2 * past) * (1 + 0.04 * (chance - 0.5))


_RATE_SPREAD = {"gpu": 0.15, "cpu": 0.2, "cpu_depth": 0.3, "pcie": 0.2, "fixed": 0.3, "prefill": 0.25}


def _number(candidate: Candidate, name: str) -> int:
    value = candidate.by_knob[name]
    assert isinstance(value, int)
    return value
