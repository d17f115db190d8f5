"""What kernels reach on a kind of card, and on a CPU by its cores and instructions: constants by class. Pure.

Fitted to half of the published results in benchmarks/speed_model.yaml and checked on the other half
(`python3 -m benchmarks.speed_model`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from heapq import heapify, heapreplace

from appliance.probe import Gpu
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class CardClass:
    """`share` of the memory's bandwidth is what a token's kernels stream, unless the multiprocessors are slower: each
    unpacks `weights` quantized ones a cycle, which binds cards with HBM and cards with few multiprocessors. `layer_us`
    is what they cost beside that in each layer: launches, tails of kernels that are too small for the card. `gflops`
    are those of matrix products in a long prompt, for each multiprocessor and GHz: of quantized weights (int8), and of
    16-bit ones. More than `clock_mhz` no load sustains, whatever NVML gives as the highest. `gflops_a_gb_s` of
    bandwidth stand in where the multiprocessors are unknown."""

    share: float
    layer_us: float
    weights: float
    gflops: float
    gflops_16: float
    clock_mhz: int
    gflops_a_gb_s: float
    watts: float = 3.9  # of each multiprocessor; with less a card lowers its clock in a long prompt


# By compute capability: the class of the next lower one counts for one that is not here. HBM: 60, 70, 80, 90, 100.
CLASSES: Mapping[int, CardClass] = {
    60: CardClass(share=0.83, layer_us=200.0, weights=9.0, gflops=140, gflops_16=140, clock_mhz=1400, gflops_a_gb_s=14),
    61: CardClass(share=0.85, layer_us=79.0, weights=8.4, gflops=350, gflops_16=120, clock_mhz=1600, gflops_a_gb_s=40),
    70: CardClass(share=0.85, layer_us=66.0, weights=10.0, gflops=340, gflops_16=340, clock_mhz=1530, gflops_a_gb_s=45),
    75: CardClass(share=0.86, layer_us=74.0, weights=10.0, gflops=410, gflops_16=410, clock_mhz=1700, gflops_a_gb_s=65),
    80: CardClass(share=0.83, layer_us=74.0, weights=12.0, gflops=480, gflops_16=600, clock_mhz=1410, gflops_a_gb_s=35),
    86: CardClass(
        share=0.82, layer_us=38.0, weights=12.0, gflops=650, gflops_16=520, clock_mhz=1800, gflops_a_gb_s=95, watts=5.0
    ),
    89: CardClass(
        share=0.93, layer_us=36.0, weights=12.0, gflops=670, gflops_16=540, clock_mhz=2500, gflops_a_gb_s=165
    ),
    90: CardClass(
        share=0.83, layer_us=49.0, weights=12.0, gflops=710, gflops_16=1100, clock_mhz=1830, gflops_a_gb_s=48
    ),
    120: CardClass(
        share=0.81, layer_us=24.0, weights=12.0, gflops=680, gflops_16=550, clock_mhz=2500, gflops_a_gb_s=125
    ),
    121: CardClass(
        share=0.78, layer_us=32.0, weights=12.0, gflops=360, gflops_16=480, clock_mhz=2400, gflops_a_gb_s=125
    ),
}
WATTS_POWER = 0.5
DECODE_WATTS = 0.8  # of those watts, what a token takes, whose tensor cores idle
LARGE_SMS = 80  # a batch of 512 tokens no longer fills a larger card
LARGE_POWER = 0.28
# Attention of a prompt fills even fewer: an RTX 3090 reads 512 tokens after 32,768 at 60 % of what a GB10 reaches for
# each multiprocessor (benchmarks/speed_model.yaml).
ATTENTION_SMS = 48
ATTENTION_POWER = 0.75
_WITHOUT_TENSOR_CORES = ("GTX 16",)  # of compute capability 7.5, whose other cards have them
_SHARE_WITHOUT = 0.1
_LOWEST = min(CLASSES)


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """Of one card: GB/s and TFLOP/s."""

    gb_s: float
    weights_g_s: float | None  # quantized weights that it unpacks, 10^9 a second; None: unknown
    layer_us: float
    tflops: float
    tflops_16: float
    tflops_attention: float


def card_rates(gpu: Gpu, gb_s: float) -> CardRates:
    """`gb_s` of its memory, as read or measured."""
    kind = class_of(gpu.sm)
    scale = _scale(gpu, kind)
    if any(name in (gpu.name or "") for name in _WITHOUT_TENSOR_CORES):
        scale = scale * _SHARE_WITHOUT if scale else None
    tflops = kind.gflops_a_gb_s * gb_s / 1000 if scale is None else kind.gflops * scale / 1000
    tflops_16 = tflops * kind.gflops_16 / kind.gflops
    idle: float = min(1.0, ATTENTION_SMS / gpu.sm_count) ** ATTENTION_POWER if gpu.sm_count else 1.0
    return CardRates(
        gb_s=gb_s * kind.share,
        weights_g_s=kind.weights * gpu.sm_count * _ghz(gpu, kind, DECODE_WATTS) if gpu.sm_count else None,
        layer_us=kind.layer_us,
        tflops=tflops,
        tflops_16=tflops_16,
        tflops_attention=tflops_16 * idle,
    )


def class_of(sm: str | None) -> CardClass:
    number = int(sm) if sm and sm.isascii() and sm.isdecimal() else _LOWEST
    return CLASSES[max((known for known in CLASSES if known <= number), default=_LOWEST)]


def counts_power(gpu: Gpu) -> bool:
    """Whether the power limit is in the rate of a prompt's matrix products."""
    return bool(gpu.sm_count) and gpu.power_limit_w is not None and gpu.mig_profile is None


def _scale(gpu: Gpu, kind: CardClass) -> float | None:
    """Multiprocessors x GHz that work at once; None where it is unknown how many there are."""
    if not gpu.sm_count:
        return None
    large: float = min(1.0, LARGE_SMS / gpu.sm_count) ** LARGE_POWER
    return gpu.sm_count * _ghz(gpu, kind) * large


def _ghz(gpu: Gpu, kind: CardClass, share: float = 1.0) -> float:
    """The clock that a card sustains with the power it may take, for work that takes a share of the class's watts."""
    ghz = min(gpu.sm_clock_mhz or kind.clock_mhz, kind.clock_mhz) / 1000
    watts = (gpu.power_limit_w or 0.0) / gpu.sm_count if gpu.sm_count and counts_power(gpu) else kind.watts
    starved: float = min(1.0, watts / (share * kind.watts)) ** WATTS_POWER
    return ghz * starved


@dataclass(frozen=True, kw_only=True)
class CoreClass:
    """What one core streams of its memory alone, and computes of matrix products."""

    gb_s: float
    gflops: float
    attention_gflops: float  # of attention, which no kernel computes in 8 bits
    may_differ: bool = False  # there are chips of such cores that have small ones beside them


# By the instructions that the serving kernels are compiled for, the best first.
CORES: tuple[tuple[str, CoreClass], ...] = (
    ("amx_int8", CoreClass(gb_s=12.7, gflops=300, attention_gflops=28)),
    ("avx512vbmi", CoreClass(gb_s=12.7, gflops=118, attention_gflops=28)),  # Zen 4, Ice Lake and later
    ("i8mm", CoreClass(gb_s=15.0, gflops=208, attention_gflops=20, may_differ=True)),
    # Skylake-X and Cascade Lake: ten of them stay below half of what four channels stream
    ("avx512_vnni", CoreClass(gb_s=4.7, gflops=118, attention_gflops=28)),
    ("avx512f", CoreClass(gb_s=4.7, gflops=90, attention_gflops=28)),
    ("avx_vnni", CoreClass(gb_s=11.4, gflops=84, attention_gflops=39)),
    ("avx2", CoreClass(gb_s=8.1, gflops=51, attention_gflops=24)),
    ("asimddp", CoreClass(gb_s=8.0, gflops=66, attention_gflops=20, may_differ=True)),
)
PLAIN_CORE = CoreClass(gb_s=5.0, gflops=12, attention_gflops=8)  # without any of those
# By maker and part, what cores of phones and laptops compute and stream beside the class, which is fitted to Neoverse.
# Cortex-A720 begins two matrix products of 8 bits (SMMLA) in a cycle (Arm's Software Optimization Guide 109720, issue
# 7.0, table 3-15), Neoverse V2 four (llvm/llvm-project 83d3aa0a7b15, AArch64SchedNeoverseV2.td, V2Wr_VMMA); a CP8180
# reaches three quarters of what follows from that.
PARTS_BESIDE: Mapping[str, CoreClass] = {
    "0x41.0xd81": CoreClass(gb_s=4.0, gflops=78, attention_gflops=14, may_differ=True),  # Cortex-A720
    "0x41.0xd4c": CoreClass(gb_s=4.5, gflops=66, attention_gflops=20, may_differ=True),  # Cortex-X1C
}


# Parts of a matrix for each thread, of which whoever is done takes the next: ggml-cpu's repack.cpp, forward_mul_mat
# (types that it lays out anew, with i8mm Q4_K and Q6_K among them), and ops.cpp for flash attention. ggml-cpu.c and
# sgemm.cpp cut all else at least as small.
PARTS = 4
EVEN_PARTS = 1  # experts that are laid out anew: repack.cpp, forward_mul_mat_id


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """`dram_gb_s` is what kernels reach of the memory with cores enough. `capacities` are those of the cores beside the
    fastest, the fastest first; none where they are unknown and taken as equal. `parts` of its work each thread has.
    `asked` threads are run, whatever would be best."""

    cores: int
    dram_gb_s: float
    core: CoreClass
    capacities: tuple[float, ...] = ()
    parts: int = PARTS
    asked: int | None = None

    @property
    def threads(self) -> int:
        """That costs are told for: the fewest that compute most, on the fastest cores."""
        if self.asked:
            return self.asked
        return max(range(1, self.cores + 1), key=lambda threads: (self.worth(threads), -threads))

    def worth(self, threads: int) -> float:
        """How many of the fastest cores compute as much; more threads than cores bring nothing."""
        used = self.capacities[: min(threads, self.cores)]
        return _worth(used, self.parts) if used else float(min(threads, self.cores))

    def gb_s(self, threads: int) -> float:
        """Memory saturates."""
        return min(self.dram_gb_s, self.core.gb_s * self.worth(threads))

    def tflops(self, threads: int) -> float:
        return self.core.gflops * self.worth(threads) / 1000

    def attention_tflops(self, threads: int) -> float:
        return self.core.attention_gflops * self.worth(threads) / 1000


@cache
def _worth(capacities: tuple[float, ...], parts: int) -> float:
    """All wait for the last part: one that a slow core took late takes it long."""
    if len(set(capacities)) == 1:
        return len(capacities) * capacities[0]
    # When each thread is done with what it has, and what it takes for a part; the fastest core takes 1.
    ends = [(1 / capacity, 1 / capacity) for capacity in capacities]
    heapify(ends)
    for _ in range(len(capacities) * (parts - 1)):
        end, each = ends[0]
        heapreplace(ends, (end + each, each))
    return len(capacities) * parts / max(end for end, _ in ends)


def cpu_rates(
    isa: Collection[str],
    cores: int,
    dram_gb_s: float,
    capacities: tuple[float, ...] = (),
    *,
    parts: int = PARTS,
    asked: int | None = None,
    part: str | None = None,
) -> CpuRates:
    """`part` is that of the fastest cores."""
    core = next((found for name, found in CORES if name in isa), PLAIN_CORE)
    if beside := PARTS_BESIDE.get(part or ""):
        core = replace(beside, gflops=min(beside.gflops, core.gflops))
    return CpuRates(cores=cores, dram_gb_s=dram_gb_s, core=core, capacities=capacities, parts=parts, asked=asked)
