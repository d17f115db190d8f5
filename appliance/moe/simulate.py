"""Replays a recorded trace through the caches that the engine uses, and adds up the time that the model predicts.

It calls `LayerCache.decide`, `observe` and `landed`, `Cost` and `split_batch`, as the engine does, and nothing behind
them. Copies land within their layer-token, since its predicted time contains them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from appliance.moe.cache import LayerCache, Takeover, layer_caches
from appliance.moe.cost import Cost
from appliance.moe.split import BatchCost, split_batch
from appliance.moe.trace import Trace, Turn


@dataclass(kw_only=True)
class Result:
    """Modelled, of decoded tokens. Counts are of experts, over all layers."""

    tokens: int = 0
    layer_tokens: int = 0
    ms: float = 0.0
    hits: int = 0
    misses: int = 0
    fetched: int = 0
    uploads: int = 0  # for later tokens, in the background
    takeovers: list[Takeover] = field(default_factory=list)
    steps: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # (top_k, hits, copied): layer-tokens
    prompt_ms: float = 0.0  # of the prompts' MoE parts, as batches; not in `ms`

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.tokens / self.ms

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)


def replay(
    trace: Trace,
    true_cost: Cost,
    slots: int,
    *,
    believed_cost: Cost | None = None,
    caches: tuple[LayerCache, ...] | None = None,
) -> Result:
    """What `slots` in each layer make of the trace; prompts warm them, decoded tokens count.

    Decisions go by `believed_cost`, time by `true_cost`. The caches are those of `layer_caches`, or given ones. Raises
    SlotsTooFewError.
    """
    result = Result()
    believed = believed_cost or true_cost
    if caches is None:
        caches = layer_caches(
            [believed] * len(trace.top_k),
            slots=slots,
            experts=trace.experts,
            top_k=list(trace.top_k.values()),
            on_takeover=result.takeovers.append,
        )
    for turn in trace.turns:
        _warm(trace, turn, caches, BatchCost(cost=believed, cpu_token_ms=0.0), result)
        _decode(trace, turn, caches, true_cost, result)
    result.ms += trace.dense_layers * result.tokens * true_cost.rates.other_ms
    return result


def _warm(trace: Trace, turn: Turn, caches: tuple[LayerCache, ...], cost: BatchCost, result: Result) -> None:
    for layer, cache in zip(trace.top_k, caches, strict=True):
        prompt = trace.tokens(turn, is_prompt=True, layer=layer)
        counts = Counter(expert for used in prompt for expert in used)
        residents = cache.residents
        if counts:
            is_resident = [expert in residents for expert in counts]
            result.prompt_ms += split_batch(cost, list(counts.values()), is_resident).ms
        for used in prompt:
            _step(cache, used)


def _step(cache: LayerCache, used: tuple[int, ...]) -> tuple[int, int, int]:
    """(hits used, fetched, uploaded for later)"""
    decision = cache.decide(used)
    for upload in decision.uploads:
        cache.landed(upload)
    cache.observe()
    fetched = len(decision.fetch)
    return len(decision.gpu), fetched, len(decision.uploads) - fetched


def _decode(trace: Trace, turn: Turn, caches: tuple[LayerCache, ...], true_cost: Cost, result: Result) -> None:
    """Token by token, layer by layer."""
    rows = [
        (cache, k, iter(trace.tokens(turn, is_prompt=False, layer=layer)))
        for (layer, k), cache in zip(trace.top_k.items(), caches, strict=True)
    ]
    tokens = len(turn.decode[next(iter(trace.top_k))]) // next(iter(trace.top_k.values()))
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for _ in range(tokens):
        for cache, k, tokens_of_layer in rows:
            seen[k, *_step(cache, next(tokens_of_layer))] += 1
    for (k, hits, fetched, uploads), count in seen.items():
        ms = true_cost.layer_ms(hits, k - hits, fetched, uploads) + true_cost.rates.other_ms
        result.ms += count * ms
        result.hits += count * hits
        result.misses += count * (k - hits)
        result.fetched += count * fetched
        result.uploads += count * uploads
        result.layer_tokens += count
        result.steps[k, hits, fetched + uploads] += count
    result.tokens += tokens
