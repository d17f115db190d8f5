"""Plans and what was measured of them as the search sees both, and at which depths they are measured: pure."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.engines.engine import Space
from appliance.plan import Plan
from appliance.tune.figures.load_times import Compilations, compiles_nothing
from appliance.tune.figures.measurement import Measurement
from appliance.tune.search.cost_terms import Candidate, Need
from appliance.tune.search.search import OutOfMemory, Trial

EMPTY = 32  # a prompt of nothing cannot be decoded from; this is close enough to an empty context
SHARE_FOR_WORK = 0.05  # of the budget, for filling a context to the workload's depth, where every plan is measured
# Where weights are copied for each batch of a prompt, more tokens of one use more of the experts: 1.6 times as many as
# 32 tokens with 8 of 256 used (DeepSeek-V3), 1.1 times with 8 of 128.
BATCH_AGAINST_EMPTY = 2.0
SHARE_FOR_DEPTH = 0.05  # and from there on to the deepest, where the first plan and the last few are measured


def candidates(space: Space, plans: Sequence[Plan], compilations: Compilations = compiles_nothing) -> list[Candidate]:
    """In the order of the plans, whose keys are theirs."""
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
    """As the search sees it."""
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
    """The workload's, or what `seconds` can prefill at `prefill_ms` a token, which is of the empty depth; None when
    that is no deeper than empty: on a machine that slow one point has to do. `copied_batch` as for `reading_s`."""
    first = empty_depth(context, tokens_each)
    carried = _carried(prefill_ms, seconds)
    if carried >= first:  # the first few tokens more take most of the copies, and the rest of a batch next to none
        carried = max(carried, copied_batch)
    depth = min(wanted, _room(context, tokens_each) // 2, first + carried)
    return depth if depth >= 2 * first else None


def reading_s(tokens: int, prefill_ms: float, *, first: int, copied_batch: int) -> float:
    """What so many tokens may take, where each of the `first` ones took `prefill_ms`. `copied_batch`: weights in host
    memory are copied once for so many tokens, few or all of them; 0: none are."""
    each_s = tokens * prefill_ms / 1000
    if not copied_batch:
        return each_s
    return min(each_s, -(-tokens // copied_batch) * BATCH_AGAINST_EMPTY * first * prefill_ms / 1000)


def deep_depth(context: int, tokens_each: int, *, prefill_ms: float, seconds: float, work: int) -> int | None:
    """The deepest that `seconds` can prefill beyond the workload's; None below half again as deep."""
    depth = min(_room(context, tokens_each), work + _carried(prefill_ms, seconds))
    return depth if depth >= work * 1.5 else None


def within(depths: Sequence[int], context: int, tokens_each: int) -> tuple[int, ...]:
    """Those that a plan with a smaller context has room for."""
    return tuple(depth for depth in depths if depth <= _room(context, tokens_each))


def _room(context: int, tokens_each: int) -> int:
    return context - tokens_each - 1


def _carried(prefill_ms: float, seconds: float) -> int:
    return max(0, int(seconds * 1000 / prefill_ms))
