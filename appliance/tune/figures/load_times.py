"""What starts of the engine take, by those that were seen: the load, and compiling where nothing is kept yet. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from appliance.plan import Compilation, Plan

Compilations = Callable[[Plan], Compilation | None]  # of an engine, by what is on the volume


def compiles_nothing(_: Plan) -> Compilation | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Start:
    """One that was seen. `load_s` is 0 where it is not known; what was compiled is kept if it `served`."""

    compilation: Compilation | None
    load_s: float
    served: bool


class Starts:
    """`load_s` is of one that finds everything compiled; 0 until one was seen: the first trial is made at any price."""

    def __init__(self, seen: Iterable[Start]) -> None:
        """In the order in which they were."""
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
        self._most_s = min(loads, default=math.inf)  # none of it took longer to compile than to start
        self.load_s = _mean(warm or [_without_compiling(start) for start in cold] or [0.0])

    def compile_s(self, compilation: Compilation | None) -> float:
        """Of the next start. What was seen of others replaces the engine's figure."""
        if compilation is None or not self._is_cold(compilation):
            return 0.0
        return min(compilation.seconds, self._most_s) if self._compile_s is None else self._compile_s

    def _is_cold(self, compilation: Compilation | None) -> bool:
        return compilation is not None and compilation.seconds > 0 and compilation.key not in self._kept


def _without_compiling(start: Start) -> float:
    return max(0.0, start.load_s - (start.compilation.seconds if start.compilation else 0.0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
