"""Predicts what an expert cache would bring on a machine that was never replayed; `plan --explain` shows it.

The hits and copies of a recorded policy are possible on any machine; the formula gives the time of each step on this
machine. The fastest of the recorded policies counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from appliance.moe.cost import Cost

Steps = tuple[tuple[int, int, int], ...]  # (hits, copies, layer-tokens)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One recorded trace. `by_slots` maps slots per layer to what policies for several kinds of machines did."""

    architecture: str
    name: str
    layers: int
    experts: int
    top_k: int
    tokens: int
    by_slots: Mapping[int, tuple[Steps, ...]]

    def steps_for(self, slots: int) -> tuple[Steps, ...]:
        """Return the steps of the largest replayed number of slots that is not above `slots`; empty below the
        smallest."""
        fitting = [count for count in self.by_slots if count <= slots]
        return self.by_slots[max(fitting)] if fitting else ()


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Modelled decode speed, with the interval for rates that are wrong by a factor."""

    tokens_per_s: float
    low: float
    high: float
    hit_rate: float = 0.0
    copied_mb: float = 0.0  # per layer and token


def cached(replay: Replay, cost: Cost, slots: int, *, fixed_ms: float, off: float) -> Outlook | None:
    """Return the outlook with `slots` in each layer; `fixed_ms` is a token's time outside its layers. None if the slots
    hold less than one token's experts."""
    found = replay.steps_for(slots)
    if not found:
        return None

    def token_ms(price: Cost) -> float:
        return min(_mean_ms(steps, price, replay.top_k) for steps in found) * replay.layers + fixed_ms

    best = min(found, key=lambda steps: _mean_ms(steps, cost, replay.top_k))
    count = sum(number for _, _, number in best)
    hits = sum(number * hit for hit, _, number in best) / count
    copies = sum(number * copied for _, copied, number in best) / count
    between = _interval(token_ms, cost, off)
    return replace(between, hit_rate=hits / replay.top_k, copied_mb=copies * cost.expert_mb)


def static_layers(replay: Replay, cost: Cost, cpu_layers: int, *, fixed_ms: float, off: float) -> Outlook:
    """Return the outlook with all experts of `cpu_layers` on the CPU and the others on the GPU, as --n-cpu-moe places
    them."""

    def token_ms(price: Cost) -> float:
        on_cpu = min(cpu_layers, replay.layers)
        on_gpu = replay.layers - on_cpu
        whole = price.layer_ms(replay.top_k, 0, 0, 0)
        return (
            on_cpu * price.all_cpu_ms(replay.top_k) + on_gpu * whole + replay.layers * price.rates.other_ms + fixed_ms
        )

    return _interval(token_ms, cost, off)


def _mean_ms(steps: Steps, cost: Cost, top_k: int) -> float:
    total = sum(number * cost.splits(top_k, hits)[copied].ms for hits, copied, number in steps)
    return total / sum(number for _, _, number in steps) + cost.rates.other_ms


def _interval(token_ms: Callable[[Cost], float], cost: Cost, off: float) -> Outlook:
    """Return the outlook over all combinations of the three rates, each `off` times too high or too low."""
    names = ("cpu_gb_s", "pcie_gb_s", "dram_gb_s")
    times = []
    for factors in product((1 / off, off), repeat=len(names)):
        changed = {name: getattr(cost.rates, name) * factor for name, factor in zip(names, factors, strict=True)}
        times.append(token_ms(Cost(replace(cost.rates, **changed), cost.expert_mb)))
    return Outlook(tokens_per_s=1000 / token_ms(cost), low=1000 / max(times), high=1000 / min(times))
