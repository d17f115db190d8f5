"""Rates that kernels reach: constants for each class of cards, and for CPU cores by their instructions. Pure.

The constants are fitted to half of the published results in benchmarks/speed_model.yaml, and checked on the other half
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
    """Constants of the cards of one compute capability.

    Decode is bound by the memory's bandwidth or by unpacking quantized weights, whichever is slower. Unpacking binds
    cards with HBM and cards with few multiprocessors.
    """

    share: float  # share of the memory's bandwidth that decode kernels reach
    layer_us: float  # fixed time of a layer for each token: launches, and ends of kernels too small for the card
    weights: float  # quantized weights that a multiprocessor unpacks in a cycle
    gflops: float  # matrix products in a long prompt with quantized weights (int8), per multiprocessor and GHz
    gflops_16: float  # the same with 16-bit weights
    clock_mhz: int  # highest clock that a card sustains under load, even if NVML names a higher one
    gflops_a_gb_s: float  # matrix products per GB/s of bandwidth, used if the number of multiprocessors is unknown
    watts: float = 3.9  # power of a multiprocessor in a long prompt; with less the card lowers its clock


# By compute capability; a capability that is not listed has the class of the next lower one. HBM: 60, 70, 80, 90, 100.
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
DECODE_WATTS = 0.8  # share of those watts that decode takes: its tensor cores are idle
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
    """Rates of one card in GB/s and TFLOP/s."""

    gb_s: float
    weights_g_s: float | None  # quantized weights unpacked in a second, 10^9; None: unknown
    layer_us: float
    tflops: float
    tflops_16: float
    tflops_attention: float


def card_rates(gpu: Gpu, gb_s: float) -> CardRates:
    """Return the rates of a card. `gb_s` is the bandwidth of its memory, from the table or measured."""
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
    """Return True if `card_rates` counts the card's power limit in its matrix products."""
    return bool(gpu.sm_count) and gpu.power_limit_w is not None and gpu.mig_profile is None


def _scale(gpu: Gpu, kind: CardClass) -> float | None:
    """Return multiprocessors x GHz that work at once; None if the number of multiprocessors is unknown."""
    if not gpu.sm_count:
        return None
    large: float = min(1.0, LARGE_SMS / gpu.sm_count) ** LARGE_POWER
    return gpu.sm_count * _ghz(gpu, kind) * large


def _ghz(gpu: Gpu, kind: CardClass, share: float = 1.0) -> float:
    """Return the clock that a card sustains under its power limit, for work that takes `share` of the class's watts."""
    ghz = min(gpu.sm_clock_mhz or kind.clock_mhz, kind.clock_mhz) / 1000
    watts = (gpu.power_limit_w or 0.0) / gpu.sm_count if gpu.sm_count and counts_power(gpu) else kind.watts
    starved: float = min(1.0, watts / (share * kind.watts)) ** WATTS_POWER
    return ghz * starved


@dataclass(frozen=True, kw_only=True)
class CoreClass:
    """Rates of one CPU core when the others are idle."""

    gb_s: float  # stream of memory
    gflops: float  # matrix products
    attention_gflops: float  # attention, which no kernel computes in 8 bits
    # A quantized row times one token. The kernels for types of less than 8 bits have registers of 256 bits on every x86
    # (ggml-cpu/arch/x86/quants.c has no AVX-512 beside them), and of 128 on Arm: half of it.
    dot_gflops: float = 55.0
    may_differ: bool = False  # True if some chips have such cores together with smaller ones


# By an instruction that the serving kernels are compiled for; the first that they have decides.
CORES: tuple[tuple[str, CoreClass], ...] = (
    # The one figure of AMX was measured by this project: SmolLM2 at Q4_1, 1,080 tok/s of prefill on two cores.
    ("amx_int8", CoreClass(gb_s=12.7, gflops=155, attention_gflops=28)),
    ("avx512vbmi", CoreClass(gb_s=12.7, gflops=118, attention_gflops=28)),  # Zen 4, Ice Lake and later
    ("i8mm", CoreClass(gb_s=15.0, gflops=208, attention_gflops=20, dot_gflops=20, may_differ=True)),
    # Skylake-X and Cascade Lake: ten of them stay below half of what four channels stream
    ("avx512_vnni", CoreClass(gb_s=4.7, gflops=118, attention_gflops=28)),
    ("avx512f", CoreClass(gb_s=4.7, gflops=90, attention_gflops=28)),
    ("avx_vnni", CoreClass(gb_s=11.4, gflops=84, attention_gflops=39)),
    ("avx2", CoreClass(gb_s=8.1, gflops=51, attention_gflops=24)),
    ("asimddp", CoreClass(gb_s=8.0, gflops=66, attention_gflops=20, dot_gflops=20, may_differ=True)),
)
PLAIN_CORE = CoreClass(gb_s=5.0, gflops=12, attention_gflops=8, dot_gflops=12)  # a core with none of those instructions
# By maker and part: cores of phones and laptops, whose rates replace those of the class, which is fitted to Neoverse.
# Cortex-A720 begins two matrix products of 8 bits (SMMLA) in a cycle (Arm's Software Optimization Guide 109720, issue
# 7.0, table 3-15), Neoverse V2 four (llvm/llvm-project 83d3aa0a7b15, AArch64SchedNeoverseV2.td, V2Wr_VMMA); a CP8180
# reaches three quarters of what follows from that.
PARTS_BESIDE: Mapping[str, CoreClass] = {
    "0x41.0xd81": CoreClass(gb_s=4.0, gflops=78, attention_gflops=14, may_differ=True),  # Cortex-A720
    "0x41.0xd4c": CoreClass(gb_s=4.5, gflops=66, attention_gflops=20, may_differ=True),  # Cortex-X1C
}


# Parts of a matrix for each thread. A thread that is done takes the next part: ggml-cpu's repack.cpp, forward_mul_mat
# (repacked types, with i8mm Q4_K and Q6_K among them), and ops.cpp for flash attention. ggml-cpu.c and sgemm.cpp cut
# all other matrices into parts at least as small.
PARTS = 4
EVEN_PARTS = 1  # repacked experts: repack.cpp, forward_mul_mat_id


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """Rates of a CPU by the number of threads."""

    cores: int
    dram_gb_s: float  # bandwidth that kernels reach with enough cores
    core: CoreClass  # the fastest cores
    isa: frozenset[str]  # instructions that the serving kernels are compiled for
    capacities: tuple[float, ...] = ()  # speed of each core relative to the fastest, the fastest first; empty: equal
    parts: int = PARTS  # parts of a matrix for each thread
    asked: int | None = None  # threads that the user set; None: the best number

    @property
    def threads(self) -> int:
        """Number of threads that costs are computed for: the fewest that compute most, or the number that was set."""
        if self.asked:
            return self.asked
        return max(range(1, self.cores + 1), key=lambda threads: (self.worth(threads), -threads))

    def worth(self, threads: int) -> float:
        """Return how many of the fastest cores compute as much. Threads beyond the number of cores add nothing."""
        used = self.capacities[: min(threads, self.cores)]
        return _worth(used, self.parts) if used else float(min(threads, self.cores))

    def gb_s(self, threads: int) -> float:
        """Return the GB/s of memory that so many threads stream, up to `dram_gb_s`."""
        return min(self.dram_gb_s, self.core.gb_s * self.worth(threads))

    def tflops(self, threads: int) -> float:
        return self.core.gflops * self.worth(threads) / 1000

    def dot_tflops(self, threads: int) -> float:
        return min(self.core.dot_gflops, self.core.gflops) * self.worth(threads) / 1000

    def attention_tflops(self, threads: int) -> float:
        return self.core.attention_gflops * self.worth(threads) / 1000


@cache
def _worth(capacities: tuple[float, ...], parts: int) -> float:
    """Return the work done in the time of the fastest core's part: all threads wait for the last part to end."""
    if len(set(capacities)) == 1:
        return len(capacities) * capacities[0]
    # For each thread: the time when it is done, and the time that a part takes it; the fastest core takes 1.
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
    """Return the rates of a CPU. `part` is the maker and part number of its fastest cores; None: unknown."""
    core = next((found for name, found in CORES if name in isa), PLAIN_CORE)
    if beside := PARTS_BESIDE.get(part or ""):
        core = replace(beside, gflops=min(beside.gflops, core.gflops))
    return CpuRates(
        cores=cores,
        dram_gb_s=dram_gb_s,
        core=core,
        isa=frozenset(isa),
        capacities=capacities,
        parts=parts,
        asked=asked,
    )
