"""Expected duration of engine starts, from starts that were seen: loading, and compiling if nothing is cached. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from appliance.plan import Compilation, Plan

Compilations = Callable[[Plan], Compilation | None]  # what a plan's start compiles, by the volume's present content


def compiles_nothing(_: Plan) -> Compilation | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start that was seen. `load_s` is 0 if unknown. If `served` is True, its compilation is in the cache now."""

    compilation: Compilation | None
    load_s: float
    served: bool


class Starts:
    """Expectation for the next start. `load_s` is for a start that finds everything compiled; 0 until one was seen, so
    that the first trial is made at any price."""

    def __init__(self, seen: Iterable[Start]) -> None:
        """`seen` are the starts in chronological order."""
        self._kept: set[str] = set()
        cold: list[Start] = []
        warm: list[float] = []
        for start in seen:
            if self._is_cold(start.compilation):
                cold.append(start)
            elif start.load_s:
                warm.append(start.load_s)
            if start.compilation and start.served:
                self._kept.add(start.compilation.key)
        cold = [start for start in cold if start.load_s]
        loads = [start.load_s for start in cold]
        self._compile_s = max(0.0, _mean(loads) - _mean(warm)) if loads and warm else None
        self._most_s = min(loads, default=math.inf)  # compiling cannot take longer than the whole start
        self.load_s = _mean(warm or [_without_compiling(start) for start in cold] or [0.0])

    def compile_s(self, compilation: Compilation | None) -> float:
        """Return the expected seconds of compiling in the next start. Starts that were seen override the engine's own
        figure."""
        if compilation is None or not self._is_cold(compilation):
            return 0.0
        return min(compilation.seconds, self._most_s) if self._compile_s is None else self._compile_s

    def _is_cold(self, compilation: Compilation | None) -> bool:
        return compilation is not None and compilation.seconds > 0 and compilation.key not in self._kept


def _without_compiling(start: Start) -> float:
    return max(0.0, start.load_s - (start.compilation.seconds if start.compilation else 0.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
