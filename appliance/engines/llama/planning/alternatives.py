"""Alternatives that a user has if a plan is short of GPU memory, each with its price: a smaller KV cache type, a
smaller quantization of the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from appliance.engines.llama.planning.inputs import PlanInputs
from appliance.engines.llama.planning.memory.kv_types import unjudged
from appliance.engines.llama.planning.memory.memory import layers_of, padded
from appliance.engines.llama.planning.placement.context import Candidate, ContextPlan, ContextRequest, choose_context
from appliance.engines.llama.planning.placement.job_time import placement_costs
from appliance.engines.llama.planning.placement.placement import Placed, place
from appliance.engines.llama.planning.placement.roofline import weight_bytes
from appliance.model import Model
from appliance.plan import AGENT_CONTEXT, READABLE_TOKENS_PER_S, SMALLEST_CONTEXT
from appliance.plan.parts.choice import Choice
from appliance.plan.parts.speeds import rate

SMALLEST_CACHE = "q4_0"
WORTH_NAMING = 1.2  # an alternative is named from this many times the context, or the speed
# Bits a weight of whole files, as llama.cpp's tools/quantize/README.md gives them for Llama 3.1 8B; the largest first.
QUANTIZATIONS: Mapping[str, float] = {
    "Q8_0": 8.50, "Q6_K": 6.56, "Q5_K_M": 5.70, "Q4_K_M": 4.89, "Q3_K_M": 4.00, "Q2_K": 3.16, "IQ2_XXS": 2.38,
}  # fmt: skip


def alternatives(inputs: PlanInputs, request: ContextRequest, found: ContextPlan) -> Iterator[Choice]:
    """Yield a choice for each alternative that is worth naming; none without GPUs or with --allow-disk."""
    if not inputs.resources.devices or inputs.model.is_embedding_model or inputs.settings.allow_disk:
        return
    yield from _smaller_cache(inputs, request, found)
    yield from _smaller_file(inputs, request, found)


def _smaller_cache(inputs: PlanInputs, request: ContextRequest, found: ContextPlan) -> Iterator[Choice]:
    """Yield what SMALLEST_CACHE would hold, if the plan has less context than the model was trained for.

    The type is named only if no quality check judged it yet: then it is not among the plan's own candidates.
    """
    settings = inputs.settings
    kinds = unjudged(settings, inputs.engine, inputs.model, inputs.kv_checks, on_gpu=True)
    if request.is_explicit or found.context >= request.tokens or SMALLEST_CACHE not in kinds:
        return
    smaller = replace(request, kinds=(SMALLEST_CACHE,))
    more = choose_context(inputs.job, inputs.resources, smaller)
    if more is None or more.context < WORTH_NAMING * found.context:
        return
    words = [f"--kv-type {SMALLEST_CACHE} would hold {more.context:,} tokens: {_speeds(more.placed, more.half_full)}"]
    target = AGENT_CONTEXT if more.context < AGENT_CONTEXT <= request.tokens else 0
    if larger := _at(inputs, smaller, target):
        words.append(f"with --ctx-size {target} as well {_speeds(larger.placed, larger.half_full)}")
    words.append(f"this {_speeds(found.placed, found.half_full)}")
    words.append("it is less exact, so without a request it is used only after a quality check")
    yield Choice(name="smaller_cache", value=SMALLEST_CACHE, reason="; ".join(words), source="memory")


def _at(inputs: PlanInputs, request: ContextRequest, tokens: int) -> Candidate | None:
    """Return the request's one KV cache type placed with `tokens` of context; None for 0 and if they do not fit."""
    if not tokens:
        return None
    (kind,) = request.kinds
    job = replace(inputs.job, kv_type=kind, context=padded(tokens))
    placed = place(job, inputs.resources)
    if placed is None:
        return None
    costs = placement_costs(job, inputs.resources, placed.placement, is_pinned=inputs.resources.is_pinned)
    return Candidate(kv_type=kind, context=tokens, placed=placed, half_full=1000 / costs.decode_ms(tokens / 2))


def _smaller_file(inputs: PlanInputs, request: ContextRequest, found: ContextPlan) -> Iterator[Choice]:
    """Yield a smaller quantization, if layers outside the GPUs make decoding slower than reading.

    Of the quantizations that are WORTH_NAMING times as fast it is the largest that fits on the GPUs; if none fits
    there, the smallest.
    """
    now = found.placed.speed.decode_tokens_per_s
    if found.placed.placement.is_whole or now >= READABLE_TOKENS_PER_S:
        return
    bits, better = 8 * weight_bytes(inputs.model), None
    for name, smaller in QUANTIZATIONS.items():
        model = _shrunk(inputs.model, smaller / bits)
        placed = _fastest(inputs, request.kinds, model, min(found.context, SMALLEST_CONTEXT))
        is_worth_naming = smaller < bits and placed and placed.speed.decode_tokens_per_s >= WORTH_NAMING * now
        if placed and is_worth_naming:
            better = (name, model.weights_bytes, placed)
            if placed.placement.is_whole:
                break
    if better:
        name, size, placed = better
        yield Choice(name="smaller_file", value=name, reason=_price(inputs.model, size, placed, now), source="memory")


def _price(model: Model, size: int, placed: Placed, now: float) -> str:
    sizes = f"about {size / 1e9:,.0f} GB, not {model.weights_bytes / 1e9:,.0f}"
    where = "lies on the GPUs as a whole" if placed.placement.is_whole else "is still not all on the GPUs"
    speeds = f"would decode {rate(placed.speed.decode_tokens_per_s)} tok/s, this {rate(now)}"
    return f"{sizes}: it {where} and {speeds}; a smaller quantization answers less well"


def _fastest(inputs: PlanInputs, kinds: Sequence[str], model: Model, tokens: int) -> Placed | None:
    """Return the fastest placement of the model over all these KV cache types; None if none fits."""
    job, resources = replace(inputs.job, model=model, context=padded(tokens)), replace(inputs.resources, tables={})
    found = (place(replace(job, kv_type=kind), resources) for kind in kinds)
    return min((placed for placed in found if placed), key=lambda placed: placed.cost, default=None)


def _shrunk(model: Model, share: float) -> Model:
    """Return the model at a smaller quantization: every matrix is smaller by the same share."""

    def less(size: int) -> int:
        return round(size * share)

    stack = tuple(
        replace(layer, dense_bytes=less(layer.dense_bytes), expert_bytes=less(layer.expert_bytes))
        for layer in layers_of(model)
    )
    return replace(
        model,
        stack=stack,
        weights_bytes=less(model.weights_bytes),
        expert_bytes=less(model.expert_bytes),
        embedding_bytes=less(model.embedding_bytes),
        output_bytes=less(model.output_bytes),
    )


def _speeds(placed: Placed, half_full: float) -> str:
    return f"decode {rate(placed.speed.decode_tokens_per_s)} tok/s, half full {rate(half_full)}"
