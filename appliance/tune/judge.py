"""What a plan that nobody measured is likely to do, by the curve of the measured one that it is most like. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.tune.curve import Curve, Point
from appliance.tune.guided import Search, State, Trial
from appliance.tune.measurement import Judged
from appliance.tune.modes import Mode
from appliance.tune.refit import Fit
from appliance.tune.terms import Candidate

DEVIATIONS = 2.0  # of the logarithm, on either side: what the interval holds


def judge(
    search: Search, trials: Sequence[Trial], curves: Mapping[str, Curve], window: int, mode: Mode
) -> Judged | None:
    """The best prediction with this window of those that are likely to fit, after what failed of memory; None where
    there is none. `curves` are the measured ones, by key, at least one.

    Most like is the measured plan against which the least is unknown. Where no prediction can tell the two apart, its
    figures stand as they are.
    """
    state = State(search, trials)
    likely = [each for each in search.candidates if each.window == window and state.is_likely(each)]
    if not likely:
        return None
    new = min(likely, key=lambda each: state.estimate(each).ms)
    job = search.job(new.key)
    by = min(curves, key=lambda key: state.fit.spread(job, search.job(key)))
    old, curve = search.candidate(by), curves[by]
    points = tuple(_as_slow(search, state.fit, new, old, point) for point in curve.ordered)
    return Judged(key=new.key, mode=mode, by=by, points=points, spread=_spread(search, state.fit, new, old, curve))


def _as_slow(search: Search, fit: Fit, new: Candidate, old: Candidate, point: Point) -> Point:
    """The point of the old one, as much slower or faster as the new one is predicted to be there."""
    decode = search.decode_ms(new, fit, point.depth) / search.decode_ms(old, fit, point.depth)
    first = point.depth - point.prefill_tokens
    was = search.read_ms(old, fit, first, point.depth)
    read = search.read_ms(new, fit, first, point.depth) / was if was else 1.0
    return replace(point, decode_ms=point.decode_ms * decode, prefill_ms=point.prefill_ms * read)


def _spread(search: Search, fit: Fit, new: Candidate, old: Candidate, curve: Curve) -> float:
    """By which factor a figure may be off: what is unknown of the difference, and what no model of so few parameters
    tells. 1.0 where the two are the same to every prediction."""
    if search.twins(new.key) == search.twins(old.key):
        return 1.0
    depths = [point.depth for point in curve.points]
    unknown = max(fit.spread(search.decoding(new, at), search.decoding(old, at)) for at in depths)
    return math.exp(DEVIATIONS * math.hypot(unknown, fit.misfit))
