"""The time of a layer's experts for one token on the CPU, on the GPU and over PCIe, and the cheapest split of them.

Times are in milliseconds: one MB (10^6 bytes) at one GB/s (10^9) takes 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one machine, measured while CPU and PCIe work together: alone, either looks faster than in use.

    Raises ValueError for a rate that is not positive or a time below zero.
    """

    cpu_gb_s: float
    pcie_gb_s: float
    dram_gb_s: float  # rate that CPU and PCIe reach together
    other_ms: float  # time of a layer without its routed experts, in which PCIe is free
    cpu_fixed_ms: float  # once, for any number of experts on the CPU: submit, wait, merge
    gpu_expert_ms: float
    gpu_fixed_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu_gb_s", "pcie_gb_s", "dram_gb_s"):
            if not 0 < getattr(self, name) < math.inf:
                message = f"a rate must be positive and finite: {name} {getattr(self, name)}"
                raise ValueError(message)
        for name in ("other_ms", "cpu_fixed_ms", "gpu_expert_ms", "gpu_fixed_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                message = f"a time must be finite and not below zero: {name} {getattr(self, name)}"
                raise ValueError(message)


class Split(NamedTuple):
    """Number of a token's experts in each place. `hits` are computed in their slots; further resident experts are
    computed on the CPU, which has a copy of every expert."""

    ms: float
    hits: int
    fetched: int
    uploads: int


class Cost:
    """Times of one layer with experts of `expert_mb` MB on one machine."""

    def __init__(self, rates: Rates, expert_mb: float) -> None:
        """Raises ValueError for a size that is not positive."""
        if not 0 < expert_mb < math.inf:
            message = f"the size of an expert must be positive and finite: {expert_mb} MB"
            raise ValueError(message)
        self.rates = rates
        self.expert_mb = expert_mb
        self._splits: dict[tuple[int, int], tuple[Split, ...]] = {}

    def layer_ms(self, hits: int, misses: int, fetched: int, uploads: int) -> float:
        """Return the time of the MoE part of one layer for one token; the layer takes `rates.other_ms` in addition.

        Of `misses`, `fetched` are copied and computed on the GPU now, the others on the CPU; `uploads` are copied for
        later. T = max( t0·[c>0] + c·s/C, f·s/P + g·[f>0], g0 + g·(h+f), (m+u)·s/D − t_a, (f+u)·s/P − t_a ), c = m − f.
        An uploaded expert is read twice, once by the CPU: hence m + u and not m.
        """
        rates, size = self.rates, self.expert_mb
        on_cpu = misses - fetched
        return max(
            rates.cpu_fixed_ms + on_cpu * size / rates.cpu_gb_s if on_cpu else 0.0,
            fetched * size / rates.pcie_gb_s + rates.gpu_expert_ms if fetched else 0.0,
            rates.gpu_fixed_ms + rates.gpu_expert_ms * (hits + fetched),
            (misses + uploads) * size / rates.dram_gb_s - rates.other_ms,
            (fetched + uploads) * size / rates.pcie_gb_s - rates.other_ms,
        )

    def all_cpu_ms(self, top_k: int) -> float:
        return self.layer_ms(0, top_k, 0, 0)

    def splits(self, top_k: int, hits: int) -> tuple[Split, ...]:
        """Return the cheapest split for each number of experts copied into slots, 0 to top_k − hits.

        Exact: experts of a layer are alike, so only counts can differ, and every pair of counts is tried. Computed once
        and then looked up.
        """
        found = self._splits.get((top_k, hits))
        if found is None:
            copied = range(top_k - hits + 1)
            found = self._splits[top_k, hits] = tuple(min(self._with(top_k, hits, count)) for count in copied)
        return found

    def _with(self, top_k: int, hits: int, copied: int) -> Iterator[Split]:
        """Yield all splits with so many copies, in an order in which ties go to fewer hits used and fewer fetched, so
        that a replay is the same on every machine."""
        for used in range(hits + 1):
            for fetched in range(copied + 1):
                uploads = copied - fetched
                ms = self.layer_ms(used, top_k - used, fetched, uploads)
                yield Split(ms, used, fetched, uploads)

    def best_ms(self, top_k: int, hits: int) -> float:
        """Return the least time with so many hits and no uploads: the minimum of T over f and over unused hits."""
        used = range(hits + 1)
        return min(self.layer_ms(h, top_k - h, f, 0) for h in used for f in range(top_k - hits + 1))
