"""What a user may change if a plan costs much, each with its price in one line: an FP8 checkpoint, a smaller type of
the cache. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.inputs import Facts, total_mib
from appliance.engines.vllm.planning.model.chips import Chip, chip_of
from appliance.engines.vllm.planning.model.quantization import Quantization
from appliance.engines.vllm.planning.model.shape import Shape
from appliance.engines.vllm.planning.options import choose
from appliance.engines.vllm.planning.speed import costs_of, speed_of
from appliance.errors import ModelDoesNotFitError
from appliance.plan.parts.choice import Choice
from appliance.probe import Gpu

WORTH_NAMING = 1.2  # times the context


def alternatives(found: Estimate) -> Iterator[Choice]:
    """Return alternatives to a plan with less context than the model's native length, each with its price."""
    facts = found.facts
    if found.context >= facts.wanted or not facts.cards or facts.settings.nodes > 1 or facts.settings.ctx_size:
        return
    yield from _fp8(found)
    yield from _smaller_cache(found)


def _fp8(found: Estimate) -> Iterator[Choice]:
    """Where weights have 16 bits: on one card, the largest."""
    facts = found.facts
    card = max(facts.cards, key=lambda each: total_mib(each, facts.hardware))
    if facts.shape.quantization.name is not None or facts.pins.tensor or facts.pins.pipeline:
        return
    shape = _in_fp8(facts.shape)
    smaller = _chosen(
        replace(facts, shape=shape, cards=(card,), chip=_chip(card, shape), ignores_peaks=True, seqs=None)
    )
    if smaller is None or smaller.context < WORTH_NAMING * found.context:
        return
    name = card.name or "unnamed"
    size = f"about {shape.stored_bytes / 1e9:,.0f} GB, not {facts.shape.weights_bytes(facts.dtype) / 1e9:,.0f}"
    where = f"alone on GPU {card.index} ({name}) it" if len(found.option.cards) > 1 else "it"
    why = f"{size}: {where} {_would_hold(smaller)}, this {_rate(found)}"
    yield Choice(name="smaller_checkpoint", value="FP8", reason=why, source="memory")


def _smaller_cache(found: Estimate) -> Iterator[Choice]:
    """The type with the longest context, of those that are measured without being asked for."""
    facts = found.facts
    others = (Estimate(facts=facts, option=replace(found.option, kv_type=kind)) for kind in facts.kv_types)
    best = max((each for each in others if each.fits), key=lambda each: each.context, default=found)
    if best.context < WORTH_NAMING * found.context:
        return
    why = f"--kv-type {best.option.kv_type} {_would_hold(best)}, this {_rate(found)}; it rounds more"
    yield Choice(name="smaller_cache", value=best.option.kv_type, reason=why, source="memory")


def _chosen(facts: Facts) -> Estimate | None:
    try:
        return choose(facts)
    except ModelDoesNotFitError:
        return None


def _chip(card: Gpu, shape: Shape) -> Chip:
    return chip_of((card.sm or "").rstrip("af"), is_mla="mla" in shape.kinds)


def _in_fp8(shape: Shape) -> Shape:
    """With matrices of one byte a weight, and the embedding and the output as they are."""
    whole = shape.embedding_bytes + (0 if shape.tied_bytes else shape.output_bytes)
    return replace(
        shape,
        stored_bytes=whole + (shape.stored_bytes - whole) // 2,
        expert_bytes=shape.expert_bytes // 2,
        quantization=Quantization(name="fp8", bits=8),
    )


def _would_hold(estimate: Estimate) -> str:
    return f"would hold {estimate.context:,} tokens and decode {_rate(estimate)} tok/s"


def _rate(estimate: Estimate) -> str:
    return f"{speed_of(costs_of(estimate)).decode_tokens_per_s:.0f}"
