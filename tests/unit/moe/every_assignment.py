"""The best split, found by trying every one: what the closed form and the greedy rule are held against."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from appliance.moe.cost import Cost
from appliance.moe.split import BatchCost


def brute_force_split(cost: Cost, is_resident: Sequence[bool], copied: int) -> float:
    """The least time over every assignment of each expert to CPU or GPU, with `copied` of those that are not resident
    copied into slots, whether fetched for this token or for later. 2^k assignments."""
    best = float("inf")
    for on_gpu in itertools.product((False, True), repeat=len(is_resident)):
        hits = sum(gpu and resident for gpu, resident in zip(on_gpu, is_resident, strict=True))
        fetched = sum(on_gpu) - hits
        if fetched <= copied:
            ms = cost.layer_ms(hits, len(is_resident) - hits, fetched, copied - fetched)
            best = min(best, ms)
    return best


def brute_force_batch(cost: BatchCost, tokens: Sequence[int], is_resident: Sequence[bool]) -> float:
    """The least time of a batch over every assignment of its experts to CPU or GPU. 2^n assignments."""
    sides = itertools.product((False, True), repeat=len(tokens))
    return min(cost.batch_ms(tokens, is_resident, on_gpu) for on_gpu in sides)
