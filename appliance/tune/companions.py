"""Which other candidates to measure in the same llama-bench process: pure.

They share one load. But llama-bench reads more than a server's probe does: each stretch once to warm up and once to
measure, and one more at the last depth. So it pays where a load is long against a prompt, and nowhere else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from appliance.engines.llama_bench import Cell, Grid, Steps
from appliance.tune.guided import PRICE, WORTH_A_SECOND, WORTH_A_TRY, WORTH_ANOTHER, Ask, Search, State, Trial
from appliance.tune.terms import Candidate, Value

CELLS_MAX = 6
VARIED = ("threads", "ubatch")


@dataclass(frozen=True, kw_only=True)
class Together:
    """`keys` are the candidates of the grid's cells. `alone_s` is what as many starts of the server would take."""

    grid: Grid
    steps: Steps
    keys: tuple[tuple[Cell, str], ...]
    seconds: float
    alone_s: float


def companions(
    search: Search, trials: Sequence[Trial], ask: Ask, *, kv_type: str, steps: Steps, left_s: float
) -> Together | None:
    """The asked candidate, and those of other threads and ubatches that are worth their seconds beside it.

    None where a server does as well: nothing is worth joining it, the time does not hold it, starts are cheaper, or it
    is asked for again, which is to tell near ones apart. Of `steps` the depths count, not how much is decoded: that
    is the ask's. `kv_type` is the asked plan's.
    """
    has_cells = all(isinstance(ask.candidate.by_knob.get(name), int) for name in VARIED)
    if not (has_cells and ask.needs_load) or any(trial.key == ask.candidate.key for trial in trials):
        return None
    beside = _Beside(search, trials, ask, replace(steps, decode_tokens=search.tokens(is_long=ask.is_long)))
    found = beside.together(beside.grown(left_s), kv_type)
    return found if len(found.keys) > 1 and found.seconds <= min(left_s, found.alone_s) else None


Pair = tuple[int, int]  # threads, ubatch


@dataclass(frozen=True, kw_only=True)
class _Lists:
    threads: tuple[int, ...]
    ubatches: tuple[int, ...]

    @property
    def pairs(self) -> frozenset[Pair]:
        return frozenset(itertools.product(self.threads, self.ubatches))


class _Beside:
    """The asked candidate, and those that differ from it in nothing but threads and ubatch."""

    def __init__(self, search: Search, trials: Sequence[Trial], ask: Ask, steps: Steps) -> None:
        self._search, self._ask, self._steps = search, ask, steps
        self._state = State(search, trials)
        tried = {trial.key for trial in trials}
        measured = {search.twins(trial.key) for trial in trials if trial.points}
        self._by_pair = {
            _pair(candidate): candidate
            for candidate in search.candidates
            if _rest(candidate) == _rest(ask.candidate)
            and candidate.key not in tried
            and search.twins(candidate.key) not in measured
            and self._state.chance(candidate) >= WORTH_A_TRY
        } | {_pair(ask.candidate): ask.candidate}

    def grown(self, left_s: float) -> _Lists:
        """One more number of threads or one more ubatch at a time, that which promises most for its seconds."""
        threads, ubatch = _pair(self._ask.candidate)
        lists = _Lists(threads=(threads,), ubatches=(ubatch,))
        while options := [more for more in self._larger(lists) if self._is_worth(more, lists, left_s)]:
            promises = [self._promise(more, lists) for more in options]
            lists = options[promises.index(max(promises))]
        return lists

    def _larger(self, lists: _Lists) -> Iterable[_Lists]:
        """Those of which every cell is a candidate, no two of them the same to all predictions."""
        for threads, ubatch in self._by_pair:
            more = (
                replace(lists, threads=(*lists.threads, threads)),
                replace(lists, ubatches=(*lists.ubatches, ubatch)),
            )
            yield from (one for one in more if len(one.pairs) <= CELLS_MAX and self._is_whole(one, lists))

    def _is_whole(self, more: _Lists, lists: _Lists) -> bool:
        if more.pairs == lists.pairs or not more.pairs <= self._by_pair.keys():
            return False
        return len({self._search.twins(self._by_pair[pair].key) for pair in more.pairs}) == len(more.pairs)

    def _is_worth(self, more: _Lists, lists: _Lists, left_s: float) -> bool:
        new = self._new(more, lists)
        seconds = sum(map(self._bench_s, new))
        if self._seconds(more) > left_s or seconds > sum(map(self._server_s, new)):
            return False
        return self._worth(new) >= len(new) * WORTH_ANOTHER + WORTH_A_SECOND * seconds

    def _promise(self, more: _Lists, lists: _Lists) -> float:
        new = self._new(more, lists)
        return self._worth(new) / math.pow(sum(map(self._bench_s, new)), PRICE)

    def _new(self, more: _Lists, lists: _Lists) -> list[Candidate]:
        return [self._by_pair[pair] for pair in sorted(more.pairs - lists.pairs)]

    def _worth(self, candidates: Sequence[Candidate]) -> float:
        """Against the best so far; before there is one, against the asked."""
        best = self._state.leader or self._state.estimate(self._ask.candidate)
        return sum(self._state.worth(self._state.estimate(c), best, is_long=self._ask.is_long) for c in candidates)

    def _bench_s(self, candidate: Candidate) -> float:
        """One cell, the load aside. A single deeper depth is read by the first cell, and taken over by all others."""
        steps, search, fitted = self._steps, self._search, self._state.fit
        ms = 0.0
        for depth in steps.depths:
            ms += search.read_ms(candidate, fitted, 0, steps.stretch)
            ms += search.read_ms(candidate, fitted, depth, depth + steps.stretch)
            ms += search.decode_ms(candidate, fitted, depth) * (1 + steps.decode_tokens)
            if depth and (steps.stretches > 1 or candidate is self._ask.candidate):
                ms += search.read_ms(candidate, fitted, 0, depth)
        return ms / 1000

    def _server_s(self, candidate: Candidate) -> float:
        return self._state.load_s + self._search.seconds(candidate, self._state.fit, is_long=self._ask.is_long)

    def _seconds(self, lists: _Lists) -> float:
        return self._state.load_s + sum(self._bench_s(self._by_pair[pair]) for pair in sorted(lists.pairs))

    def together(self, lists: _Lists, kv_type: str) -> Together:
        grid = Grid(threads=lists.threads, ubatches=lists.ubatches, kv_type=kv_type)
        candidates = [(cell, self._by_pair[cell.threads, cell.ubatch]) for cell in grid.cells]
        return Together(
            grid=grid,
            steps=self._steps,
            keys=tuple((cell, candidate.key) for cell, candidate in candidates),
            seconds=self._seconds(lists),
            alone_s=sum(self._server_s(candidate) for _, candidate in candidates),
        )


def _pair(candidate: Candidate) -> Pair:
    threads, ubatch = (candidate.by_knob[name] for name in VARIED)
    return int(threads), int(ubatch)


def _rest(candidate: Candidate) -> tuple[int, frozenset[tuple[str, Value]]]:
    return candidate.window, frozenset(pair for pair in candidate.knobs if pair[0] not in VARIED)
