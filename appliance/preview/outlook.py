"""What a plan leaves open: contexts that other settings would give, and the knobs that measuring decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from appliance.engines.engine import Space
from appliance.errors import FatalError
from appliance.plan import ContextPrice, Costs, LargerContext, Offer, Plan
from appliance.settings import Settings
from appliance.start.inputs import StartInputs

WORTH = 1.1  # times the plan's context: for less no other setting is named
# Types of the KV cache below the exact ones, in the order in which they are tried.
SMALLER_KV_TYPES = ("fp8", "int8_per_token_head", "q8_0", "q4_0")


def larger_contexts(start: StartInputs, space: Space, plan: Plan) -> tuple[LargerContext, ...]:
    """The longest context that the model could have here, and what a smaller type of the KV cache would give.

    Both are planned as if they were asked for. Empty if the context is the model's own or was asked for.
    """
    settings = start.settings
    if settings.ctx_size is not None or plan.is_embedding or plan.context >= space.native:
        return ()
    longest = max((each.context for each in space.all()), default=0)
    lengths = (
        (f"--ctx-size {tokens}", _with(settings, "ctx_size", ctx_size=tokens))
        for tokens in dict.fromkeys((space.native, longest))
    )
    kinds = (
        (f"--kv-type {kind}", _with(settings, "kv_type", kv_type=kind))
        for kind in SMALLER_KV_TYPES
        if kind in start.inputs.facts.kv_types and kind != plan.kv_type and settings.kv_type == "auto"
    )
    found = (_first(start, space, plan, asked) for asked in (lengths, kinds))
    return tuple(each for each in found if each is not None)


def _with(settings: Settings, name: str, **value: Any) -> Settings:  # noqa: ANN401 - of the setting's own type
    return replace(settings, **value, sources={**settings.sources, name: "this plan"})


def _first(start: StartInputs, space: Space, plan: Plan, asked: Iterable[tuple[str, Settings]]) -> LargerContext | None:
    """The first of some settings that can be planned and carries more."""
    for words, settings in asked:
        try:
            others = replace(start, inputs=replace(start.inputs, settings=settings)).space()
            other = others.predicted
        except FatalError:  # it does not fit, or this engine, chip or model does not take it
            continue
        if other.context >= WORTH * plan.context:
            now, price = _prices(space, plan, others, other)
            decode = price.decode_tokens_per_s if price else None
            return LargerContext(context=other.context, setting=words, decode_tokens_per_s=decode, price=price, now=now)
    return None


def _prices(
    space: Space, plan: Plan, others: Space, other: Plan
) -> tuple[ContextPrice, ContextPrice] | tuple[None, None]:
    """Return the predicted speeds of the plan and of another; None for both if the engine predicts none.

    A plan that copies weights to a GPU is predicted with a longer prompt than others. So the prefill speed of the other
    plan follows from the costs of both with the first plan's prompt.
    """
    if plan.speed is None or other.speed is None:
        return None, None
    tokens, costs, there = plan.speed.prompt_tokens, space.costs(plan), others.costs(other)
    read_ms = costs.prefill_ms(tokens, tokens / 2)
    if not read_ms:
        return None, None  # a plan of an earlier start that this space cannot compute
    slower = there.prefill_ms(tokens, tokens / 2) / read_ms
    return (
        ContextPrice(
            decode_tokens_per_s=plan.speed.decode_tokens_per_s,
            prefill_tokens_per_s=plan.speed.prefill_tokens_per_s,
            fill_s=_fill_s(costs, plan.context),
        ),
        ContextPrice(
            decode_tokens_per_s=other.speed.decode_tokens_per_s,
            prefill_tokens_per_s=plan.speed.prefill_tokens_per_s / slower,
            fill_s=_fill_s(there, other.context),
        ),
    )


def _fill_s(costs: Costs, tokens: int) -> float:
    return costs.prefill_ms(tokens, tokens / 2) / 1000


def to_measure(start: StartInputs, space: Space, plan: Plan) -> tuple[str, ...]:
    """Names of the knobs in which plans that fit differ, and kinds of speculative decoding with their expected gain;
    none with --tune off."""
    if start.settings.tune == "off" or plan.is_embedding:
        return ()
    seen = {name: {value} for name, value in plan.knobs}
    for each in space.all():
        for name, value in each.knobs:
            seen.setdefault(name, set()).add(value)
    kinds = tuple(_kind(offer) for offer in space.offers() if offer.is_tried)
    knobs = tuple(name for name, values in seen.items() if len(values) > 1)
    return (*knobs, *((f"speculation ({', '.join(kinds)})",) if kinds else ()))


def _kind(offer: Offer) -> str:
    return f"{offer.kind} {offer.gain.describe()}" if offer.gain else offer.kind
