"""Fixed rules for experts on CPU and GPU: what others do, to compare with. Caches only; time is `Cost`'s.

Each gives, for one layer, (hits, experts copied into slots) of every token; where a rule says what is fetched and what
waits, as two of them do, `splits` has it. Free slots always fill. Copies land at once; every rule but those two gets
the best split of each token that its cache allows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from appliance.moe.cost import Cost
from appliance.moe.trace import Trace

Tokens = Sequence[tuple[bool, tuple[int, ...]]]  # of one layer: is it decoded, its experts by falling router weight
Step = tuple[int, int]
MRS_ALPHA = 0.5  # HybriMoE's release
GATE_TOKENS = 16


def lru(tokens: Tokens, slots: int, most: int) -> Iterator[Step]:
    """Least recently used goes, at most `most` copies a token."""
    kept: dict[int, None] = {}
    for _, used in tokens:
        misses = [expert for expert in used if expert not in kept]
        free = slots - len(kept)
        copied = misses[: max(most, free)]
        _evict(kept, used, len(copied) - free)
        _touch(kept, used, copied)
        yield len(used) - len(misses), len(copied)


def gated(tokens: Tokens, slots: int, uses: int, most: int) -> Iterator[Step]:
    """LRU that admits what was used `uses` times in the last 16 tokens."""
    kept: dict[int, None] = {}
    recent: deque[tuple[int, ...]] = deque(maxlen=GATE_TOKENS)
    counts: Counter[int] = Counter()
    for _, used in tokens:
        if len(recent) == GATE_TOKENS:
            counts.subtract(recent[0])
        recent.append(used)
        counts.update(used)
        misses = [expert for expert in used if expert not in kept]
        free = slots - len(kept)
        passed = [expert for expert in misses[free:] if counts[expert] >= uses][: max(0, most - min(free, len(misses)))]
        copied = misses[:free] + passed
        _evict(kept, used, len(copied) - free)
        _touch(kept, used, copied)
        yield len(used) - len(misses), len(copied)


def mrs(tokens: Tokens, slots: int) -> Iterator[Step]:
    """HybriMoE's eviction: the least running score goes. Uses stand for router scores, of which a trace has the top."""
    kept: set[int] = set()
    score: dict[int, float] = {}
    for _, used in tokens:
        for expert in score:
            score[expert] *= 1 - MRS_ALPHA
        for expert in used:
            score[expert] = score.get(expert, 0.0) + MRS_ALPHA
        misses = [expert for expert in used if expert not in kept]
        for expert in misses:
            if len(kept) == slots:
                kept.discard(min((e for e in kept if e not in used), key=lambda e: (score[e], e)))
            kept.add(expert)
        yield len(used) - len(misses), len(misses)


def static(tokens: Tokens, slots: int) -> Iterator[Step]:
    """The most used of the other half of the decoded tokens and of the prompt stay; nothing is copied."""
    decoded = [used for is_decoded, used in tokens if is_decoded]
    prompt = [used for is_decoded, used in tokens if not is_decoded]
    middle = len(decoded) // 2
    yield from ((0, 0) for _ in prompt)
    for judged, learned in ((decoded[:middle], decoded[middle:]), (decoded[middle:], decoded[:middle])):
        counts = Counter(expert for used in (*prompt, *learned) for expert in used)
        kept = {expert for expert, _ in counts.most_common(slots)}
        yield from ((sum(expert in kept for expert in used), 0) for used in judged)


def q_star(tokens: Tokens, slots: int, fetched: Callable[[int, int], int]) -> Iterator[Step]:
    """FreeToken: a fixed share of the misses is fetched into LRU slots, the CPU does the rest, no uploads."""
    kept: dict[int, None] = {}
    for _, used in tokens:
        misses = [expert for expert in used if expert not in kept]
        copied = misses[: fetched(len(used), len(misses))]
        _evict(kept, used, len(copied) - (slots - len(kept)))
        _touch(kept, used, copied)
        yield len(used) - len(misses), len(copied)


def fetched_by_ratio(cost: Cost) -> Callable[[int, int], int]:
    """q* = P / (P + C) of the misses, rounded to where both sides finish soonest ("min-wait")."""
    rates = cost.rates

    def fetched(_: int, misses: int) -> int:
        share = misses * rates.pcie_gb_s / (rates.pcie_gb_s + rates.cpu_gb_s)
        near = {int(share), min(misses, int(share) + 1)}
        return min(near, key=lambda f: (max(f / rates.pcie_gb_s, (misses - f) / rates.cpu_gb_s), f))

    return fetched


def _evict(kept: dict[int, None], used: Sequence[int], count: int) -> None:
    for _ in range(count):
        del kept[next(expert for expert in kept if expert not in used)]


def _touch(kept: dict[int, None], used: Sequence[int], copied: Sequence[int]) -> None:
    for expert in reversed(used):  # the one with the least router weight is the first to go
        if expert in kept or expert in copied:
            kept.pop(expert, None)
            kept[expert] = None


FIXED: dict[str, Callable[[Tokens, int], Iterator[Step]]] = {
    "all-CPU": lambda tokens, _: ((0, 0) for _ in tokens),
    "LRU insert-all": lambda tokens, slots: lru(tokens, slots, 1 << 30),
    "LRU cap 2": lambda tokens, slots: lru(tokens, slots, 2),
    "LRU cap 1": lambda tokens, slots: lru(tokens, slots, 1),
    "gate 2 of 16, cap 1": lambda tokens, slots: gated(tokens, slots, 2, 1),
    "gate 3 of 16": lambda tokens, slots: gated(tokens, slots, 3, 1 << 30),
    "MRS": mrs,
    "static frequency": static,
}
OFFLOAD = "pure offload"
RATIO = "FreeToken q*"
NAMES = (*FIXED, OFFLOAD, RATIO)


def layer_tokens(trace: Trace) -> list[Tokens]:
    return [
        [
            (not is_prompt, used)
            for turn in trace.turns
            for is_prompt in (True, False)
            for used in trace.tokens(turn, is_prompt=is_prompt, layer=layer)
        ]
        for layer in trace.top_k
    ]


def counted(layers: Sequence[Tokens], run: Callable[[Tokens], Iterator[Step]]) -> Counter[tuple[int, int, int]]:
    """(top_k, hits, copied) of decoded tokens over all layers."""
    found: Counter[tuple[int, int, int]] = Counter()
    for tokens in layers:
        for (is_decoded, used), (hits, copied) in zip(tokens, run(tokens), strict=True):
            if is_decoded:
                found[len(used), hits, copied] += 1
    return found


def seconds(trace: Trace, steps: Counter[tuple[int, int, int]], cost: Cost, *, always_fetches: bool = False) -> float:
    """Time of all decoded tokens, of dense layers too; `always_fetches`: what is copied is fetched now."""
    other = (trace.dense_layers * trace.decoded + sum(steps.values())) * cost.rates.other_ms
    total = other
    for (k, hits, copied), count in steps.items():
        ms = cost.layer_ms(hits, k - hits, copied, 0) if always_fetches else cost.splits(k, hits)[copied].ms
        total += count * ms
    return total / 1000
