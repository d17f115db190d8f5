"""How likely a model is wanted again soon, learned from the intervals between its own requests.

For each octave of the interval (1 to 2 s, 2 to 4 s, …) a history keeps how many intervals lasted into it and how many
ended in it. The share that ended is the hazard there, and the chance of a request within some time is one minus the
product of what survives (Kaplan and Meier). An octave forgets only when another interval reaches it: a chat's short
pauses do not wash out how long its nights are.
"""

from __future__ import annotations

from math import exp, fsum, log, log2

from appliance.fleet.successors import Successors

OCTAVES = 21  # the last one also has what is longer than 2**21 s, 24 days
MEMORY = 0.95  # each interval that reaches an octave leaves so much of the earlier ones' weight
PRIOR_HAZARD = 0.35  # of an octave that no interval reached
PRIOR_WEIGHT = 0.5  # in intervals
NEVER_USED = 0.05  # chance of a model without a request
# An eviction that is regretted at once costs more than one that is regretted tomorrow, since another load might have
# evicted the model before tomorrow anyway. Chosen on even seeds of benchmarks/fleet.py.
HORIZONS_S = (10.0, 100.0, 1_000.0, 10_000.0)
WEIGHTS = tuple(horizon_s**-0.75 for horizon_s in HORIZONS_S)


class UseHistory:
    """The requests of one model; its memory is bounded. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._reached = [0.0] * OCTAVES
        self._ended = [0.0] * OCTAVES

    def note(self, at_s: float) -> None:
        """Learn of a request. A time before the last one's counts as the last one's."""
        if self._last_s is not None:
            at_s = max(at_s, self._last_s)
            end = min(OCTAVES - 1, int(_octaves(at_s - self._last_s)))
            for octave in range(end + 1):
                self._reached[octave] = MEMORY * self._reached[octave] + 1
                self._ended[octave] *= MEMORY
            self._ended[end] += 1
        self._last_s = at_s

    def chance(self, now_s: float, within_s: float) -> float:
        """Return the chance, 0 to 1, that a request comes within so many seconds from now; both are finite."""
        if self._last_s is None:
            return NEVER_USED
        age_s = max(1.0, now_s - self._last_s)
        return 1 - exp(self._log_survival(_octaves(age_s), _octaves(age_s + within_s)))

    def _log_survival(self, start: float, end: float) -> float:
        """Return the logarithm of the share of intervals of `start` octaves that last to `end` octaves."""
        total = 0.0
        for octave in range(int(start), int(end) + 1):
            crossed = min(end, octave + 1) - max(start, octave)
            total += crossed * log(1 - self._hazard(min(octave, OCTAVES - 1)))
        return total

    def _hazard(self, octave: int) -> float:
        ended = self._ended[octave] + PRIOR_WEIGHT * PRIOR_HAZARD
        return ended / (self._reached[octave] + PRIOR_WEIGHT)


def use_chance(history: UseHistory, now_s: float) -> float:
    """Return the chance of a request within HORIZONS_S by the model's own intervals, near ones weighing more."""
    chances = (history.chance(now_s, horizon_s) for horizon_s in HORIZONS_S)
    return fsum(weight * chance for weight, chance in zip(WEIGHTS, chances, strict=True)) / fsum(WEIGHTS)


class Uses:
    """The requests of all models of a fleet. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._histories: dict[str, UseHistory] = {}
        self._successors = Successors()

    def note(self, name: str, at_s: float) -> None:
        """Learn of a request to this model."""
        self._histories.setdefault(name, UseHistory()).note(at_s)
        self._successors.note(name, at_s)

    def chance(self, name: str, wanted: str, now_s: float) -> float:
        """Return the `use_chance` of a Resident, 0 to 1: by its own intervals, or since it follows the wanted model."""
        history = self._histories.get(name)
        own = NEVER_USED if history is None else use_chance(history, now_s)
        return own + (1 - own) * self._successors.chance(name, wanted)


def _octaves(seconds: float) -> float:
    return log2(max(1.0, seconds))
