"""Speculative decoding: the model's own draft layers, or n-grams of the text. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.inputs import Facts
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.plan import NOTHING, Choice, GpuAllocation, Kind, Offer, Plan, Speculation, with_choice, with_launch

UNMEASURED = 3  # draft tokens if a kind was asked for and nothing was measured: the number in published examples


def offers_of(facts: Facts) -> tuple[Offer, ...]:
    """Return the kinds of speculative decoding that are possible, the most promising first. Raises ConfigError (10) if
    the user asked for one that is not possible."""
    settings, shape = facts.settings, facts.shape
    if settings.speculation == "off" or facts.given.model.is_embedding_model:
        return ()
    found = []
    if shape.drafts:
        why = f"the model has {shape.drafts} draft layer{'s' * (shape.drafts > 1)} of its own"
        found.append(Offer(kind="mtp", is_tried=True, reason=why))
    found.append(Offer(kind="ngram", is_tried=True, reason="n-grams of the text so far: costs no memory"))
    asked = settings.speculation
    if asked in ("mtp", "draft") and asked not in {offer.kind for offer in found}:
        why = (
            "the model's files hold no draft layers"
            if asked == "mtp"
            else "draft models in safetensors are not supported yet"
        )
        message = f"speculative decoding cannot be done as asked: {asked} ({settings.sources['speculation']}): {why}"
        raise ConfigError(message, hint=f"use one of {', '.join(offer.kind for offer in found)}, auto or off")
    return tuple(offer for offer in found if asked not in ("mtp", "ngram") or offer.kind == asked)


def speculation_of(kind: Kind, tokens: int) -> Speculation:
    """Return a speculation that adds nothing: weights and cache of the draft layers are already in the plan's
    memory."""
    return Speculation(kind=kind, tokens=tokens, adds=NOTHING)


def applied(plan: Plan, speculation: Speculation, choice: Choice | None, estimate: Estimate | None) -> Plan:
    """Return the plan with this speculative decoding. Raises ModelDoesNotFitError (31) if its context no longer
    fits."""
    if estimate is None:
        message = f"model does not fit with {speculation.describe()}: its GPUs are not there"
        raise ModelDoesNotFitError(message, hint="use --speculation off")
    found = with_drafts(estimate, speculation)
    if found.kv.longest(found.blocks, plan.context) < plan.context:
        message = (
            f"model does not fit with {speculation.describe()}: {plan.context:,} tokens need "
            f"{found.kv.blocks_for(plan.context):,} blocks, and {found.blocks:,} are left"
        )
        raise ModelDoesNotFitError(message, hint="use --speculation off, or a smaller --ctx-size")
    shares = tuple(_with_drafts(share, found, at) for at, share in enumerate(plan.placement.shares))
    changed = with_launch(
        plan,
        graph_sizes=found.graph_sizes,
        utilization=found.share_asked,
        kv_bytes=None if found.share is not None else found.kv_bytes,
        blocks=found.blocks,
        block_size=found.kv.block_size,
    )
    changed = replace(changed, speculation=speculation, placement=replace(plan.placement, shares=shares))
    return with_choice(changed, choice)


def with_drafts(estimate: Estimate, speculation: Speculation) -> Estimate:
    option = replace(estimate.option, drafted=speculation.tokens, has_draft_layers=speculation.kind == "mtp")
    return Estimate(facts=estimate.facts.speculating(speculation), option=option)


def _with_drafts(share: GpuAllocation, found: Estimate, rank: int) -> GpuAllocation:
    stage = found.stage_of(rank)
    memory = replace(share.memory, weights=stage.memory.weights, kv=found.kv_mib_of(stage), output=stage.memory.graphs)
    return replace(share, memory=memory)


def still_applied(plan: Plan, measured: Plan, estimate: Estimate | None) -> Plan:
    """Return the plan with the speculative decoding of `measured`; unchanged if it does not fit or `measured` has
    another context length or none."""
    if measured.speculation is None or measured.context != plan.context:
        return plan
    choice = next((each for each in measured.choices if each.name == "speculation"), None)
    try:
        return applied(plan, measured.speculation, choice, estimate)
    except ModelDoesNotFitError:
        return plan
