"""What others do on the same candidates: random, Optuna's TPE, hill climbing, the walk down from the longest window.

All but the walk-down are given more than the tools have: our list of candidates that are predicted to fit, our measure
of a job instead of their sum of two speeds, and each of their measurements is a long one, as llama-bench's repetitions
are. Each starts the engine anew for each measurement, as each of the tools does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optuna

from appliance.tune.search.cost_terms import Candidate, Value


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rival learns from a measurement: seconds of a job, decode time at an empty context, both noisy; infinite
    when it failed."""

    job_s: float
    empty_ms: float


class Measures(Protocol):
    def __call__(self, candidate: Candidate) -> Seen: ...


Rival = Callable[[Sequence[Candidate], Measures, int, random.Random], None]


def by_chance(candidates: Sequence[Candidate], measure: Measures, count: int, draw: random.Random) -> None:
    for candidate in draw.sample(list(candidates), min(count, len(candidates))):
        measure(candidate)


def tpe(candidates: Sequence[Candidate], measure: Measures, count: int, draw: random.Random) -> None:
    """Search as llama-optimus does: a sampler with its defaults, every knob a categorical, a failure the worst result.

    A request that is no candidate becomes the nearest one.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=draw.randrange(2**31)))
    grid = Grid(candidates)
    for _ in range(count):
        trial = study.ask()
        wanted: dict[str, Any] = {
            name: trial.suggest_categorical(name, list(values)) for name, values in grid.values.items()
        }
        seen = measure(grid.nearest(wanted))
        study.tell(trial, seen.job_s if math.isfinite(seen.job_s) else 1e6)


def hill(candidates: Sequence[Candidate], measure: Measures, count: int, draw: random.Random) -> None:
    """Search as llama-dyno does: a coarse sweep of how much is on the GPU, then hill climbing.

    From the best it moves one knob at a time, up or down, as long as a step gains 2 %.
    """
    grid = Grid(candidates)
    start = grid.default()
    layers = grid.values["cpu_layers"]
    sweep = [layers[round(share * (len(layers) - 1))] for share in (0, 0.33, 0.67, 1)] if len(layers) > 1 else layers
    best, best_s, done = start, math.inf, set[str]()

    def look(candidate: Candidate) -> float:
        done.add(candidate.key)
        return measure(candidate).job_s

    for value in sweep:
        candidate = grid.nearest({**start.by_knob, "cpu_layers": value})
        if candidate.key not in done and len(done) < count and (seconds := look(candidate)) < best_s:
            best, best_s = candidate, seconds
    while len(done) < count:
        around = [c for c in grid.around(best) if c.key not in done]
        if not around:
            return
        for candidate in draw.sample(around, len(around)):
            if len(done) >= count:
                return
            if (seconds := look(candidate)) < best_s * 0.98:
                best, best_s = candidate, seconds
                break


def walk_down(candidates: Sequence[Candidate], measure: Measures, count: int, draw: random.Random) -> None:
    """Search as Kaiwu does: windows from the longest, halved after a failure, up to 8; then ubatch 128 against 512.

    It bisects towards the last window that failed, knows the fewest layers on the CPU that are predicted to fit, and
    measures an empty context.
    """
    del draw
    grid = Grid(candidates)
    contexts = sorted((int(w) for w in grid.values["context"]), reverse=True)
    best, best_ms, done = None, math.inf, 0
    for context in contexts[:8]:
        if done >= count:
            return
        candidate = grid.fullest(context)
        done += 1
        if (ms := measure(candidate).empty_ms) < best_ms:
            best, best_ms = candidate, ms
    for ubatch in dict.fromkeys(grid.next_to("ubatch", size) for size in (128, 512)):
        if best is not None and done < count and best.by_knob["ubatch"] != ubatch:
            done += 1
            measure(grid.nearest({**best.by_knob, "ubatch": ubatch}))


RIVALS: dict[str, Rival] = {"random": by_chance, "tpe": tpe, "hill": hill, "walk-down": walk_down}


MARGIN_MIB = 577.0  # what Kaiwu keeps free of each GPU


class Grid:
    """The values of each knob, and which candidate is nearest to a wish."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        names = candidates[0].by_knob
        self.values: dict[str, list[Value]] = {
            name: sorted({c.by_knob[name] for c in candidates}, key=lambda v: (isinstance(v, str), v)) for name in names
        }
        self._at = {name: {value: at for at, value in enumerate(values)} for name, values in self.values.items()}
        self._rows = [tuple(self._at[name][c.by_knob[name]] for name in names) for c in candidates]

    def nearest(self, wanted: dict[str, Value]) -> Candidate:
        row = tuple(self._at[name][wanted[name]] for name in self.values)
        at = min(range(len(self._rows)), key=lambda i: sum(abs(a - b) for a, b in zip(self._rows[i], row, strict=True)))
        return self._candidates[at]

    def next_to(self, name: str, value: int) -> Value:
        """Return the nearest value of a numeric knob: the product tries no small ubatch beside copied weights."""
        return min(self.values[name], key=lambda there: abs(math.log2(int(there) / value)))

    def default(self) -> Candidate:
        """What a user gets who sets nothing: ubatch 512, f16, half of the threads, the shortest window."""
        threads = self.values["threads"]
        wish = {name: values[0] for name, values in self.values.items()}
        kv_type = "f16" if "f16" in self.values["kv_type"] else self.values["kv_type"][0]
        ubatch = 512 if 512 in self.values["ubatch"] else self.values["ubatch"][0]
        return self.nearest({**wish, "threads": threads[len(threads) // 2], "kv_type": kv_type, "ubatch": ubatch})

    def around(self, candidate: Candidate) -> list[Candidate]:
        found = {}
        for name, values in self.values.items():
            at = self._at[name][candidate.by_knob[name]]
            for step in (at - 1, at + 1):
                if 0 <= step < len(values):
                    near = self._nearest_with(name, values[step], candidate)
                    found[near.key] = near
        found.pop(candidate.key, None)
        return list(found.values())

    def _nearest_with(self, name: str, value: Value, to: Candidate) -> Candidate:
        inside = [c for c in self._candidates if c.by_knob[name] == value]
        return min(inside, key=lambda c: sum(c.by_knob[n] != to.by_knob[n] for n in self.values))

    def fullest(self, context: int) -> Candidate:
        """At a window, the default with as few layers on the CPU as are predicted to fit."""
        default = self.default()
        inside = [c for c in self._candidates if c.context == context]
        fitting = [c for c in inside if all(n.need_mib + MARGIN_MIB <= n.room_mib for n in c.needs)] or inside
        away = min(c.by_knob["cpu_layers"] for c in fitting)
        wish = {**default.by_knob, "context": context, "cpu_layers": away}
        return min(fitting, key=lambda c: sum(c.by_knob[n] != wish[n] for n in self.values))
