"""One candidate as the search sees it: knobs, memory, and what a planner predicts it to cost, part by part. Pure.

Parts are those of a roofline (facts in README.md): weights read by GPUs, by the CPU, copies over PCIe, fixed time. Each
has a correction of its own, and so has each step of a knob whose effect no bandwidth tells: threads, ubatch, the type
of the KV cache. A step's correction has a prior around "no effect beyond the predicted".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from appliance.plan import Costs
from appliance.tune.refit import Term
from appliance.tune.workload import Mix, Workload

Value = int | str

# Standard deviations of ln(true / predicted). Of rates: tuning.md's eta and its measured cases, where a bandwidth taken
# for granted was off by 2 now and then. Of one step of a knob: from the spread of such steps in its section 3.
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
    "threads": 0.3,
    "ubatch": 0.15,
    "knob": 0.1,
}
_ON_CPU = ("cpu", "cpu_depth", "cpu_prefill")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Of one device: what the candidate is predicted to take, and what there is."""

    device: str
    need_mib: float
    room_mib: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`knobs` by name: integers are ordered, words are not. `key` is the caller's; two candidates never share one."""

    key: str
    knobs: tuple[tuple[str, Value], ...]
    window: int
    work: Costs
    needs: tuple[Need, ...] = ()

    @cached_property
    def by_knob(self) -> dict[str, Value]:
        return dict(self.knobs)


class Effects:
    """Names of the corrections of each knob's value, over the values that the candidates have."""

    def __init__(self, candidates: Sequence[Candidate], anchor: Candidate) -> None:
        """At `anchor`'s values there is nothing to correct; ordered knobs get away from it step by step."""
        values: dict[str, set[Value]] = {}
        for candidate in candidates:
            for name, value in candidate.knobs:
                values.setdefault(name, set()).add(value)
        self._anchor = anchor.by_knob
        self._ordered = {
            name: sorted(v for v in found if isinstance(v, int))
            for name, found in values.items()
            if all(isinstance(value, int) for value in found)
        }
        self.priors = {**PRIORS, **dict(self._of_threads())}

    def _of_threads(self) -> Iterator[tuple[str, float]]:
        """Their prior is of a doubling: that from 6 to 14 are three steps makes them no more doubtful."""
        for a, b in itertools.pairwise(self._ordered.get("threads", ())):
            for way, phase in itertools.product(("", " down"), ("decode", "prefill")):
                yield f"threads:threads {a}-{b}{way} {phase}", PRIORS["threads"] * math.sqrt(math.log2(b / a))

    def steps(self, candidate: Candidate, name: str) -> tuple[str, ...]:
        value, anchor = candidate.by_knob.get(name), self._anchor.get(name)
        if value is None or anchor is None or value == anchor:
            return ()
        if not (isinstance(value, int) and isinstance(anchor, int) and name in self._ordered):
            return (f"{_prior_name(name)}:{name}={value}",)
        low, high = min(value, anchor), max(value, anchor)
        between = [v for v in self._ordered[name] if low <= v <= high]
        steps = [f"{_prior_name(name)}:{name} {a}-{b}" for a, b in itertools.pairwise(between)]
        return tuple(steps if value > anchor else [f"{step} down" for step in steps])


def _prior_name(knob: str) -> str:
    return knob if knob in PRIORS else "knob"


# Expert layers and windows are not among them: what they do is in the predicted work already.
_EVERYWHERE = ("kv_type", "load_mode", "split")


def decode_terms(candidate: Candidate, effects: Effects, depth: float) -> tuple[Term, ...]:
    """Of one token with `depth` in the cache."""
    work = candidate.work
    seen = depth if work.window is None else min(depth, work.window)
    parts = (
        ("gpu", work.gpu_ms),
        ("cpu", work.cpu_ms),
        ("fixed", work.fixed_ms),
        ("gpu_depth", work.gpu_depth_us * seen / 1000),
        ("cpu_depth", work.cpu_depth_us * seen / 1000),
    )
    return _with_effects(candidate, effects, parts, "decode", ())


def prefill_terms(candidate: Candidate, effects: Effects, first: int, last: int) -> tuple[Term, ...]:
    """Of reading the tokens from depth `first` to `last`."""
    work = candidate.work
    ubatch = candidate.by_knob.get("ubatch", 512)
    batches = -(-(last - first) // ubatch) if isinstance(ubatch, int) else 1
    parts = (
        ("gpu_prefill", work.gpu_prefill_ms * (last - first)),
        ("cpu_prefill", work.cpu_prefill_ms * (last - first)),
        ("pcie", work.copy_ms * batches),
        ("prefill_depth", work.prefill_depth_us * (last**2 - first**2) / 2000),
    )
    return _with_effects(candidate, effects, parts, "prefill", ("ubatch",))


def _with_effects(
    candidate: Candidate,
    effects: Effects,
    parts: Sequence[tuple[str, float]],
    phase: str,
    knobs: tuple[str, ...],
) -> tuple[Term, ...]:
    shared = [f"{step} {phase}" for name in (*_EVERYWHERE, *knobs) for step in effects.steps(candidate, name)]
    threads = [f"{step} {phase}" for step in effects.steps(candidate, "threads")]
    return tuple(Term(ms=ms, by=(part, *shared, *(threads if part in _ON_CPU else ()))) for part, ms in parts if ms > 0)


def job_terms(candidate: Candidate, effects: Effects, mix: Mix) -> tuple[Term, ...]:
    """Of the mean job, in milliseconds, with terms of the same corrections added up."""
    whole = sum(weight for _, weight in mix.parts)
    sums: dict[tuple[str, ...], float] = {}
    for workload, weight in mix.parts:
        for term in _of_one_job(candidate, effects, workload):
            sums[term.by] = sums.get(term.by, 0.0) + term.ms * weight / whole
    return tuple(Term(ms=ms, by=by) for by, ms in sums.items())


def _of_one_job(candidate: Candidate, effects: Effects, workload: Workload) -> list[Term]:
    """Decoding at its middle depth stands for all of it: predicted time is linear in depth, but for a window's edge."""
    prefill = prefill_terms(candidate, effects, workload.tokens_reused, workload.tokens_in)
    decode = decode_terms(candidate, effects, workload.depth)
    return [*prefill, *(Term(ms=term.ms * workload.tokens_out, by=term.by) for term in decode)]
