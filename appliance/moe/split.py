"""Splits the experts of a batch of tokens between GPU and CPU.

Unlike with a single token, experts differ by how many of the batch's tokens use them. An expert is read once for all of
them, so one with many tokens is worth moving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from appliance.moe.cost import Cost

_STARTS = 6  # best candidates that are improved further
# largest number of experts to improve: larger batches even out, and each try costs as many steps as it has experts
_IMPROVED = 24
_ROUNDS = 6  # rounds of moving single experts; ends earlier if nothing moves


class BatchSplit(NamedTuple):
    """Experts by their position in the input; `gpu` in the order of their copies, residents first."""

    gpu: tuple[int, ...]
    cpu: tuple[int, ...]
    ms: float


@dataclass(frozen=True, kw_only=True)
class BatchCost:
    """Times of one layer for a batch. An expert's time is that of its bytes or of its tokens' arithmetic, whichever is
    longer (facts/tuning.md section 8, c_cpu and c_gpu)."""

    cost: Cost
    cpu_token_ms: float  # arithmetic of one token and expert on the CPU
    gpu_token_ms: float = 0.0

    def cpu_ms(self, tokens: int) -> float:
        return max(self.cost.expert_mb / self.cost.rates.cpu_gb_s, tokens * self.cpu_token_ms)

    def gpu_ms(self, tokens: int) -> float:
        return max(self.cost.rates.gpu_expert_ms, tokens * self.gpu_token_ms)

    def batch_ms(self, tokens: Sequence[int], is_resident: Sequence[bool], on_gpu: Sequence[bool]) -> float:
        """Return the batch's time. The lists hold, for each expert, the number of tokens that use it, whether it is in
        a slot, and whether the GPU computes it.

        The GPU computes residents first, then each copied expert once it has arrived and the GPU is free. Copies follow
        one another, the expert with the most tokens first. With one token per expert and no fetch the result equals
        `layer_ms`.
        """
        rates, copy_ms = self.cost.rates, self.cost.expert_mb / self.cost.rates.pcie_gb_s
        here = [n for n, resident, gpu in zip(tokens, is_resident, on_gpu, strict=True) if gpu and resident]
        moved = sorted(
            (n for n, r, gpu in zip(tokens, is_resident, on_gpu, strict=True) if gpu and not r), reverse=True
        )
        on_cpu = [n for n, gpu in zip(tokens, on_gpu, strict=True) if not gpu]
        gpu = rates.gpu_fixed_ms + sum(map(self.gpu_ms, here))
        for number, count in enumerate(moved, 1):
            gpu = max(gpu, number * copy_ms) + self.gpu_ms(count)
        return max(
            rates.cpu_fixed_ms + sum(map(self.cpu_ms, on_cpu)) if on_cpu else 0.0,
            gpu,
            (len(on_cpu) + len(moved)) * self.cost.expert_mb / rates.dram_gb_s - rates.other_ms,
        )


def split_batch(cost: BatchCost, tokens: Sequence[int], is_resident: Sequence[bool]) -> BatchSplit:
    """Return the split by a two-ended greedy: residents and experts with many tokens at the GPU's end, the others at
    the CPU's end.

    From the GPU's end each expert goes to the side that finishes it earlier (HybriMoE's HSS). Every prefix of that
    order is tried too, including nothing on the GPU, so the result is never above all-CPU. Then single experts change
    sides and pairs change places while that helps. Within 3 % of brute force in the tests, for up to 10 experts.
    """
    order = sorted(range(len(tokens)), key=lambda at: (not is_resident[at], -tokens[at], at))
    candidates = [_two_ended(cost, tokens, is_resident, order)]
    prefix = [False] * len(tokens)
    candidates.append(list(prefix))
    for at in order:
        prefix[at] = True
        candidates.append(list(prefix))
    timed = [(cost.batch_ms(tokens, is_resident, on_gpu), number) for number, on_gpu in enumerate(candidates)]
    starts = [candidates[number] for _, number in sorted(timed)[:_STARTS]]
    on_gpu, best_ms = min(
        (_improved(cost, tokens, is_resident, start, cost.batch_ms(tokens, is_resident, start)) for start in starts),
        key=lambda found: found[1],
    )
    gpu = tuple(at for at in order if on_gpu[at])
    return BatchSplit(gpu, tuple(at for at in order if not on_gpu[at]), best_ms)


def _two_ended(cost: BatchCost, tokens: Sequence[int], is_resident: Sequence[bool], order: Sequence[int]) -> list[bool]:
    rates, copy_ms = cost.cost.rates, cost.cost.expert_mb / cost.cost.rates.pcie_gb_s
    on_gpu = [False] * len(tokens)
    gpu, copied, cpu = rates.gpu_fixed_ms, 0.0, rates.cpu_fixed_ms
    low, high = 0, len(order) - 1
    while low <= high:
        head, tail = order[low], order[high]
        arrival = copied if is_resident[head] else copied + copy_ms
        gpu_end = max(gpu, 0.0 if is_resident[head] else arrival) + cost.gpu_ms(tokens[head])
        cpu_end = cpu + cost.cpu_ms(tokens[tail])
        if gpu_end <= cpu_end:
            on_gpu[head], gpu, copied = True, gpu_end, arrival
            low += 1
        else:
            cpu = cpu_end
            high -= 1
    return on_gpu


def _improved(
    cost: BatchCost, tokens: Sequence[int], is_resident: Sequence[bool], on_gpu: list[bool], best_ms: float
) -> tuple[list[bool], float]:
    """Move one expert, or swap two, while the batch gets shorter."""
    if len(tokens) > _IMPROVED:
        return on_gpu, best_ms
    for _ in range(_ROUNDS):
        found = min(_moves(cost, tokens, is_resident, on_gpu), default=(best_ms, ()))
        if found[0] >= best_ms:
            break
        best_ms = found[0]
        for at in found[1]:
            on_gpu[at] = not on_gpu[at]
    return on_gpu, best_ms


def _moves(
    cost: BatchCost, tokens: Sequence[int], is_resident: Sequence[bool], on_gpu: list[bool]
) -> list[tuple[float, tuple[int, ...]]]:
    seen: dict[tuple[int, bool, bool], int] = {}
    for at, kind in enumerate(zip(tokens, is_resident, on_gpu, strict=True)):
        seen.setdefault(kind, at)  # one try for experts that are alike
    chosen = list(seen.values())
    changes: list[tuple[int, ...]] = [(at,) for at in chosen]
    changes += [(a, b) for a in chosen for b in chosen if a < b]
    found = []
    for change in changes:
        for at in change:
            on_gpu[at] = not on_gpu[at]
        found.append((cost.batch_ms(tokens, is_resident, on_gpu), change))
        for at in change:
            on_gpu[at] = not on_gpu[at]
    return found
