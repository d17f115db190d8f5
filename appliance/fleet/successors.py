"""Which model is asked soon after which: if a team of models wakes up, its first must not evict its next.

A request after a pause is a start. For each start the models that also paused are awaited for a while. Each pair of a
starting model and one that came keeps two numbers: how often the second came, and how often it was awaited.
"""

from __future__ import annotations

from collections.abc import Iterator

# Chosen on even seeds of benchmarks/fleet.py.
PAUSE_S = 50.0  # without a request; a shorter pause is part of a chat
NEAR_S = 100.0  # how long after a start another model is awaited
MEMORY = 0.95  # each start leaves so much of the earlier ones' weight
PRIOR_WEIGHT = 1.0  # in starts after which nobody came
FORGOTTEN = 0.05  # a pair with less weight is dropped: the second has not come for 58 starts or more
# Two models that are asked often also meet by coincidence: 0.3 must hardly count, 0.9 nearly in full.
POWER = 3


class _Pair:
    """How often a model came within NEAR_S of another's start, and how often it was awaited. Both weights fade."""

    def __init__(self, awaited: float) -> None:
        self.came = 0.0
        self.awaited = awaited


class _Leader:
    """A model that was asked at least once, and the models that came after it."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self.start_s = 0.0
        self.starts = 0.0
        self.pairs: dict[str, _Pair] = {}


class Successors:
    """Pairs of models: the second is asked soon after the first starts. Times are monotonic seconds.

    Its memory is bounded by two numbers for each pair that was seen lately.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, _Leader] = {}
        self._now_s = float("-inf")

    def note(self, name: str, at_s: float) -> None:
        """Learn of a request. A time before the last one's counts as the last one's."""
        at_s = self._now_s = max(at_s, self._now_s)
        model = self._leaders.get(name)
        if model is None:
            model = self._leaders[name] = _Leader()
            self._start(model, at_s)
        else:
            for leader in self._awaiting(model, at_s):
                leader.pairs.setdefault(name, _Pair(leader.starts)).came += 1
            if at_s - model.last_s >= PAUSE_S:
                self._start(model, at_s)
        model.last_s = at_s

    def chance(self, name: str, wanted: str) -> float:
        """Return the chance, 0 to 1, that the model is asked soon after the wanted one; 0 if that was never seen."""
        leader = self._leaders.get(wanted)
        pair = leader.pairs.get(name) if leader is not None else None
        return 0.0 if pair is None else (pair.came / (pair.awaited + PRIOR_WEIGHT)) ** POWER

    def _awaiting(self, model: _Leader, now_s: float) -> Iterator[_Leader]:
        """Yield each leader that started within NEAR_S, if the model paused before that start and was not asked since.

        The model itself is never among them: its start is not later than its last request.
        """
        for leader in self._leaders.values():
            if now_s - leader.start_s <= NEAR_S and leader.start_s - model.last_s >= PAUSE_S:
                yield leader

    def _start(self, leader: _Leader, at_s: float) -> None:
        leader.start_s = at_s
        leader.starts = MEMORY * leader.starts + 1
        for name, pair in list(leader.pairs.items()):
            if at_s - self._leaders[name].last_s >= PAUSE_S:
                pair.came *= MEMORY
                pair.awaited = MEMORY * pair.awaited + 1
            if pair.came < FORGOTTEN:
                del leader.pairs[name]
