"""Fixed rules for experts on CPU and GPU: what others do, to compare with. Caches only; time is `Cost`'s.

Each gives, for one layer, (hits, experts copied into slots) of every token; where a rule says what is fetched and what
waits, as two of them do, `splits` has it. Free slots always fill. Copies land at once; every rule but those two gets
the best split of each token that its cache allows. llama.cpp's own cache spans all layers and has a time of its own.

All but the oracle know the past alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

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
    """Keeps the experts most used so far, in the prompt and in earlier turns, and copies nothing while decoding. They
    are chosen anew after each prompt and loaded for free."""
    counts: Counter[int] = Counter()
    kept: set[int] | None = None
    for is_decoded, used in tokens:
        if not is_decoded:
            kept = None
        elif kept is None:
            kept = {expert for expert, _ in counts.most_common(slots)}
        yield sum(expert in kept for expert in used) if kept else 0, 0
        counts.update(used)


def oracle_static(tokens: Tokens, slots: int) -> Iterator[Step]:
    """The most used of the other half of the decoded tokens and of the prompt stay; nothing is copied. The first half
    sees the future: no rule to be compared with."""
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


def shared_lru(trace: Trace, slots: int) -> Counter[tuple[int, int]]:
    """Return (top_k, misses) of decoded layer-tokens under llama.cpp's `--moe-cache-mib`: one LRU over the slots of all
    layers, which have the same layout here, and every miss is copied.

    A prompt passes layer by layer, as a batch does. llama.cpp leaves the cache as it is for batches of more than 32
    tokens; here each prompt warms it, as it does for every other rule.
    """
    room = slots * len(trace.top_k)
    kept: dict[tuple[int, int], None] = {}
    steps: Counter[tuple[int, int]] = Counter()

    def misses(layer: int, used: Sequence[int]) -> int:
        missed = 0
        for key in ((layer, expert) for expert in reversed(used)):
            if key in kept:
                del kept[key]
            else:
                missed += 1
            kept[key] = None
        while len(kept) > room:
            del kept[next(iter(kept))]
        return missed

    for turn in trace.turns:
        for layer in trace.top_k:
            for used in trace.each_token(turn, is_prompt=True, layer=layer):
                misses(layer, used)
        for row in zip(*(trace.each_token(turn, is_prompt=False, layer=layer) for layer in trace.top_k), strict=True):
            for layer, used in zip(trace.top_k, row, strict=True):
                steps[len(used), misses(layer, used)] += 1
    return steps


def shared_lru_seconds(trace: Trace, steps: Counter[tuple[int, int]], cost: Cost) -> float:
    """Return the time of all decoded tokens: hits, copies and the wait for the ids follow one another on one stream.

    A missed expert's own kernel is left out, in the rule's favour. The wait is taken as `cpu_fixed_ms`.
    """
    rates = cost.rates
    total = (trace.dense_layers * trace.decoded + sum(steps.values())) * rates.other_ms
    for (k, missed), count in steps.items():
        hits_ms = rates.gpu_fixed_ms + (k - missed) * rates.gpu_expert_ms
        total += count * (hits_ms + missed * cost.expert_mb / rates.pcie_gb_s + rates.cpu_fixed_ms)
    return total / 1000


def _evict(kept: dict[int, None], used: Sequence[int], count: int) -> None:
    for _ in range(count):
        del kept[next(expert for expert in kept if expert not in used)]


def _touch(kept: dict[int, None], used: Sequence[int], copied: Sequence[int]) -> None:
    for expert in reversed(used):  # the one with the least router weight is the first to go
        if expert in kept or expert in copied:
            kept.pop(expert, None)
            kept[expert] = None


class Rule(Protocol):
    def __call__(self, tokens: Tokens, slots: int) -> Iterator[Step]: ...


FIXED: dict[str, Rule] = {
    "all-CPU": lambda tokens, slots: ((0, 0) for _ in tokens),
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
SHARED_LRU = "llama.cpp cache"
NAMES = (*FIXED, OFFLOAD, RATIO, SHARED_LRU)
ORACLE = "oracle static frequency"  # in no claim


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
