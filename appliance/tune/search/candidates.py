"""Conversion of plans and measurements for the search, and the depths at which plans are measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.engines.engine import Space
from appliance.plan import Plan
from appliance.tune.figures.load_times import Compilations, compiles_nothing
from appliance.tune.figures.measurement import Measurement
from appliance.tune.search.cost_terms import Candidate, Need
from appliance.tune.search.search import OutOfMemory, Trial

EMPTY = 32  # decoding needs some prompt; a prompt of this length is close enough to an empty context
SHARE_FOR_WORK = 0.05  # of the budget, for filling a context to the workload's depth, where every plan is measured
# If weights are copied for each batch of a prompt, a larger batch uses more experts: 1.6 times as many as 32 tokens
# with 8 of 256 used (DeepSeek-V3), 1.1 times with 8 of 128.
BATCH_AGAINST_EMPTY = 2.0
SHARE_FOR_DEPTH = 0.05  # of the budget, for filling further to the deepest point, for the first plan and the last few


def candidates(space: Space, plans: Sequence[Plan], compilations: Compilations = compiles_nothing) -> list[Candidate]:
    """Return one candidate for each plan, in the same order and with the same keys."""
    return [
        Candidate(
            key=plan.key,
            knobs=plan.knobs,
            context=plan.context,
            work=space.costs(plan),
            needs=needs(space, plan),
            compilation=compilations(plan),
        )
        for plan in plans
    ]


def needs(space: Space, plan: Plan) -> tuple[Need, ...]:
    return tuple(Need(device=device, need_mib=need, room_mib=room) for device, need, room in space.needs(plan))


def trial_of(measurement: Measurement) -> Trial:
    """Return a measurement in the form that the search uses."""
    lacking = None
    if measurement.lacking_device is not None:
        lacking = OutOfMemory(device=measurement.lacking_device, missing_mib=measurement.lacking_mib)
    return Trial(
        key=measurement.key,
        points=measurement.points,
        is_long=measurement.is_long,
        load_s=measurement.load_s,
        lacking=lacking,
    )


def empty_depth(context: int, tokens_each: int) -> int:
    return min(EMPTY, max(1, _room(context, tokens_each) // 4))


def work_depth(
    context: int, tokens_each: int, *, wanted: int, prefill_ms: float, seconds: float, copied_batch: int = 0
) -> int | None:
    """Return the depth at which plans are compared: the workload's, or what can be prefilled within `seconds`. None if
    that is hardly deeper than the empty depth: on so slow a machine one point has to suffice.

    `prefill_ms` is the time per token at the empty depth. `copied_batch` is as for `reading_s`.
    """
    first = empty_depth(context, tokens_each)
    carried = _carried(prefill_ms, seconds)
    if carried >= first:  # the first few tokens of a batch cost most of the copies, the rest almost nothing
        carried = max(carried, copied_batch)
    depth = min(wanted, _room(context, tokens_each) // 2, first + carried)
    return depth if depth >= 2 * first else None


def reading_s(tokens: int, prefill_ms: float, *, first: int, copied_batch: int) -> float:
    """Return the seconds that prefill of so many tokens may take, if each of the `first` tokens took `prefill_ms`.

    `copied_batch` is the number of tokens for which weights in host memory are copied once, even for a part of a batch;
    0 if no weights are copied.
    """
    each_s = tokens * prefill_ms / 1000
    if not copied_batch:
        return each_s
    return min(each_s, -(-tokens // copied_batch) * BATCH_AGAINST_EMPTY * first * prefill_ms / 1000)


def deep_depth(context: int, tokens_each: int, *, prefill_ms: float, seconds: float, work: int) -> int | None:
    """Return the deepest depth that can be prefilled within `seconds` beyond `work`; None if it is below 1.5 times
    `work`."""
    depth = min(_room(context, tokens_each), work + _carried(prefill_ms, seconds))
    return depth if depth >= work * 1.5 else None


def within(depths: Sequence[int], context: int, tokens_each: int) -> tuple[int, ...]:
    """Return the depths that fit into a plan's context."""
    return tuple(depth for depth in depths if depth <= _room(context, tokens_each))


def _room(context: int, tokens_each: int) -> int:
    return context - tokens_each - 1


def _carried(prefill_ms: float, seconds: float) -> int:
    return max(0, int(seconds * 1000 / prefill_ms))
