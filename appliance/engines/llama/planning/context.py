"""How large the context is and in which type it is kept, and so where the layers lie: pure.

Memory carries a context in many ways: more of it is paid for with layers, or experts, that leave the GPU. So the window
is the largest whose predicted job is not much slower than with a small one; on the CPU alone that is what fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from appliance.engines.llama.planning.memory import padded
from appliance.engines.llama.planning.placement import Placed, PlacementJob, Resources, place
from appliance.plan import CONTEXT_STEP, SPEED_KEPT
from appliance.values import dataclass

Aim = Literal["balanced", "speed", "context"]
KEPT: Mapping[Aim, float] = {"balanced": SPEED_KEPT, "speed": 0.97, "context": 0.0}
"""Of the fastest plan's speed at a small context, what a larger one has to keep."""

GOOD_CONTEXT = 32768  # f16 is kept down to here before q8_0 buys a larger context
SMALL_CONTEXT = 4096  # what speeds are compared at


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    kv_type: str
    context: int
    placed: Placed
    carried: Mapping[str, int]  # tokens, by type of the cache
    larger: Mapping[str, float]  # seconds of that job with twice the context, by type that can carry it


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    tokens: int
    is_explicit: bool  # then nothing less will do
    kinds: tuple[str, ...]  # types of the cache that may be used, the best first
    aim: Aim = "balanced"


def choose_context(job: PlacementJob, resources: Resources, request: ContextRequest) -> ContextPlan | None:
    """None when not even the smallest context fits, or the one that was asked for."""
    at = _Asked(job, resources)
    small = min(request.tokens, SMALL_CONTEXT)
    # Each type by its own speed: that a smaller one is read faster is no reason against an exact one.
    fast = {kind: placed.cost for kind in request.kinds if (placed := at(kind, small) or at(kind, CONTEXT_STEP))}
    if not fast:
        return None
    share = KEPT[request.aim]
    limits = {kind: cost / share if share else float("inf") for kind, cost in fast.items()}
    carried = {kind: at.most(kind, request.tokens, limits[kind]) if kind in limits else 0 for kind in request.kinds}
    kind = _kind(request, carried, at)
    context = request.tokens if request.is_explicit else min(carried[kind], request.tokens)
    placed = at(kind, context) if context else None
    if placed is None:
        return None
    larger = 2 * padded(context)
    return ContextPlan(
        kv_type=kind,
        context=context,
        placed=placed,
        carried=carried,
        larger={kind: placed.speed.job_s for kind in request.kinds if (placed := at(kind, larger))},
    )


def _kind(request: ContextRequest, carried: Mapping[str, int], at: _Asked) -> str:
    """The most exact that carries enough; if none does, what carries the most, or is fastest with what was asked."""
    good = next((kind for kind in request.kinds if carried[kind] >= enough_of(request)), None)
    if good is None and request.is_explicit:
        fits = {kind: placed.cost for kind in request.kinds if (placed := at(kind, request.tokens))}
        return min(fits, key=lambda kind: fits[kind], default=request.kinds[0])
    return good or max(request.kinds, key=lambda kind: carried[kind])


def enough_of(request: ContextRequest) -> int:
    """Tokens beyond which no exactness is given up for more."""
    return request.tokens if request.is_explicit or request.aim == "context" else min(request.tokens, GOOD_CONTEXT)


class _Asked:
    """Placements of one model by kind of cache and context, each found once."""

    def __init__(self, job: PlacementJob, resources: Resources) -> None:
        self._job = job
        self._resources = resources
        self._found: dict[tuple[str, int], Placed | None] = {}

    def __call__(self, kind: str, context: int) -> Placed | None:
        key = (kind, padded(context))
        if key not in self._found:
            job = replace(self._job, kv_type=kind, context=padded(context))
            self._found[key] = place(job, self._resources)
        return self._found[key]

    def most(self, kind: str, tokens: int, limit: float) -> int:
        """The largest multiple of the step, at most `tokens` padded, whose job is within the limit; 0 for none."""
        low, high = 0, padded(tokens) // CONTEXT_STEP
        if self._is_within(kind, high * CONTEXT_STEP, limit):
            return high * CONTEXT_STEP
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_within(kind, middle * CONTEXT_STEP, limit):
                low = middle
            else:
                high = middle
        return low * CONTEXT_STEP

    def _is_within(self, kind: str, context: int, limit: float) -> bool:
        placed = self(kind, context)
        return placed is not None and placed.cost <= limit
