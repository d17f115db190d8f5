"""What a layer's experts cost for one token on the CPU, on the GPU and over PCIe, and the cheapest split of them.

Milliseconds throughout: a MB (10^6 bytes) at a GB/s (10^9) takes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One machine, measured with CPU and PCIe at work together: alone, either looks faster than it is in use.

    Raises ValueError for a rate that is not positive or a time below zero.
    """

    cpu_gb_s: float
    pcie_gb_s: float
    dram_gb_s: float  # what CPU and PCIe can read together
    other_ms: float  # of a layer without its routed experts: PCIe is free meanwhile
    cpu_fixed_ms: float  # once for any number of experts on the CPU: submit, wait, merge
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
    """How many of a token's experts go where. `hits` are computed in their slots; resident experts beyond them are
    computed on the CPU, where every expert lies as well."""

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
        """The MoE part of one layer for one token; the layer takes `rates.other_ms` besides.

        Of `misses`, `fetched` are copied and computed on the GPU now, the rest on the CPU; `uploads` are copied for
        later. T = max( t0·[c>0] + c·s/C, f·s/P + g·[f>0], g0 + g·(h+f), (m+u)·s/D − t_a, (f+u)·s/P − t_a ), c = m − f.
        An expert that is uploaded is read twice, once by the CPU: hence m + u and not m.
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
        """The cheapest split for each number of experts copied into slots, 0 to top_k − hits, by that number.

        Exact: experts of a layer are alike, so counts are all that can differ, and each pair of them is tried. Found
        once, and looked up from then on.
        """
        found = self._splits.get((top_k, hits))
        if found is None:
            copied = range(top_k - hits + 1)
            found = self._splits[top_k, hits] = tuple(min(self._with(top_k, hits, count)) for count in copied)
        return found

    def _with(self, top_k: int, hits: int, copied: int) -> Iterator[Split]:
        """Ties go to fewer hits used and fewer fetched, so that a replay is the same everywhere."""
        for used in range(hits + 1):
            for fetched in range(copied + 1):
                uploads = copied - fetched
                ms = self.layer_ms(used, top_k - used, fetched, uploads)
                yield Split(ms, used, fetched, uploads)

    def best_ms(self, top_k: int, hits: int) -> float:
        """The least time with so many hits and nothing uploaded: min over f of T, and over hits left unused."""
        used = range(hits + 1)
        return min(self.layer_ms(h, top_k - h, f, 0) for h in used for f in range(top_k - hits + 1))
