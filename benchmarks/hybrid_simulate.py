"""Replays a recorded trace through the caches that the engine uses, and adds up the time that the model predicts.

It calls `LayerCache.decide`, `observe` and `landed`, `Cost` and `split_batch`, as the engine does, and nothing behind
them. Copies land within their layer-token, since its predicted time contains them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import fsum

from appliance.moe.cache import LayerCache, Takeover, layer_caches
from appliance.moe.cost import Cost
from appliance.moe.split import BatchCost, split_batch
from appliance.moe.trace import Trace, Turn

Step = tuple[int, int, int, int]  # top_k, hits used, fetched, uploaded for later


@dataclass(kw_only=True)
class Result:
    """Modelled, of decoded tokens. Counts are of experts, over all layers."""

    tokens: int = 0
    ms: float = 0.0
    takeovers: list[Takeover] = field(default_factory=list)
    steps: Counter[Step] = field(default_factory=Counter)  # layer-tokens
    prompt_ms: float = 0.0  # of the prompts' MoE parts, as batches; not in `ms`

    @property
    def layer_tokens(self) -> int:
        return self.steps.total()

    @property
    def hits(self) -> int:
        return sum(count * hits for (_, hits, _, _), count in self.steps.items())

    @property
    def misses(self) -> int:
        return sum(count * (k - hits) for (k, hits, _, _), count in self.steps.items())

    @property
    def fetched(self) -> int:
        return sum(count * fetched for (_, _, fetched, _), count in self.steps.items())

    @property
    def uploads(self) -> int:
        """For later tokens, in the background."""
        return sum(count * uploads for (_, _, _, uploads), count in self.steps.items())

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
    found = replay_part(trace, slots, believed_cost or true_cost, range(len(trace.top_k)), caches=caches)
    return timed(trace, true_cost, [found])


def replay_part(
    trace: Trace,
    slots: int,
    believed_cost: Cost,
    layers: Collection[int],
    *,
    caches: tuple[LayerCache, ...] | None = None,
) -> Result:
    """The steps of some layers, by place among those that have experts, without their time: what one of several
    processes can do. What is learned and who takes over is of all layers, so the others are replayed as well: without
    slots, which takes a third of the time, unless they are guarded."""
    result = Result(tokens=trace.decoded)
    if caches is None:
        caches = layer_caches(
            [believed_cost] * len(trace.top_k),
            slots=slots,
            experts=trace.experts,
            top_k=list(trace.top_k.values()),
            on_takeover=result.takeovers.append,
            needed=layers,
        )
    for turn in trace.turns:
        _warm(trace, turn, caches, layers, BatchCost(cost=believed_cost, cpu_token_ms=0.0), result)
        _decode(trace, turn, caches, layers, result)
    return result


def timed(trace: Trace, true_cost: Cost, parts: Sequence[Result]) -> Result:
    """All layers' steps and their time. The same in whatever parts they were replayed."""
    result = Result(tokens=trace.decoded, takeovers=parts[0].takeovers)
    for part in parts:
        result.steps += part.steps
        result.prompt_ms += part.prompt_ms
    spent = [
        count * (true_cost.layer_ms(hits, k - hits, fetched, uploads) + true_cost.rates.other_ms)
        for (k, hits, fetched, uploads), count in result.steps.items()
    ]
    result.ms = fsum([*spent, trace.dense_layers * result.tokens * true_cost.rates.other_ms])
    return result


def _warm(
    trace: Trace, turn: Turn, caches: tuple[LayerCache, ...], layers: Collection[int], cost: BatchCost, result: Result
) -> None:
    for number, (layer, cache) in enumerate(zip(trace.top_k, caches, strict=True)):
        prompt = trace.tokens(turn, is_prompt=True, layer=layer)
        counts = Counter(expert for used in prompt for expert in used)
        residents = cache.residents
        if counts and number in layers:
            is_resident = [expert in residents for expert in counts]
            result.prompt_ms += split_batch(cost, list(counts.values()), is_resident).ms
        for used in prompt:
            _step(cache, used, is_prompt=True)


def _step(cache: LayerCache, used: tuple[int, ...], *, is_prompt: bool = False) -> Step:
    decision = cache.decide(used, is_prompt=is_prompt)
    uploads = decision.uploads
    for upload in uploads:
        cache.landed(upload)
    cache.observe()
    fetched = len(decision.fetch)
    return len(used), len(decision.gpu), fetched, len(uploads) - fetched


def _decode(trace: Trace, turn: Turn, caches: tuple[LayerCache, ...], layers: Collection[int], result: Result) -> None:
    """Token by token, layer by layer."""
    rows = zip(*(trace.each_token(turn, is_prompt=False, layer=layer) for layer in trace.top_k), strict=True)
    kept: list[Counter[Step]] = [result.steps if number in layers else Counter() for number in range(len(caches))]
    for token in rows:
        for cache, used, steps in zip(caches, token, kept, strict=True):
            steps[_step(cache, used)] += 1
