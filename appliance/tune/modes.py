"""Which of the measured plans serves: speed, balanced or context, and which context a mode wants measured beside them.
Pure.

Plans are compared at the same depth and by the same job, never one plan at two depths.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from appliance.plan import CONTEXT_STEP, SMALLEST_WINDOW, SPEED_KEPT
from appliance.tune.curve import NOISE as NOISE_OF_A_LOOK
from appliance.tune.curve import Curve, Figure
from appliance.tune.workload import Mix, cost_s, scaled_mix
from appliance.values import dataclass

Mode = Literal["speed", "balanced", "context"]
READABLE_TOKENS_PER_S = 15.0  # context: about what one reads along with
NOISE = 0.03  # two plans nearer than this are as fast as each other
ROOM = 64  # tokens that are still to be decoded when a window is called full


@dataclass(frozen=True, kw_only=True)
class Rated:
    """A plan and its curve: `key` is the caller's. Of two that are as fast, the one with more `merit` is taken.

    `noise` is the relative deviation of its times. Plans are compared by the time that is a deviation longer: of many
    short looks the fastest is the luckiest.
    """

    key: str
    window: int
    curve: Curve
    merit: int = 0
    noise: float = 0.0

    def cautious(self, time: float) -> float:
        return time * (1 + self.noise)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """`at` is the depth that the figure is quoted for, `why` one sentence."""

    rated: Rated
    at: int
    speed: Figure
    why: str


def choose(mode: Mode, rated: Sequence[Rated], mix: Mix, *, native: int) -> Chosen:
    """`rated` holds at least one plan. The mix is scaled to the smallest window compared, so that all do the same."""
    usable, floor = _usable(rated, native), _least(native)
    below = "" if usable[0].window >= floor else f"; memory forbids a context of {floor:,}"
    job = scaled_mix(mix, min(plan.window for plan in usable))
    compared = usable if mode == "context" else at_same_depths(usable)
    chosen = {"speed": _fastest, "balanced": _balanced, "context": _deepest}[mode](compared, job)
    whole = usable[compared.index(chosen.rated)]
    speed = whole.curve.decode(chosen.at)
    return Chosen(rated=whole, at=chosen.at, speed=speed, why=chosen.why + below)


def _least(native: int) -> int:
    return min(native, SMALLEST_WINDOW)


def _usable(rated: Sequence[Rated], native: int) -> list[Rated]:
    """Those with a window that clients work with; where memory holds none, those with the largest."""
    largest = max(plan.window for plan in rated)
    return [plan for plan in rated if plan.window >= min(largest, _least(native))]


def _fastest(usable: Sequence[Rated], job: Mix) -> Chosen:
    """The shortest job; of those within the noise of it the largest window, then the most merit, then the shortest."""
    costs = [(plan.cautious(cost_s(plan.curve, job)), plan) for plan in usable]
    shortest = min(cost for cost, _ in costs)
    _, plan = max(
        ((cost, plan) for cost, plan in costs if cost <= shortest * (1 + NOISE)),
        key=lambda pair: (pair[1].window, pair[1].merit, -pair[0]),
    )
    return Chosen(
        rated=plan,
        at=job.depth,
        speed=plan.curve.decode(job.depth),
        why=f"{cost_s(plan.curve, job):.1f} s for a {job.name} job",
    )


def _balanced(usable: Sequence[Rated], job: Mix) -> Chosen:
    best = best_ms(usable, job.depth)
    kept = [plan for plan in usable if _kept(plan, best, job.depth) >= SPEED_KEPT]
    largest = max(plan.window for plan in kept)
    plan = _fastest([plan for plan in kept if plan.window == largest], job).rated
    speed = plan.curve.decode(job.depth)
    share = _kept(plan, best, job.depth)
    kept_in_words = f"keeps {SPEED_KEPT:.0%} of the best speed at {job.depth:,} tokens"
    why = f"the largest context that {kept_in_words}: it keeps {share:.0%}"
    return Chosen(rated=plan, at=job.depth, speed=speed, why=why)


def at_same_depths(plans: Sequence[Rated]) -> list[Rated]:
    """With no point that lies deeper than all were looked at: where a workload goes on beyond, one that was followed to
    its knee would lose against one that was not."""
    common = min(plan.curve.deepest for plan in plans)
    return [replace(plan, curve=plan.curve.up_to(common)) for plan in plans]


def _kept(plan: Rated, fastest_ms: float, depth: float) -> float:
    """Of the speed of the fastest at this depth, as a share."""
    return fastest_ms / plan.cautious(plan.curve.decode_ms(depth))


def best_ms(rated: Sequence[Rated], depth: float) -> float:
    """A token of the fastest at this depth."""
    return min(plan.cautious(plan.curve.decode_ms(depth)) for plan in rated)


def is_readable(curve: Curve, window: int, *, spare: float = 0.0) -> bool:
    """Whether a full window is read along with, and that with so much to spare, as a share."""
    return 1000 / curve.decode_ms(window - ROOM) >= READABLE_TOKENS_PER_S * (1 + spare)


def looked_at_deepest(plans: Sequence[Rated]) -> list[Rated]:
    """Of each window: what a full one costs nobody tells from a curve that ends long before, where another goes on."""
    deepest: dict[int, int] = {}
    for plan in plans:
        deepest[plan.window] = max(plan.curve.deepest, deepest.get(plan.window, 0))
    return [plan for plan in plans if plan.curve.deepest == deepest[plan.window]]


def _deepest(usable: Sequence[Rated], job: Mix) -> Chosen:
    full = [(plan.curve.decode(plan.window - ROOM), plan) for plan in looked_at_deepest(usable)]
    readable = [(speed, plan) for speed, plan in full if is_readable(plan.curve, plan.window)]
    speed, plan = max(readable or full, key=lambda pair: (pair[1].window, -pair[0].ms))
    why = f"the largest context that decodes {READABLE_TOKENS_PER_S:g} tok/s when full: {speed.in_words()}"
    if not readable:
        why = f"no context decodes {READABLE_TOKENS_PER_S:g} tok/s when full; the largest that fits: {speed.in_words()}"
    return Chosen(rated=plan, at=plan.window - ROOM, speed=speed, why=why)


def wanted_window(
    mode: Mode,
    windows: Collection[int],
    rated: Sequence[Rated],
    mix: Mix,
    *,
    native: int,
    failed: Collection[int] = (),
) -> int | None:
    """Which window to measure next, so that the mode finds the largest that meets its condition; None where it knows.

    `windows` are those that there are plans for, `failed` those whose engine failed: as good as too slow. For `context`
    it may lie between them: as much of one that is too slow when full as is likely to be read along with.
    """
    if mode == "speed":
        return None
    if mode == "context":
        deepest = looked_at_deepest(rated)
        held = [(plan.window, is_readable(plan.curve, plan.window)) for plan in deepest]
        window = next_window(windows, [*held, *((size, False) for size in failed)])
        return _part_of_a_window(windows, deepest, least=_least(native), failed=failed) if window is None else window
    compared = at_same_depths(rated)
    depth = scaled_mix(mix, min(plan.window for plan in _usable(rated, native))).depth
    best = best_ms(compared, depth)
    held = [(plan.window, _kept(plan, best, depth) >= SPEED_KEPT) for plan in compared]
    return next_window(windows, [*held, *((size, False) for size in failed)])


def _part_of_a_window(
    windows: Collection[int], deepest: Sequence[Rated], *, least: int, failed: Collection[int]
) -> int | None:
    """Of the smallest that is too slow when full. None where less of it than of a readable one would be left, and for
    one that is such a part itself."""
    most = max((plan.window for plan in deepest if is_readable(plan.curve, plan.window)), default=0)
    slow = min((plan for plan in deepest if plan.window > most), key=slowness_when_full, default=None)
    if slow is None or slow.window not in windows:
        return None
    size = readable_window(slow.curve, slow.window, least=max(least, most + 1))
    return None if size in failed else size


def slowness_when_full(plan: Rated) -> tuple[int, float]:
    """The smallest window first, and of one window the fastest plan."""
    return plan.window, plan.curve.decode_ms(plan.window - ROOM)


def readable_window(curve: Curve, window: int, *, least: int) -> int | None:
    """The largest smaller window that is read along with when it is full, with room for the noise of the look that is
    to confirm it."""
    sizes = range((window - 1) // CONTEXT_STEP * CONTEXT_STEP, least - 1, -CONTEXT_STEP)
    return next((size for size in sizes if is_readable(curve, size, spare=NOISE_OF_A_LOOK)), None)


def next_window(windows: Collection[int], held: Sequence[tuple[int, bool]]) -> int | None:
    """Which window to measure next for `balanced` or `context`: bisection over `windows`, given those that were
    measured and whether they met the mode's condition: of several plans with one window it is enough that one did. None
    when the largest that does is known."""
    low = max((window for window, is_met in held if is_met), default=0)
    high = min((window for window, is_met in held if not is_met and window > low), default=max(windows) + 1)
    between = sorted(window for window in windows if low < window < high)
    return between[len(between) // 2] if between else None
