"""What a plan leaves open: contexts that other settings would give, and the knobs that measuring decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from appliance.engines.engine import Space
from appliance.errors import FatalError
from appliance.plan import LargerContext, Plan
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
    found = (_first(start, plan, asked) for asked in (lengths, kinds))
    return tuple(each for each in found if each is not None)


def _with(settings: Settings, name: str, **value: Any) -> Settings:  # noqa: ANN401 - of the setting's own type
    return replace(settings, **value, sources={**settings.sources, name: "this plan"})


def _first(start: StartInputs, plan: Plan, asked: Iterable[tuple[str, Settings]]) -> LargerContext | None:
    """The first of some settings that can be planned and carries more."""
    for words, settings in asked:
        try:
            other = replace(start, inputs=replace(start.inputs, settings=settings)).space().predicted
        except FatalError:  # it does not fit, or this engine, chip or model does not take it
            continue
        if other.context >= WORTH * plan.context:
            return LargerContext(context=other.context, setting=words, decode_tokens_per_s=_decode(other))
    return None


def _decode(plan: Plan) -> float | None:
    return plan.speed.decode_tokens_per_s if plan.speed else None


def to_measure(start: StartInputs, space: Space, plan: Plan) -> tuple[str, ...]:
    """Names of the knobs in which plans that fit differ, and kinds of speculative decoding; none with --tune off."""
    if start.settings.tune == "off" or plan.is_embedding:
        return ()
    seen = {name: {value} for name, value in plan.knobs}
    for each in space.all():
        for name, value in each.knobs:
            seen.setdefault(name, set()).add(value)
    kinds = tuple(offer.kind for offer in space.offers() if offer.is_tried)
    knobs = tuple(name for name, values in seen.items() if len(values) > 1)
    return (*knobs, *((f"speculation ({', '.join(kinds)})",) if kinds else ()))
