"""What a plan leaves open: contexts that other settings would give, and the knobs that measuring decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from appliance.engines.engine import Space
from appliance.errors import FatalError
from appliance.plan import LargerContext, Plan
from appliance.serve.inputs import StartInputs

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
    lengths = [("ctx_size", tokens) for tokens in dict.fromkeys((space.native, longest))]
    kinds = [("kv_type", kind) for kind in SMALLER_KV_TYPES if kind in start.inputs.facts.kv_types]
    if settings.kv_type != "auto":
        kinds = []
    found = (_first(start, plan, values) for values in (lengths, [each for each in kinds if each[1] != plan.kv_type]))
    return tuple(each for each in found if each is not None)


def _first(start: StartInputs, plan: Plan, values: Iterable[tuple[str, str | int]]) -> LargerContext | None:
    """The first of some values of settings that can be planned and carries more."""
    for name, value in values:
        settings = replace(start.settings, **{name: value}, sources={**start.settings.sources, name: "this plan"})
        try:
            other = replace(start, inputs=replace(start.inputs, settings=settings)).space().predicted
        except FatalError:  # it does not fit, or this engine, chip or model does not take it
            continue
        if other.context >= WORTH * plan.context:
            setting = f"--{name.replace('_', '-')} {value}"
            return LargerContext(context=other.context, setting=setting, decode_tokens_per_s=_decode(other))
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
