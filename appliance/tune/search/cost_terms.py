"""Candidates of the search: knobs, memory, and predicted time in parts. Pure.

The parts are those of a roofline (facts in README.md): weights read by GPUs, by the CPU, copies over PCIe, fixed time.
Each part has a correction factor of its own. So has each step of a knob whose effect no bandwidth predicts; the engine
names these knobs. The prior of a step's correction is centred on "no effect beyond the prediction".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from appliance.plan import PREDICTED, Compilation, Costs, KnobEffect
from appliance.plan.parts.launch import Phase, Value
from appliance.tune.figures.workload import EXCESS_WEIGHT, Mix, Workload
from appliance.tune.search.refit import Job, Late, Term

# Standard deviations of ln(true / predicted) of rates: tuning.md's eta and its measured cases, where a bandwidth taken
# for granted was off by 2 now and then.
PRIORS: Mapping[str, float] = {
    "gpu": 0.4,
    "cpu": 0.5,
    "pcie": 0.5,
    "fixed": 0.5,
    "gpu_depth": 0.5,
    "cpu_depth": 0.5,
    "gpu_prefill": 0.4,
    "cpu_prefill": 0.5,
    "prefill_depth": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory of one device: what the candidate is predicted to need, and the room there is."""

    device: str
    need_mib: float
    room_mib: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate. Knobs with integer values are ordered, others are not. `key` is given by the caller and unique."""

    key: str
    knobs: tuple[tuple[str, Value], ...]
    context: int
    work: Costs
    needs: tuple[Need, ...] = ()
    compilation: Compilation | None = None  # what its start compiles; None: nothing

    @cached_property
    def by_knob(self) -> dict[str, Value]:
        return dict(self.knobs)


class Effects:
    """Names and priors of the corrections of each knob's value, over the values that the candidates have."""

    def __init__(self, candidates: Sequence[Candidate], anchor: Candidate, by_knob: Mapping[str, KnobEffect]) -> None:
        """Corrections are relative to `anchor`, whose values have none. An ordered knob has one correction for each
        step away from the anchor's value. A knob that is not in `by_knob` scales all parts."""
        values: dict[str, set[Value]] = {}
        for candidate in candidates:
            for name, value in candidate.knobs:
                values.setdefault(name, set()).add(value)
        self._anchor = anchor
        self._by_knob = {name: by_knob.get(name, KnobEffect()) for name in values} | {"context": PREDICTED}
        for name, effect in self._by_knob.items():
            if effect.absent is not None and any(name not in candidate.by_knob for candidate in candidates):
                values[name].add(effect.absent)
        self._ordered = {
            name: sorted(v for v in found if isinstance(v, int))
            for name, found in values.items()
            if all(isinstance(value, int) for value in found)
        }
        self.priors = {**PRIORS, **dict(self._of_steps(values))}

    def _of_steps(self, values: Mapping[str, set[Value]]) -> Iterator[tuple[str, float]]:
        for name, effect in self._by_knob.items():
            for phase in effect.phases:
                for value in values.get(name, ()):
                    yield f"{name}={value} {phase}", effect.prior
                for a, b in itertools.pairwise(self._ordered.get(name, ())):
                    # The prior is for a doubling, so a range cut into more steps is not more uncertain.
                    # From 0, which means "none" or "auto" for some knobs, there is no doubling.
                    doublings = math.log2(b / a) if effect.is_of_doubling and a > 0 else 1.0
                    prior = effect.prior * math.sqrt(doublings)
                    yield from ((f"{name} {a}-{b}{way} {phase}", prior) for way in ("", " down"))

    def of(self, candidate: Candidate, phase: Phase) -> list[tuple[tuple[str, ...], list[str]]]:
        """Return for each knob with corrections the parts that it scales (empty: all) and the names of its
        corrections."""
        found = []
        for name, effect in self._by_knob.items():
            if phase in effect.phases and (steps := self.steps(candidate, name)):
                found.append((effect.parts, [f"{step} {phase}" for step in steps]))
        return found

    def steps(self, candidate: Candidate, name: str) -> tuple[str, ...]:
        absent = self._by_knob[name].absent if name in self._by_knob else None
        value, anchor = candidate.by_knob.get(name, absent), self._anchor.by_knob.get(name, absent)
        # If one of them lacks the knob (a split without a GPU) there is no step: the costs contain the effect.
        if value is None or anchor is None or value == anchor:
            return ()
        if not (isinstance(value, int) and isinstance(anchor, int) and name in self._ordered):
            return (f"{name}={value}",)
        low, high = min(value, anchor), max(value, anchor)
        between = [v for v in self._ordered[name] if low <= v <= high]
        # Corrections belong to steps, not values: what a trial at 8 threads shows of 4-6 and 6-8 also holds for 12.
        steps = [f"{name} {a}-{b}" for a, b in itertools.pairwise(between)]
        return tuple(steps if value > anchor else [f"{step} down" for step in steps])


def decode_terms(candidate: Candidate, effects: Effects, depth: float) -> tuple[Term, ...]:
    """Return the predicted time of decoding one token with `depth` tokens in the cache, by part."""
    work = candidate.work
    parts = (
        ("gpu", work.gpu_ms),
        ("cpu", work.cpu_ms),
        ("fixed", work.fixed_ms),
        ("gpu_depth", work.gpu_depth_us * depth / 1000),
        ("cpu_depth", work.cpu_depth_us * depth / 1000),
    )
    return _with_effects(candidate, effects, parts, "decode")


def prefill_terms(candidate: Candidate, effects: Effects, first: int, last: int) -> tuple[Term, ...]:
    """Return the predicted time of prefilling the tokens from depth `first` to `last`, by part."""
    work = candidate.work
    # Host weights are copied completely even for a batch that is not full.
    batches, serial = -(-(last - first) // work.batch), work.serial(last - first)
    parts = (
        ("gpu_prefill", work.gpu_prefill_ms * (last - first) * serial),
        ("cpu_prefill", work.cpu_prefill_ms * (last - first) * serial),
        ("pcie", work.copy_ms * batches),
        # Each token attends to all before it: the integral of depth from first to last.
        ("prefill_depth", work.prefill_depth_us * (last**2 - first**2) / 2000 * serial),
    )
    return _with_effects(candidate, effects, parts, "prefill")


def _with_effects(
    candidate: Candidate, effects: Effects, parts: Sequence[tuple[str, float]], phase: Phase
) -> tuple[Term, ...]:
    found = effects.of(candidate, phase)
    # Parts without time are left out: their corrections can never be fitted and would only enlarge the matrices.
    return tuple(Term(ms=ms, by=(part, *_scaling(part, found))) for part, ms in parts if ms > 0)


def _scaling(part: str, found: Sequence[tuple[tuple[str, ...], list[str]]]) -> Iterator[str]:
    for parts, steps in found:
        if not parts or part.startswith(parts):
            yield from steps


def mean_job(candidate: Candidate, effects: Effects, mix: Mix) -> Job:
    """Return the mean job of the mix in ms. Terms with the same corrections are added up. Late first tokens count as in
    `cost_s`."""
    whole = sum(weight for _, weight in mix.parts)
    sums: dict[tuple[str, ...], float] = {}
    late = []
    for workload, weight in mix.parts:
        prefill = prefill_terms(candidate, effects, workload.tokens_reused, workload.tokens_in)
        for term in (*prefill, *_decoded(candidate, effects, workload)):
            sums[term.by] = sums.get(term.by, 0.0) + term.ms * weight / whole
        if workload.ttft_limit_s is not None:
            share = EXCESS_WEIGHT * weight / whole
            late.append(Late(terms=prefill, limit_ms=1000 * workload.ttft_limit_s, weight=share))
    return Job(terms=tuple(Term(ms=ms, by=by) for by, ms in sums.items()), late=tuple(late))


def _decoded(candidate: Candidate, effects: Effects, workload: Workload) -> Iterator[Term]:
    """Yield the decode terms of a workload, computed at its middle depth, since predicted time is linear in depth."""
    for term in decode_terms(candidate, effects, workload.depth):
        yield Term(ms=term.ms * workload.tokens_out, by=term.by)
