"""Context length and KV cache type, and the placement that follows: one decision. Pure.

A longer context costs speed, because layers or experts leave the GPU for it. For each KV cache type there are two
candidates: the knee, which is the largest context with everything on the GPUs, and the largest context that the mode
(`Aim`) accepts. A candidate is judged by the time of a job near empty, and half full if it is larger than 32,768
tokens, against the fastest placement of any type.
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
"""Share of the fastest plan's speed that a larger context has to keep."""

GOOD_CONTEXT = 32768  # up to here a context is judged near empty only, and no smaller type is checked for more
SMALL_CONTEXT = 4096  # context at which placements' speeds are compared
AS_FAST = 0.9  # share of the speed that a plan with a more exact cache has to keep
AS_FAST_WITH_LESS = 0.95  # the same if its context is smaller too
AS_FAST_HALF_FULL = 0.8  # the same for the time of a job at half of the context
MORE_THAN_A_SLIVER = 1.1  # a less exact type has to carry this many times the context
HOST_KV_MIB = 4096.0  # most KV cache in host memory with a GPU: each token reads it from there
NOTICED = 0.97  # a smaller loss of speed is not mentioned
HALF_FULL = "half full"  # part of a bound: that rule holds above GOOD_CONTEXT only
TOO_LONG = "take longer to read in full"  # bound: longer than `ContextRequest.fill_s`
NO_FIT, AS_WHOLE = "not fit", "go beyond whole layers"  # other bounds, see `ContextPlan.bound`
CHANCE = 0.995  # smaller differences come from the rounding to whole layers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    kv_type: str
    context: int
    placed: Placed
    half_full: float = 0.0  # tokens/s of decode with half of the context in the cache


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    kv_type: str
    context: int
    placed: Placed
    carried: Mapping[str, int]  # largest context that the mode accepts, by KV cache type
    knees: Mapping[str, int] = field(default_factory=dict)  # largest context with all on GPUs, by type; 0: none
    ubatch: int = UBATCH
    bound: str = ""  # the limit of the context, in words that follow "more would"; "": native length, or --ctx-size
    half_full: float = 0.0  # tokens/s of decode with half of the context in the cache
    next_tokens: int = 0  # the next context that is large enough to be worth a price; 0: none, or --ctx-size is set
    larger: Candidate | None = None  # `next_tokens` of context; None: it does not fit
    others: Mapping[str, Candidate] = field(default_factory=dict)  # the same context in each other type
    before: Candidate | None = None  # a faster candidate with a smaller context, which shows the price of this one
    limits: Mapping[str, float] = field(default_factory=dict)  # longest accepted job near empty, as `Placed.cost`
    ideal: tuple[Costs, ...] = ()  # costs that speeds half full are compared with
    usual: Candidate | None = None  # candidate with the default ubatch; None: that ubatch is the one taken
    usual_knees: Mapping[str, int] = field(default_factory=dict)  # `knees` with the default ubatch's smaller buffer
    is_explicit: bool = False  # True if --ctx-size is set
    full: float = 0.0  # tokens/s of decode with the whole context in the cache
    fill_s: float = 0.0  # seconds to read a prompt that fills the context
    unhurried: ContextPlan | None = None  # the decision without --fill-minutes; None unless `bound` is TOO_LONG
    minds_full: bool = False  # True if the mode asks for a readable speed when the context is full
    reads_along: bool = False  # True if it asks for that, and a usable context has it


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    tokens: int
    is_explicit: bool  # True if --ctx-size is set: a smaller context is not accepted
    kinds: tuple[str, ...]  # KV cache types that may be used, the most exact first
    aim: Aim = "balanced"
    fill_s: float = 0.0  # seconds that reading a full context may take; 0: no limit

    @property
    def usable(self) -> int:
        """Smallest context length that clients work with: more important than speed and the cache's type in all modes.

        The native length if that is shorter.
        """
        return min(self.tokens, SMALLEST_CONTEXT)

    @property
    def floor(self) -> int:
        """Context length that is more important than speed as long as decode is quick; 0 if there is none."""
        return 0 if self.is_explicit or self.aim != "balanced" else min(self.tokens, AGENT_CONTEXT)

    def is_below_floor(self, tokens: int, beside: int) -> bool:
        """True if a context is short of the floor by more than a sliver, and the one beside it is not."""
        return MORE_THAN_A_SLIVER * tokens < self.floor <= beside


def choose_context(
    job: PlacementJob, resources: Resources, request: ContextRequest, like: ContextPlan | None = None
) -> ContextPlan | None:
    """Return the decision; None if not even the smallest context fits, or the one that was asked for does not.

    `like` is the decision with another ubatch: its limits of speed hold here too.
    """
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
    """Return the context of `like` with another ubatch; None if `wins` is False for it.

    If --ctx-size is not set, the context grows as far as that costs no speed.
    """
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
    """Yield the candidates: knees first, and the most exact type first, because a later one has to be better."""
    of_kinds = [(kind, tokens) for of_all in (at.knees, at.carried) for kind, tokens in of_all.items() if tokens]
    for kind, tokens in dict.fromkeys(of_kinds):
        if placed := at(kind, tokens):
            yield Candidate(kv_type=kind, context=min(tokens, request.tokens), placed=placed)


def _best(found: list[Candidate], at: _Asked) -> tuple[Candidate | None, Candidate | None]:
    """Return the best candidate, and a faster one that it replaced; None for each that does not exist."""
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
    """Return the context length that is enough: no quality check of a KV cache type is worth more tokens."""
    return request.tokens if request.is_explicit or request.aim == "context" else min(request.tokens, GOOD_CONTEXT)


class _Asked:
    """Placements of one model by KV cache type and context, each searched once, and comparisons between them."""

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
        """Largest context with everything on GPUs, by type; 0 if the weights alone do not fit there."""
        return {kind: self._knee(kind) for kind in self._request.kinds} if self._resources.devices else {}

    @cached_property
    def carried(self) -> dict[str, int]:
        """Largest context that the mode accepts, by type.

        Mode `balanced` gives up a little more speed for the native length, if no type reaches it otherwise. Only the
        type with the longest context gets that, whether it is exact or not.
        """
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
        """Return the largest context that the mode accepts with this type; 0 if none.

        For mixture-of-experts models attention stays on the GPUs, if that leaves a usable context.
        """
        if kind not in self.fast:
            return 0
        least = self._request.usable
        if self._has_experts and self._resources.devices and self._share:
            tokens = self._most(lambda tokens: self._is_paid(kind, tokens) and self._attends_on_gpus(kind, tokens))
            if tokens >= least:
                return tokens
        return self._most(lambda tokens: self._is_paid(kind, tokens))

    def _is_native_paid(self, kind: str) -> bool:
        """Return True if `balanced` accepts the native length at the lower share of speed (`speed_kept`).

        Attention has to be on the GPUs, and the share has to hold near empty and half full.
        """
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
        """Return True if some type decodes at a readable speed with a usable context that is full.

        If none does, that speed is not asked for, and the largest context is taken.
        """
        least = self._request.usable
        return any(self._is_readable(kind, least, placed) for kind in self.fast if (placed := self(kind, least)))

    def _is_readable(self, kind: str, tokens: int, placed: Placed) -> bool:
        return self._costs(kind, placed).decode_ms(tokens) * READABLE_TOKENS_PER_S <= 1000

    def _is_paid(self, kind: str, tokens: int) -> bool:
        """Return True if the mode accepts this context: near empty, and half full above GOOD_CONTEXT.

        Up to the smallest context that clients work with, every context that fits is accepted.
        """
        return not self._objection(kind, tokens)

    def _objection(self, kind: str, tokens: int) -> str:
        """Return why the mode does not accept this context, in words that follow "more would"; "" if it does."""
        placed = self(kind, tokens)
        if placed is None:
            return NO_FIT
        if tokens <= self._request.usable:
            return ""
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
        """Return True if reading the full context takes longer than `fill_s`.

        False up to the smallest context that clients work with. False if everything is on GPUs too: memory that a
        shorter context would free has no other use there.
        """
        limit_s = 0.0 if self._request.is_explicit or placed.placement.is_whole else self._request.fill_s
        return 0 < limit_s < self.fill_s(kind, tokens, placed) and tokens > self._request.usable

    def fill_s(self, kind: str, tokens: int, placed: Placed) -> float:
        return self._costs(kind, placed).prefill_ms(tokens, tokens / 2) / 1000

    def _is_quick(self, kind: str, tokens: int, placed: Placed) -> bool:
        """Return True if decode reaches QUICK_TOKENS_PER_S with half of the context in the cache."""
        return self._costs(kind, placed).decode_ms(tokens / 2) * QUICK_TOKENS_PER_S <= 1000

    def _is_paid_empty(self, kind: str, placed: Placed | None) -> bool:
        return placed is not None and placed.cost <= self.limits[kind]

    def _cost_limits(self) -> dict[str, float]:
        """Return the longest accepted job near empty for each type, as `Placed.cost`.

        With a GPU the fastest type sets the limit of all. Without one, each type has its own: there a larger context
        does not change the speed near empty.
        """
        share = self._share or 1e-9
        costs = {kind: each.cost for kind, each in self.fast.items()}
        least = min(costs.values(), default=0)
        return {kind: (least if self._resources.devices else cost) / share for kind, cost in costs.items()}

    def _objection_half_full(self, kind: str, tokens: int, placed: Placed) -> str:
        """Return why the context is too slow half full, as `_objection` does.

        If attention runs on the CPU beside a GPU, decode has to reach READABLE_TOKENS_PER_S too.
        """
        costs = self._costs(kind, placed)
        if placed.placement.cpu_layers and costs.decode_ms(tokens / 2) * READABLE_TOKENS_PER_S > 1000:
            return f"decode less than {READABLE_TOKENS_PER_S:g} tok/s {HALF_FULL}, with attention on the CPU"
        is_paid = self._keeps_half_full(kind, tokens, placed, self._share)
        return "" if is_paid else f"keep less than {self._share:.0%} of the best speed {HALF_FULL}"

    def _keeps_half_full(self, kind: str, tokens: int, placed: Placed, share: float) -> bool:
        fastest = min(job_ms(ideal, tokens / 2) for ideal in self.ideal)
        return job_ms(self._costs(kind, placed), tokens / 2) * share <= fastest

    def bound(self, chosen: Candidate) -> str:
        """Return what kept the context from being larger, in words that follow "more would"; "" if nothing did."""
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
        """Yield a candidate with that context for each KV cache type with which it fits."""
        yield from (found for kind in self._request.kinds if (found := self.candidate(kind, tokens)))

    def grown(self, found: Candidate) -> Candidate:
        """Return the largest context of the same type that is as fast near empty and that the mode accepts."""

        def is_free(tokens: int) -> bool:
            placed = self(found.kv_type, tokens)
            is_as_fast = placed is not None and placed.cost * CHANCE <= found.placed.cost
            return is_as_fast and self._is_paid(found.kv_type, tokens)

        tokens = min(self._most(is_free), self._request.tokens)
        return (self.candidate(found.kv_type, tokens) if tokens > found.context else None) or found

    def is_better(self, new: Candidate, old: Candidate) -> bool:
        """Return True if `new` is better than `old`, which comes earlier in `_candidates`.

        A context that is 1.5 times as long wins. Any longer context wins if the old one is below what clients work
        with, if only the new one reaches what agents work with, or in mode `context`.

        Another type also wins if it carries a tenth more and is no slower at the old context. It wins with as much
        context if it is faster: by a tenth near empty (a twentieth if it carries more), or by a quarter half full. A
        type below q8_0 does not replace another type whose context is long enough (`enough_of`).
        """
        if new.kv_type not in (*TRUSTED, old.kv_type) and old.context >= enough_of(self._request):
            return False
        least = self._request.usable
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
        """Return True if `new` is clearly faster near empty, or as fast near empty and clearly faster half full."""
        exact_for = AS_FAST if new.context == old.context else AS_FAST_WITH_LESS
        if new.placed.cost < max(exact_for, self._share) * old.placed.cost:
            return True
        depth = old.context / 2
        if new.placed.cost * CHANCE > old.placed.cost:
            return False
        half_full = self._job_ms(old.kv_type, old.placed, depth)
        return self._job_ms(new.kv_type, new.placed, depth) <= AS_FAST_HALF_FULL * half_full

    def _is_as_fast_there(self, kind: str, old: Candidate) -> bool:
        """Return True if `kind` is no slower than `old` at old's context.

        Half full it may be slower by a tenth (AS_FAST).
        """
        placed = self(kind, old.context)
        if placed is None or placed.cost * CHANCE > old.placed.cost:
            return False
        depth = old.context / 2
        return self._job_ms(kind, placed, depth) * AS_FAST <= self._job_ms(old.kv_type, old.placed, depth)

    def next_tokens(self, chosen: Candidate) -> int:
        tokens = min(padded(int(CONTEXT_WORTH * chosen.context)), self._request.tokens)
        return tokens if tokens > chosen.context and self._resources.devices else 0

    def faster(self, chosen: Candidate) -> Candidate | None:
        """Return a small context of the same type, if it is faster by more than NOTICED; else None."""
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
        """Return the costs that speeds half full are compared with.

        With a GPU they leave out attention in host memory, so that attention there counts as a loss.
        """
        costs = self._costs(kind, placed)
        return replace(costs, cpu_depth_us=0.0) if placed.placement.shares else costs

    def _most(self, holds: Callable[[int], bool]) -> int:
        """Return the largest multiple of CONTEXT_STEP up to the request for which `holds` is True; 0 if none."""
        low, high = 0, padded(self._request.tokens) // CONTEXT_STEP
        if holds(high * CONTEXT_STEP):
            return high * CONTEXT_STEP
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle * CONTEXT_STEP) else (low, middle)
        return low * CONTEXT_STEP
