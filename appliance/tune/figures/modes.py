"""Choice between measured plans by mode (speed, balanced, context), and the context length to measure next. Pure.

Plans are always compared at the same depths and by the same job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from appliance.plan import (
    AGENT_CONTEXT,
    CONTEXT_STEP,
    CONTEXT_WORTH,
    QUICK_TOKENS_PER_S,
    READABLE_TOKENS_PER_S,
    SMALLEST_CONTEXT,
    speed_kept,
)
from appliance.tune.figures.curve import NOISE as NOISE_OF_A_LOOK
from appliance.tune.figures.curve import Curve, Figure
from appliance.tune.figures.workload import Mix, cost_s, scaled_mix
from appliance.values import dataclass

Mode = Literal["speed", "balanced", "context"]
NOISE = 0.03  # plans whose times differ by less than this share are equally fast
NOTICED = 0.1  # share of the speed that a somewhat larger context may cost
ROOM = 64  # tokens left to decode when a context counts as full


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A plan with its curve. `key` is the caller's. Between equally fast plans the higher `tie_break` wins.

    `noise` is the relative standard deviation of its times. Plans are compared by a time one deviation longer: of many
    short measurements the fastest was probably lucky.
    """

    key: str
    context: int
    curve: Curve
    tie_break: int = 0
    noise: float = 0.0

    def cautious(self, time: float) -> float:
        return time * (1 + self.noise)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The chosen plan. `at` is the depth that `speed` is quoted for; `why` is the reason in one sentence."""

    scored: Scored
    at: int
    speed: Figure
    why: str


def choose(mode: Mode, scored: Sequence[Scored], mix: Mix, *, native: int) -> Chosen:
    """Return the best plan for the mode. `scored` has at least one plan. The mix is scaled to the smallest context, so
    that all plans do the same job."""
    usable, floor = _usable(scored, native), _least(native)
    below = "" if usable[0].context >= floor else f"; memory forbids a context of {floor:,}"
    job = scaled_mix(mix, min(plan.context for plan in usable))
    compared = usable if mode == "context" else at_same_depths(usable)
    choosers: dict[Mode, Callable[[Sequence[Scored], Mix], Chosen]] = {
        "speed": _fastest,
        "balanced": partial(_balanced, native=native),
        "context": _deepest,
    }
    chosen = choosers[mode](compared, job)
    whole = usable[compared.index(chosen.scored)]
    speed = whole.curve.decode(chosen.at)
    return Chosen(scored=whole, at=chosen.at, speed=speed, why=chosen.why + below)


def _least(native: int) -> int:
    return min(native, SMALLEST_CONTEXT)


def _usable(scored: Sequence[Scored], native: int) -> list[Scored]:
    """Return the plans with a context of at least SMALLEST_CONTEXT or the native one; if memory allows none, those with
    the largest context."""
    largest = max(plan.context for plan in scored)
    return [plan for plan in scored if plan.context >= min(largest, _least(native))]


def _fastest(usable: Sequence[Scored], job: Mix) -> Chosen:
    """Return the plan with the shortest job. Within the noise of it, the largest context wins, then the higher tie
    break, then the shorter job."""
    costs = [(plan.cautious(cost_s(plan.curve, job)), plan) for plan in usable]
    shortest = min(cost for cost, _ in costs)
    _, plan = max(
        ((cost, plan) for cost, plan in costs if cost <= shortest * (1 + NOISE)),
        key=lambda pair: (pair[1].context, pair[1].tie_break, -pair[0]),
    )
    return Chosen(
        scored=plan,
        at=job.depth,
        speed=plan.curve.decode(job.depth),
        why=f"{cost_s(plan.curve, job):.1f} s for a {job.name} job",
    )


def _balanced(usable: Sequence[Scored], job: Mix, *, native: int) -> Chosen:
    """Return the plan with the largest context that keeps enough speed, by the planners' rule `speed_kept` applied to
    measured job times.

    The planners' condition for a half-full context is not checked: few plans are measured so deep, and plans are only
    compared at depths at which all were measured.
    """
    best = _best_s(usable, job)
    kept = [plan for plan in usable if _is_kept(plan, best, job, native)]
    largest = _worth_its_price(kept, best, job, least=_before_speed(kept, native))
    plan = _fastest([plan for plan in kept if plan.context == largest], job).scored
    speed = plan.curve.decode(job.depth)
    share = _kept(plan, best, job)
    kept_in_words = f"keeps {speed_kept(largest, native):.0%} of the best speed in a {job.name} job"
    more = max(kept, key=lambda plan: (plan.context, _kept(plan, best, job)))
    price = 1 - _kept(more, best, job) / share
    beyond = f", {more.context:,} would cost {price:.0%} of that" if more.context > largest else ""
    why = f"the largest context that {kept_in_words}: it keeps {share:.0%}{beyond}"
    return Chosen(scored=plan, at=job.depth, speed=speed, why=why)


def _before_speed(plans: Sequence[Scored], native: int) -> int:
    """Return the context length that agents work with if one of the plans has it and is quick, else 0."""
    wanted = min(native, AGENT_CONTEXT)
    return wanted if any(plan.context == wanted and _is_quick(plan, native) for plan in plans) else 0


def _is_quick(plan: Scored, native: int) -> bool:
    """True if the plan's context comes before speed: agents work with it, and half full it decodes quickly."""
    quick_ms = 1000 / QUICK_TOKENS_PER_S
    return plan.context <= min(native, AGENT_CONTEXT) and plan.curve.decode_ms(plan.context / 2) <= quick_ms


def _worth_its_price(kept: Sequence[Scored], best_s: float, job: Mix, *, least: int) -> int:
    """Return the largest context that is worth its speed, at least `least`.

    It must not cost more than NOTICED of the speed of a context that is less than CONTEXT_WORTH times smaller.
    """
    fastest: dict[int, float] = {}
    for plan in kept:
        fastest[plan.context] = max(_kept(plan, best_s, job), fastest.get(plan.context, 0.0))
    largest = max(fastest)
    while cheaper := [
        context
        for context, share in fastest.items()
        if least <= context < largest < CONTEXT_WORTH * context and fastest[largest] < (1 - NOTICED) * share
    ]:
        largest = max(cheaper)
    return largest


def at_same_depths(plans: Sequence[Scored]) -> list[Scored]:
    """Return the plans without points deeper than all plans have. Otherwise a plan measured to the bend of its curve
    would lose against one that was extrapolated without seeing its bend."""
    common = min(plan.curve.deepest for plan in plans)
    return [replace(plan, curve=plan.curve.up_to(common)) for plan in plans]


def _kept(plan: Scored, best_s: float, job: Mix) -> float:
    """Return the plan's speed relative to the fastest plan in this job, 0 to 1."""
    return best_s / plan.cautious(cost_s(plan.curve, job))


def _is_kept(plan: Scored, best_s: float, job: Mix, native: int) -> bool:
    return _is_quick(plan, native) or _kept(plan, best_s, job) >= speed_kept(plan.context, native)


def _best_s(scored: Sequence[Scored], job: Mix) -> float:
    """Return the job time of the fastest plan, s."""
    return min(plan.cautious(cost_s(plan.curve, job)) for plan in scored)


def is_readable(curve: Curve, context: int, *, spare: float = 0.0) -> bool:
    """True if decoding with a full context is at least READABLE_TOKENS_PER_S, by a margin of `spare` (a share)."""
    return 1000 / curve.decode_ms(context - ROOM) >= READABLE_TOKENS_PER_S * (1 + spare)


def measured_deepest(plans: Sequence[Scored]) -> list[Scored]:
    """Return for each context length the plans measured deepest. The speed of a full context cannot be told from a
    curve that ends long before if another one reaches further."""
    deepest: dict[int, int] = {}
    for plan in plans:
        deepest[plan.context] = max(plan.curve.deepest, deepest.get(plan.context, 0))
    return [plan for plan in plans if plan.curve.deepest == deepest[plan.context]]


def _deepest(usable: Sequence[Scored], job: Mix) -> Chosen:
    full = [(plan.curve.decode(plan.context - ROOM), plan) for plan in measured_deepest(usable)]
    readable = [(speed, plan) for speed, plan in full if is_readable(plan.curve, plan.context)]
    speed, plan = max(readable or full, key=lambda pair: (pair[1].context, -pair[0].ms))
    why = f"the largest context that decodes {READABLE_TOKENS_PER_S:g} tok/s when full: {speed.describe()}"
    if not readable:
        why = f"no context decodes {READABLE_TOKENS_PER_S:g} tok/s when full; the largest that fits: {speed.describe()}"
    return Chosen(scored=plan, at=plan.context - ROOM, speed=speed, why=why)


def wanted_context(
    mode: Mode,
    contexts: Collection[int],
    scored: Sequence[Scored],
    mix: Mix,
    *,
    native: int,
    failed: Collection[int] = (),
) -> int | None:
    """Return the context length to measure next, to find the largest that meets the mode's condition; None if it is
    known.

    `contexts` are those of the plans. `failed` are those on which the engine failed; they count as too slow. For the
    mode `context` the result may be another length: the part of a context that is too slow when full, but probably fast
    enough up to there.
    """
    if mode == "speed":
        return None
    if mode == "context":
        deepest = measured_deepest(scored)
        held = [(plan.context, is_readable(plan.curve, plan.context)) for plan in deepest]
        context = next_context(contexts, [*held, *((size, False) for size in failed)])
        return (
            _part_of_a_context(contexts, deepest, least=_least(native), failed=failed) if context is None else context
        )
    compared = at_same_depths(scored)
    job = scaled_mix(mix, min(plan.context for plan in _usable(scored, native)))
    best = _best_s(compared, job)
    held = [(plan.context, _is_kept(plan, best, job, native)) for plan in compared]
    return next_context(contexts, [*held, *((size, False) for size in failed)])


def _part_of_a_context(
    contexts: Collection[int], deepest: Sequence[Scored], *, least: int, failed: Collection[int]
) -> int | None:
    """Return a part of the smallest context that is too slow when full. None if it would be no larger than a context
    that is fast enough, or if that context is itself such a part."""
    most = max((plan.context for plan in deepest if is_readable(plan.curve, plan.context)), default=0)
    slow = min((plan for plan in deepest if plan.context > most), key=slowness_when_full, default=None)
    if slow is None or slow.context not in contexts:
        return None
    size = readable_context(slow.curve, slow.context, least=max(least, most + 1))
    return None if size in failed else size


def slowness_when_full(plan: Scored) -> tuple[int, float]:
    """Return a sort key: the smallest context first, within a context the fastest plan."""
    return plan.context, plan.curve.decode_ms(plan.context - ROOM)


def readable_context(curve: Curve, context: int, *, least: int) -> int | None:
    """Return the largest smaller context that is fast enough when full, or None. A margin covers the noise of the
    measurement that is to confirm it."""
    sizes = range((context - 1) // CONTEXT_STEP * CONTEXT_STEP, least - 1, -CONTEXT_STEP)
    return next((size for size in sizes if is_readable(curve, size, spare=NOISE_OF_A_LOOK)), None)


def next_context(contexts: Collection[int], held: Sequence[tuple[int, bool]]) -> int | None:
    """Return the context to measure next for `balanced` or `context`, by bisection over `contexts`. None if the largest
    one that meets the mode's condition is known.

    `held` are measured contexts, each with True if it met the condition; one plan that met it suffices.
    """
    low = max((context for context, is_met in held if is_met), default=0)
    high = min((context for context, is_met in held if not is_met and context > low), default=max(contexts) + 1)
    between = sorted(context for context in contexts if low < context < high)
    return between[len(between) // 2] if between else None
