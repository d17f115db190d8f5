"""What no policy can beat: the most hits, and the least time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from appliance.moe.cost import Cost
from appliance.moe.trace import Trace

_NEVER = 1 << 60


def fewest_misses(tokens: Sequence[tuple[bool, Sequence[int]]], slots: int, *, is_prompt_free: bool = True) -> int:
    """M*: of one layer's tokens in order, (is counted, its experts), the fewest misses in those that count.

    Belady's rule with bypass: after each token keep, of what lies in a slot and what the token just used, the `slots`
    experts that are used again soonest, where only counted uses matter. One just used may thus be evicted at once,
    or not be let in. Optimal for policies that copy an expert when a token uses it (demand loading): exchanging a kept
    expert for one that is used sooner never adds a miss (Belady 1966; Mattson et al. 1970 with bypass). Tokens that do
    not count, the prompt, load for free: going by their uses would give up hits that count. Without `is_prompt_free`
    slots are kept for them all the same: more misses, and no bound for policies that do not.
    """
    next_use: dict[int, int] = {}
    upcoming: list[list[int]] = []
    for at in range(len(tokens) - 1, -1, -1):
        is_counted, used = tokens[at]
        upcoming.append([next_use.get(expert, _NEVER) for expert in used])
        if is_counted or not is_prompt_free:
            next_use.update(dict.fromkeys(used, at))
    kept: dict[int, int] = {}
    misses = 0
    for (is_counted, used), uses in zip(tokens, reversed(upcoming), strict=True):
        if is_counted:
            misses += sum(expert not in kept for expert in used)
        kept.update(zip(used, uses, strict=True))
        if len(kept) > slots:
            ranked = sorted(kept.items(), key=lambda pair: (pair[1], pair[0]))
            kept = dict(ranked[:slots])
    return misses


def fewest_misses_by_layer(trace: Trace, slots: int, *, is_prompt_free: bool = True) -> dict[int, int]:
    """M* of each layer; slots carry over from turn to turn."""
    return {
        layer: fewest_misses(list(_layer_tokens(trace, layer)), slots, is_prompt_free=is_prompt_free)
        for layer in trace.top_k
    }


def _layer_tokens(trace: Trace, layer: int) -> Iterable[tuple[bool, Sequence[int]]]:
    for turn in trace.turns:
        for is_prompt in (True, False):
            for used in trace.tokens(turn, is_prompt=is_prompt, layer=layer):
                yield not is_prompt, used


def envelope(values: Sequence[float], at: float) -> float:
    """The lower convex envelope of the points (0, values[0]), (1, values[1]) … at `at`, 0 ≤ at ≤ len(values) − 1."""
    hull: list[tuple[int, float]] = []
    for x, y in enumerate(values):
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    for (left, low), (right, high) in itertools.pairwise(hull):
        if left <= at <= right:
            return low + (high - low) * (at - left) / (right - left)
    if len(hull) == 1 and at == 0:
        return hull[0][1]
    message = f"outside of 0 to {len(values) - 1}: {at}"
    raise ValueError(message)


def _is_above(before: tuple[int, float], middle: tuple[int, float], after: tuple[int, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    across = (after[1] - before[1]) * (middle[0] - before[0])
    return (middle[1] - before[1]) * (after[0] - before[0]) >= across


def least_ms(cost: Cost, top_k: int, layer_tokens: int, misses: int) -> float:
    """A lower bound on the time of `layer_tokens` tokens of layers, by whatever policy: N·(t_a + env(M*/N)).

    Claim. Let b(m) = min over f, and over residents left unused, of T(k − m, m, f, 0), env its lower convex envelope,
    N the number of layer-tokens and M* the fewest misses that a policy can have in them altogether. Then the sum of T
    is at least N·env(M*/N).

    Proof. (1) Whatever a policy does in layer-token i, with m_i of its experts not resident: T does not fall when
    uploads u are added, for u stands in T only as (m + u)·s/D and (f + u)·s/P; so T_i ≥ b(m_i). (2) b does not fall
    with m: of a split with m misses, either one expert is fetched, and were it resident, T would lose a copy and
    gain nothing; or none is, and one more resident may be left unused at the same T. So b(m − 1) ≤ b(m). (3) Nor does
    env: were env(y) < env(0) for some y, max(env, env(0)) would be convex, lie below b, since b(y) ≥ b(0) ≥ env(0),
    and above env at y, which is the largest such function; and a convex function that never falls below its value at 0
    never falls. (4) Jensen:
    Σ b(m_i) ≥ Σ env(m_i) ≥ N·env(Σ m_i / N). (5) Σ m_i ≥ M* by definition, and by (3) N·env(Σ m_i / N) ≥ N·env(M*/N).

    It holds for policies that copy an expert in a token that uses it. One that foresees uses and copies ahead of them,
    or a placement loaded from other text before the first token, may miss less than M*. It is no estimate: env takes
    misses as if they could be spread evenly, and copies for free.
    """
    if not layer_tokens:
        return 0.0
    best = [cost.best_ms(top_k, top_k - missing) for missing in range(top_k + 1)]
    return layer_tokens * (cost.rates.other_ms + envelope(best, misses / layer_tokens))


def trace_least_ms(trace: Trace, cost: Cost, misses: Mapping[int, int]) -> float:
    """The bound for all decoded tokens of a trace, a sum over layers; dense ones take t_a.

    By layers it is never below, and mostly above, N·env(M*/N) of all of them together: env is convex.
    """
    total = trace.dense_layers * trace.decoded * cost.rates.other_ms
    return total + sum(least_ms(cost, k, trace.decoded, misses[layer]) for layer, k in trace.top_k.items())


def pooled_least_ms(trace: Trace, cost: Cost, misses: Mapping[int, int]) -> float:
    """The same with one N and M* for all layers of a top-k: N·env(M*/N)."""
    by_top_k: dict[int, list[int]] = {}
    for layer, k in trace.top_k.items():
        by_top_k.setdefault(k, []).append(misses[layer])
    total = trace.dense_layers * trace.decoded * cost.rates.other_ms
    return total + sum(least_ms(cost, k, trace.decoded * len(each), sum(each)) for k, each in by_top_k.items())
