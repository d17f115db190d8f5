"""How large the context is and in which type it is kept, and so where the layers lie: one decision. Pure.

Memory carries a context in many ways: more of it is paid for with layers, or experts, that leave the GPU. Candidates
are, for each type of the cache, the knee (the largest context with everything on the GPUs) and the most that the aim
pays for. A candidate is judged by its job near empty, and half full where it is larger than 32,768 tokens, against the
fastest placement of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Literal

from appliance.engines.llama.planning.memory.kv_types import TRUSTED
from appliance.engines.llama.planning.memory.memory import UBATCH, padded
from appliance.engines.llama.planning.placement.job_time import job_ms, placement_costs
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob, Resources, place
from appliance.engines.llama.planning.placement.roofline import DEPTH
from appliance.plan import (
    AGENT_CONTEXT,
    CONTEXT_STEP,
    CONTEXT_WORTH,
    QUICK_TOKENS_PER_S,
    READABLE_TOKENS_PER_S,
    SMALLEST_CONTEXT,
    SPEED_KEPT,
    Costs,
    speed_kept,
)
from appliance.values import dataclass

Aim = Literal["balanced", "speed", "context"]
BY_CONTEXT: tuple[Aim, ...] = ("speed", "balanced", "context")  # the least first
KEPT: Mapping[Aim, float] = {"balanced": SPEED_KEPT, "speed": 0.97, "context": 0.0}
"""Of the fastest plan's speed, what a larger context has to keep."""

GOOD_CONTEXT = 32768  # up to here a context is judged near empty only, and no other type is checked for more
SMALL_CONTEXT = 4096  # what speeds are compared at
AS_FAST = 0.9  # of the speed: what an exact cache may cost
AS_FAST_WITH_LESS = 0.95  # the same where the context is smaller, too
AS_FAST_HALF_FULL = 0.8  # the same with half of the context in the cache
MORE_THAN_A_SLIVER = 1.1  # times the context: what a rounder cache has to carry
HOST_KV_MIB = 4096.0  # of the cache in host memory beside a GPU: each token reads it from there
NOTICED = 0.97  # a loss of less is not worth a word
HALF_FULL = "half full"  # of a bound: the rule holds above GOOD_CONTEXT alone
TOO_LONG = "take longer to read in full"  # of a bound: than `ContextRequest.fill_s`
NO_FIT, AS_WHOLE = "not fit", "go beyond whole layers"  # what ended a context: see `ContextPlan.bound`
CHANCE = 0.995  # what differs less is the rounding of whole layers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    kv_type: str
    context: int
    placed: Placed
    half_full: float = 0.0  # decode, tokens a second


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    kv_type: str
    context: int
    placed: Placed
    carried: Mapping[str, int]  # tokens that the aim pays for, by type of the cache
    knees: Mapping[str, int] = field(default_factory=dict)  # tokens with everything on GPUs, by type; 0: none
    ubatch: int = UBATCH
    bound: str = ""  # what ended it, in words that follow "more would"
    half_full: float = 0.0  # decode, tokens a second
    next_tokens: int = 0  # the next context that would be worth its price; 0: there is none, or nobody asks
    larger: Candidate | None = None  # that context, where it fits
    others: Mapping[str, Candidate] = field(default_factory=dict)  # with this context in another type, by type
    before: Candidate | None = None  # what is faster, and smaller: what this one costs
    limits: Mapping[str, float] = field(default_factory=dict)  # of a job near empty, as `Placed.cost`, by type
    ideal: tuple[Costs, ...] = ()  # what speeds half full are measured by
    usual: Candidate | None = None  # what the default ubatch would have, where another is taken
    usual_knees: Mapping[str, int] = field(default_factory=dict)  # `knees` with that ubatch: its buffer is smaller
    is_explicit: bool = False
    full: float = 0.0  # decode with the whole context in the cache, tokens a second
    fill_s: float = 0.0  # until a prompt that fills the context is read
    unhurried: ContextPlan | None = None  # what would be taken if `bound` were not the time to read it
    minds_full: bool = False  # the aim asks for that speed
    reads_along: bool = False  # and some usable context has it


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    tokens: int
    is_explicit: bool  # then nothing less will do
    kinds: tuple[str, ...]  # types of the cache that may be used, the most exact first
    aim: Aim = "balanced"
    fill_s: float = 0.0  # that reading a full context may take; 0: any time

    @property
    def floor(self) -> int:
        """Tokens that come before speed; 0 where none do."""
        return 0 if self.is_explicit or self.aim != "balanced" else min(self.tokens, AGENT_CONTEXT)

    def is_below_floor(self, tokens: int, beside: int) -> bool:
        """True if a context is short of the floor by more than a sliver, and the one beside it is not."""
        return MORE_THAN_A_SLIVER * tokens < self.floor <= beside


def choose_context(
    job: PlacementJob, resources: Resources, request: ContextRequest, like: ContextPlan | None = None
) -> ContextPlan | None:
    """None when not even the smallest context fits, or the one that was asked for. `like` is the decision with another
    ubatch, whose demands are made here, too."""
    at = _Asked(job, resources, request, like)
    if not at.fast:
        return None
    found = list(at.of(request.tokens) if request.is_explicit else _candidates(at, request))
    chosen, before = _best(found, at)
    return _planned(at, job, request, chosen, before) if chosen else None


def same_context(
    job: PlacementJob,
    resources: Resources,
    request: ContextRequest,
    like: ContextPlan,
    wins: Callable[[str, Placed], bool],
) -> ContextPlan | None:
    """The context of `like` with another ubatch, and where none is asked for as much more as takes no speed; None where
    it does not win."""
    at = _Asked(job, resources, request, like)
    chosen, before = _best(list(at.of(like.context)), at)
    if chosen is None or not wins(chosen.kv_type, chosen.placed):
        return None
    return _planned(at, job, request, chosen if request.is_explicit else at.grown(chosen), before)


def _planned(
    at: _Asked, job: PlacementJob, request: ContextRequest, chosen: Candidate, before: Candidate | None
) -> ContextPlan:
    of_kinds = (at.candidate(kind, chosen.context) for kind in request.kinds if kind != chosen.kv_type)
    others = {other.kv_type: other for other in of_kinds if other}
    next_tokens = 0 if request.is_explicit else at.next_tokens(chosen)
    return ContextPlan(
        kv_type=chosen.kv_type,
        context=chosen.context,
        placed=chosen.placed,
        carried=at.carried,
        knees=at.knees,
        ubatch=job.ubatch,
        next_tokens=next_tokens,
        larger=at.candidate(chosen.kv_type, next_tokens) if next_tokens else None,
        others=others,
        bound="" if request.is_explicit else at.bound(chosen),
        half_full=at.half_full(chosen),
        before=before or at.faster(chosen),
        is_explicit=request.is_explicit,
        limits=at.limits,
        ideal=at.ideal,
        full=at.full(chosen),
        fill_s=at.fill_s(chosen.kv_type, chosen.context, chosen.placed),
        minds_full=at.minds_full,
        reads_along=at.reads_along,
    )


def _candidates(at: _Asked, request: ContextRequest) -> Iterator[Candidate]:
    """Knees first, and of each the most exact type first: what comes later has to be better."""
    of_kinds = [(kind, tokens) for of_all in (at.knees, at.carried) for kind, tokens in of_all.items() if tokens]
    for kind, tokens in dict.fromkeys(of_kinds):
        if placed := at(kind, tokens):
            yield Candidate(kv_type=kind, context=min(tokens, request.tokens), placed=placed)


def _best(found: list[Candidate], at: _Asked) -> tuple[Candidate | None, Candidate | None]:
    """The best, and the one that it was taken in place of where it is slower."""
    if not found:
        return None, None
    best, before = found[0], None
    for each in found[1:]:
        if at.is_better(each, best):
            faster = (best, before) if before else (best,)
            before = next((one for one in faster if each.placed.cost * NOTICED > one.placed.cost), None)
            best = each
    return best, before


def enough_of(request: ContextRequest) -> int:
    """Tokens beyond which no type is checked that was not shown to be harmless."""
    return request.tokens if request.is_explicit or request.aim == "context" else min(request.tokens, GOOD_CONTEXT)


class _Asked:
    """Placements of one model by type of the cache and context, each found once, and how they compare."""

    def __init__(
        self, job: PlacementJob, resources: Resources, request: ContextRequest, like: ContextPlan | None
    ) -> None:
        self._job = job
        self._resources = resources
        self._request = request
        self._share = KEPT[request.aim]
        self._found: dict[tuple[str, int], Placed | None] = {}
        self._has_experts = bool(job.model.experts)
        small = min(request.tokens, SMALL_CONTEXT)
        placed = {kind: self(kind, small) or self(kind, CONTEXT_STEP) for kind in request.kinds}
        self.fast: dict[str, Placed] = {kind: each for kind, each in placed.items() if each}
        self.limits = like.limits if like else self._cost_limits()
        self.ideal = like.ideal if like else tuple(self._without_host_cache(*each) for each in self.fast.items())
        self.minds_full = request.aim == "context" and not request.is_explicit
        self.reads_along = self.minds_full and (like.reads_along if like else self._can_read_along())

    def __call__(self, kind: str, context: int) -> Placed | None:
        key = (kind, padded(context))
        if key not in self._found:
            self._found[key] = place(replace(self._job, kv_type=kind, context=padded(context)), self._resources)
        return self._found[key]

    @cached_property
    def knees(self) -> dict[str, int]:
        """By type, tokens with everything on GPUs; 0 where the weights alone do not fit there."""
        return {kind: self._knee(kind) for kind in self._request.kinds} if self._resources.devices else {}

    @cached_property
    def carried(self) -> dict[str, int]:
        """By type, tokens that the aim pays for. For the native length `balanced` pays a little more, where no type has
        it for less, and in the type with the most: exactness is no reason to pay it."""
        found = {kind: max(self._paid(kind), self.knees.get(kind, 0)) for kind in self._request.kinds}
        most = max(found, key=lambda kind: found[kind])
        if found[most] and self._is_native_paid(most):
            found[most] = padded(self._request.tokens)
        return found

    def _knee(self, kind: str) -> int:
        if kind not in self.fast or not self.fast[kind].placement.is_whole:
            return 0
        return self._most(lambda tokens: self._is_paid(kind, tokens) and self._is_whole(kind, tokens))

    def _paid(self, kind: str) -> int:
        """Of experts attention stays on the GPUs where that leaves a usable context."""
        if kind not in self.fast:
            return 0
        least = min(self._request.tokens, SMALLEST_CONTEXT)
        if self._has_experts and self._resources.devices and self._share:
            tokens = self._most(lambda tokens: self._is_paid(kind, tokens) and self._attends_on_gpus(kind, tokens))
            if tokens >= least:
                return tokens
        return self._most(lambda tokens: self._is_paid(kind, tokens))

    def _is_native_paid(self, kind: str) -> bool:
        """With attention on the GPUs, near empty and half full."""
        native = self._request.tokens
        placed = self(kind, native)
        if self._request.aim != "balanced" or placed is None or not self._attends_on_gpus(kind, native):
            return False
        share = speed_kept(native, native)
        if self._is_too_long(kind, native, placed):
            return False
        is_paid_empty = placed.cost * share <= self.limits[kind] * self._share
        return is_paid_empty and self._keeps_half_full(kind, native, placed, share)

    def _is_whole(self, kind: str, tokens: int) -> bool:
        placed = self(kind, tokens)
        return placed is not None and placed.placement.is_whole

    def _can_read_along(self) -> bool:
        """With a usable context that is full. Where no type of the cache can, the largest is as good as another."""
        least = min(self._request.tokens, SMALLEST_CONTEXT)
        return any(self._is_readable(kind, least, placed) for kind in self.fast if (placed := self(kind, least)))

    def _is_readable(self, kind: str, tokens: int, placed: Placed) -> bool:
        return self._costs(kind, placed).decode_ms(tokens) * READABLE_TOKENS_PER_S <= 1000

    def _is_paid(self, kind: str, tokens: int) -> bool:
        """Whether the aim pays for that context: near empty, and half full where it is larger than most need."""
        return not self._objection(kind, tokens)

    def _objection(self, kind: str, tokens: int) -> str:
        """Why the aim does not pay for it, in words that follow "more would"; empty where it does."""
        placed = self(kind, tokens)
        if placed is None:
            return NO_FIT
        if self._is_too_long(kind, tokens, placed):
            return TOO_LONG
        is_quick = tokens <= self._request.floor and self._is_quick(kind, tokens, placed)
        if not (is_quick or self._is_paid_empty(kind, placed)):
            return f"keep less than {self._share:.0%} of the best speed, prompt and answer together"
        if self.reads_along and not self._is_readable(kind, tokens, placed):
            return f"decode less than {READABLE_TOKENS_PER_S:g} tok/s when full"
        if not self._share or placed.placement.is_whole:
            return ""
        if placed.placement.cpu_layers and placed.host.kv > HOST_KV_MIB:
            return f"put more than {HOST_KV_MIB:,.0f} MiB of the cache into host memory"
        return self._objection_half_full(kind, tokens, placed) if tokens > GOOD_CONTEXT and not is_quick else ""

    def _is_too_long(self, kind: str, tokens: int, placed: Placed) -> bool:
        """To read in full, for more than the least that clients work with. On GPUs alone nothing else takes what its
        cells would leave."""
        limit_s = 0.0 if self._request.is_explicit or placed.placement.is_whole else self._request.fill_s
        return 0 < limit_s < self.fill_s(kind, tokens, placed) and tokens > min(self._request.tokens, SMALLEST_CONTEXT)

    def fill_s(self, kind: str, tokens: int, placed: Placed) -> float:
        return self._costs(kind, placed).prefill_ms(tokens, tokens / 2) / 1000

    def _is_quick(self, kind: str, tokens: int, placed: Placed) -> bool:
        """Half full."""
        return self._costs(kind, placed).decode_ms(tokens / 2) * QUICK_TOKENS_PER_S <= 1000

    def _is_paid_empty(self, kind: str, placed: Placed | None) -> bool:
        return placed is not None and placed.cost <= self.limits[kind]

    def _cost_limits(self) -> dict[str, float]:
        """By type. Without a GPU a larger context takes nothing from the speed near empty: each has its own."""
        share = self._share or 1e-9
        costs = {kind: each.cost for kind, each in self.fast.items()}
        least = min(costs.values(), default=0)
        return {kind: (least if self._resources.devices else cost) / share for kind, cost in costs.items()}

    def _objection_half_full(self, kind: str, tokens: int, placed: Placed) -> str:
        """Attention in host memory beside a GPU has to stay readable, too."""
        costs = self._costs(kind, placed)
        if placed.placement.cpu_layers and costs.decode_ms(tokens / 2) * READABLE_TOKENS_PER_S > 1000:
            return f"decode less than {READABLE_TOKENS_PER_S:g} tok/s {HALF_FULL}, with attention on the CPU"
        is_paid = self._keeps_half_full(kind, tokens, placed, self._share)
        return "" if is_paid else f"keep less than {self._share:.0%} of the best speed {HALF_FULL}"

    def _keeps_half_full(self, kind: str, tokens: int, placed: Placed, share: float) -> bool:
        fastest = min(job_ms(ideal, tokens / 2) for ideal in self.ideal)
        return job_ms(self._costs(kind, placed), tokens / 2) * share <= fastest

    def bound(self, chosen: Candidate) -> str:
        """What kept it from being larger, as `_objection`."""
        more = chosen.context + CONTEXT_STEP
        if chosen.context >= self._request.tokens:
            return ""
        placed = self(chosen.kv_type, more)
        if placed and self._is_too_long(chosen.kv_type, more, placed):
            return TOO_LONG
        if placed and chosen.placed.placement.is_whole and not placed.placement.is_whole:
            return "leave the GPUs"
        if placed and not self._attends_on_gpus(chosen.kv_type, more) and not chosen.placed.placement.cpu_layers:
            return "take attention off the GPUs"
        return self._objection(chosen.kv_type, more)

    def half_full(self, found: Candidate) -> float:
        depth = found.context / 2
        return 1000 / self._costs(found.kv_type, found.placed).decode_ms(depth)

    def full(self, found: Candidate) -> float:
        return 1000 / self._costs(found.kv_type, found.placed).decode_ms(found.context)

    def _attends_on_gpus(self, kind: str, tokens: int) -> bool:
        placed = self(kind, tokens)
        return placed is not None and not (placed.placement.cpu_layers or not placed.placement.shares)

    def of(self, tokens: int) -> Iterator[Candidate]:
        """Each type of the cache with that context."""
        yield from (found for kind in self._request.kinds if (found := self.candidate(kind, tokens)))

    def grown(self, found: Candidate) -> Candidate:
        """The largest context of its type that is as fast near empty, and that the aim pays for."""

        def is_free(tokens: int) -> bool:
            placed = self(found.kv_type, tokens)
            is_as_fast = placed is not None and placed.cost * CHANCE <= found.placed.cost
            return is_as_fast and self._is_paid(found.kv_type, tokens)

        tokens = min(self._most(is_free), self._request.tokens)
        return (self.candidate(found.kv_type, tokens) if tokens > found.context else None) or found

    def is_better(self, new: Candidate, old: Candidate) -> bool:
        """Exactness wins ties: a type is given up for a rounder one that carries 1.5 times as much, or a tenth more and
        is not slower with as much, or is faster with as much: by a tenth (a twentieth, and carries more), or by a
        quarter half full. More of the same type has to be 1.5 times as much; below what clients work with, where it
        reaches what agents work with, and where context is the aim, any more will do."""
        if new.kv_type not in (*TRUSTED, old.kv_type) and old.context >= enough_of(self._request):
            return False
        least = min(self._request.tokens, SMALLEST_CONTEXT)
        if new.context > old.context:
            is_much_more = new.context >= CONTEXT_WORTH * old.context or old.context < least or not self._share
            is_much_more = is_much_more or self._request.is_below_floor(old.context, new.context)
            if is_much_more or new.kv_type == old.kv_type:
                return is_much_more
            if new.context >= MORE_THAN_A_SLIVER * old.context:
                return self._is_as_fast_there(new.kv_type, old)
        if new.context < old.context or new.kv_type == old.kv_type:
            return False
        return self._is_clearly_faster(new, old)

    def _is_clearly_faster(self, new: Candidate, old: Candidate) -> bool:
        """Near empty, or half full and near empty as fast."""
        exact_for = AS_FAST if new.context == old.context else AS_FAST_WITH_LESS
        if new.placed.cost < max(exact_for, self._share) * old.placed.cost:
            return True
        depth = old.context / 2
        if new.placed.cost * CHANCE > old.placed.cost:
            return False
        half_full = self._job_ms(old.kv_type, old.placed, depth)
        return self._job_ms(new.kv_type, new.placed, depth) <= AS_FAST_HALF_FULL * half_full

    def _is_as_fast_there(self, kind: str, old: Candidate) -> bool:
        """With the context of the other, near empty, and half full but for what exactness may cost."""
        placed = self(kind, old.context)
        if placed is None or placed.cost * CHANCE > old.placed.cost:
            return False
        depth = old.context / 2
        return self._job_ms(kind, placed, depth) * AS_FAST <= self._job_ms(old.kv_type, old.placed, depth)

    def next_tokens(self, chosen: Candidate) -> int:
        tokens = min(padded(int(CONTEXT_WORTH * chosen.context)), self._request.tokens)
        return tokens if tokens > chosen.context and self._resources.devices else 0

    def faster(self, chosen: Candidate) -> Candidate | None:
        """A small context, where that is so by more than a word is worth."""
        small = self.fast.get(chosen.kv_type)
        if small is None or chosen.placed.cost * NOTICED <= small.cost:
            return None
        return Candidate(kv_type=chosen.kv_type, context=min(self._request.tokens, SMALL_CONTEXT), placed=small)

    def candidate(self, kind: str, tokens: int) -> Candidate | None:
        placed = self(kind, tokens)
        if placed is None:
            return None
        found = Candidate(kv_type=kind, context=tokens, placed=placed)
        return replace(found, half_full=self.half_full(found))

    def _job_ms(self, kind: str, placed: Placed, depth: float) -> float:
        return job_ms(self._costs(kind, placed), max(DEPTH, depth))

    def _costs(self, kind: str, placed: Placed) -> Costs:
        job, is_pinned = replace(self._job, kv_type=kind), self._resources.is_pinned
        return placement_costs(job, self._resources, placed.placement, is_pinned=is_pinned)

    def _without_host_cache(self, kind: str, placed: Placed) -> Costs:
        """What a larger context is measured by half full: attention in host memory counts as a loss beside a GPU."""
        costs = self._costs(kind, placed)
        return replace(costs, cpu_depth_us=0.0) if placed.placement.shares else costs

    def _most(self, holds: Callable[[int], bool]) -> int:
        """The largest multiple of the step, at most the request padded, for which it holds; 0 for none."""
        low, high = 0, padded(self._request.tokens) // CONTEXT_STEP
        if holds(high * CONTEXT_STEP):
            return high * CONTEXT_STEP
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle * CONTEXT_STEP) else (low, middle)
        return low * CONTEXT_STEP
