"""Rules of eviction that others use, on the same traces, and a bound below all of them. Nothing here asks the product.

Each rule is told of every request and names the next model to unload, until the one that is wanted fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

import numpy as np

from benchmarks.fleet_traces import Model, Trace

KEEP_ALIVE_S = 300.0  # Ollama's default


class Rule(Protocol):
    def note(self, model: Model, at_s: float) -> None:
        """Learn of a request, before room is made for it."""

    def victim(self, loaded: Mapping[str, Model], at_s: float) -> str:
        """Return the model to unload next."""


class Lru:
    def __init__(self, _trace: Trace) -> None:
        self.last_s: dict[str, float] = {}

    def note(self, model: Model, at_s: float) -> None:
        self.last_s[model.name] = at_s

    def victim(self, loaded: Mapping[str, Model], at_s: float) -> str:
        del at_s
        return min(loaded, key=lambda name: (self.last_s[name], name))


class Lfu(Lru):
    """Least frequently used since the trace began; of equals, least recently."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.uses: Counter[str] = Counter()

    def note(self, model: Model, at_s: float) -> None:
        super().note(model, at_s)
        self.uses[model.name] += 1

    def victim(self, loaded: Mapping[str, Model], at_s: float) -> str:
        del at_s
        return min(loaded, key=lambda name: (self.uses[name], self.last_s[name], name))


class GreedyDualSize:
    """Cao and Irani 1997: the inflation, plus what a reload costs for each byte, renewed at each request."""

    def __init__(self, _trace: Trace) -> None:
        self.inflation = 0.0
        self.value: dict[str, float] = {}

    def note(self, model: Model, at_s: float) -> None:
        del at_s
        self.value[model.name] = self.inflation + model.reload_s / model.mib

    def victim(self, loaded: Mapping[str, Model], at_s: float) -> str:
        del at_s
        found = min(loaded, key=lambda name: (self.value[name], name))
        self.inflation = self.value[found]
        return found


class ByName:
    """Ollama with equal keep_alive: runners are sorted by its length and then by the model's path (server/sched.go)."""

    def __init__(self, _trace: Trace) -> None:
        pass

    def note(self, model: Model, at_s: float) -> None:
        del model, at_s

    def victim(self, loaded: Mapping[str, Model], at_s: float) -> str:
        del at_s
        return min(loaded)


def reload_s(trace: Trace, make_rule: Callable[[Trace], Rule], *, keep_alive_s: float = inf) -> float:
    """Return the seconds that a rule spends on loads, without the first of each model, which no rule can spare."""
    rule, loaded, seen, spent = make_rule(trace), dict[str, Model](), set[str](), 0.0
    last_s: dict[str, float] = {}
    for request in trace.requests:
        model, at_s = trace.models[request.name], request.at_s
        rule.note(model, at_s)
        for name in [name for name in loaded if at_s - last_s[name] > keep_alive_s]:
            del loaded[name]
        last_s[model.name] = at_s
        if model.name in loaded:
            continue
        while sum(each.mib for each in loaded.values()) + model.mib > trace.free_mib:
            del loaded[rule.victim(loaded, at_s)]
        loaded[model.name] = model
        spent += model.reload_s if model.name in seen else 0.0
        seen.add(model.name)
    return spent


def ollama_s(trace: Trace) -> float:
    """Return the best for Ollama of: least recently used or by name, keep_alive of 5 minutes or for ever."""
    return min(reload_s(trace, rule, keep_alive_s=keep) for rule in (Lru, ByName) for keep in (KEEP_ALIVE_S, inf))


def router_s(trace: Trace) -> float:
    """Return the best for llama.cpp's router: LRU with the largest `--models-max` that never exceeds the memory."""
    best = inf
    for count in range(1, len(trace.models) + 1):
        spent, most_mib = _by_count(trace, count)
        if most_mib > trace.free_mib:
            break
        best = spent
    return best


def _by_count(trace: Trace, count: int) -> tuple[float, float]:
    """Return the reload seconds, and the most MiB held at once, of LRU over so many models."""
    order: dict[str, Model] = {}
    seen, spent, most_mib = set[str](), 0.0, 0.0
    for request in trace.requests:
        model = trace.models[request.name]
        if not order.pop(model.name, None):
            spent += model.reload_s if model.name in seen else 0.0
            seen.add(model.name)
            if len(order) >= count:
                del order[next(iter(order))]
        order[model.name] = model
        most_mib = max(most_mib, sum(each.mib for each in order.values()))
    return spent, most_mib


def least_s(trace: Trace) -> float:
    """Return the least reload seconds that any rule can reach that knows the future. Exact: after each request, for
    each set of models that fits, the least spent so far if at least these models are loaded."""
    models = list(trace.models.values())
    sets = np.arange(1 << len(models))
    held = np.zeros(len(sets))
    for bit, model in enumerate(models):
        held += np.where(sets >> bit & 1, model.mib, 0.0)
    fits = held <= trace.free_mib * (1 + 1e-12)
    least = np.where(sets == 0, 0.0, np.inf)
    seen, before = set[str](), ""
    for name in (request.name for request in trace.requests):
        if name == before:
            continue
        bit = next(bit for bit, model in enumerate(models) if model.name == name)
        load_s = models[bit].reload_s if name in seen else 0.0
        with_it, without = sets | 1 << bit, sets & ~(1 << bit)
        least = np.where(fits[with_it], np.minimum(least[with_it], least[without] + load_s), np.inf)
        seen.add(name)
        before = name
    return float(least.min())


RIVALS: dict[str, Callable[[Trace], float]] = {
    "LRU": lambda trace: reload_s(trace, Lru),
    "LFU": lambda trace: reload_s(trace, Lfu),
    "GreedyDual-Size": lambda trace: reload_s(trace, GreedyDualSize),
    "Ollama": ollama_s,
    "router": router_s,
}
