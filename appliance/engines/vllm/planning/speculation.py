"""Speculative decoding: the model's own draft layers, or n-grams of the text. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.draft_tokens import check_draft_tokens
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.inputs import Facts
from appliance.engines.vllm.planning.memory import assumptions as assumed
from appliance.engines.vllm.planning.speed import bytes_a_token, costs_of, speed_of
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.plan import (
    NOTHING,
    Choice,
    ExpectedGain,
    GpuAllocation,
    Kind,
    Offer,
    Plan,
    Speculation,
    StepCost,
    expected_gain,
    with_choice,
    with_launch,
)

# Draft tokens if a kind was asked for and nothing was measured. MTP: the rule of a plugin for RTX 2080 Ti, 3 on two
# cards and 4 on more (caovan.com); the law finds both within 3 % of its best. On the CPU a pass costs most: 1.
NGRAM_TOKENS = 3
MTP_TOKENS_CPU, MTP_TOKENS, MTP_TOKENS_MANY = 1, 3, 4


def offers_of(facts: Facts) -> tuple[Offer, ...]:
    """Return the kinds of speculative decoding that are possible, the most promising first. Raises ConfigError (10) if
    the user asked for one that is not possible."""
    settings, shape = facts.settings, facts.shape
    check_draft_tokens(settings)
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
    _check_passes(facts)
    tokens = settings.draft_tokens
    return tuple(replace(each, tokens=tokens) for each in found if asked not in ("mtp", "ngram") or each.kind == asked)


def _check_passes(facts: Facts) -> None:
    """Raise ConfigError for a number of draft tokens that several draft layers do not divide (config/speculative.py,
    line 1605 of 0.33.0)."""
    tokens, layers = facts.settings.draft_tokens, facts.shape.drafts
    if facts.settings.speculation != "mtp" or tokens is None or tokens <= layers or tokens % layers == 0:
        return
    message = f"draft tokens cannot be done as asked: {tokens} ({facts.settings.sources['draft_tokens']}): "
    message += f"the model has {layers} draft layers, and more tokens than those must be a multiple of them"
    raise ConfigError(message, hint=f"use --draft-tokens {tokens - tokens % layers}")


def tokens_of(facts: Facts, kind: Kind) -> int:
    """Return the number of draft tokens of a plan that was not measured: the user's, else the published rule's."""
    if facts.settings.draft_tokens is not None:
        return facts.settings.draft_tokens
    if kind != "mtp":
        return NGRAM_TOKENS
    cards, layers = len(facts.all_cards), facts.shape.drafts
    found = MTP_TOKENS_CPU if not cards else MTP_TOKENS if cards <= 2 else MTP_TOKENS_MANY
    return found if found <= layers else found - found % layers


def with_gain(offer: Offer, estimate: Estimate) -> Offer:
    return replace(offer, gain=gain_of(estimate, offer.kind))


def gain_of(estimate: Estimate, kind: Kind) -> ExpectedGain | None:
    """Return what draft layers are expected to gain on GPUs; None for n-grams, which depend on the text alone, and on
    the CPU, for which nothing is published."""
    if kind != "mtp" or not estimate.option.cards:
        return None
    a, cheap, dear = (each.value for each in (assumed.DRAFT_STEP, assumed.DRAFT_STEP_CHEAP, assumed.DRAFT_STEP_DEAR))
    cost, tokens = StepCost(a=a, b=draft_share(estimate)), tokens_of(estimate.facts, kind)
    return expected_gain(tokens, cost=cost, cheap=replace(cost, a=cheap), dear=replace(cost, a=dear))


def draft_share(estimate: Estimate) -> float:
    """Return the bytes that drafting one token reads, draft layers and output, as a share of a step's without draft
    tokens."""
    facts = estimate.facts
    shape, dtype = facts.shape, facts.dtype
    each = shape.loaded(shape.draft_bytes // max(1, shape.drafts) + shape.output_bytes, dtype)
    read_anyway = shape.loaded(shape.draft_bytes, dtype) if facts.drafting and facts.drafting.kind == "mtp" else 0
    return each / (bytes_a_token(shape, dtype) - read_anyway)


def gain_words(estimate: Estimate, kind: Kind) -> str:
    """Return words like "56 tok/s (33 to 116) expected with 3 draft tokens, stable 51, fast 78"; "" if nothing is
    published."""
    gain = gain_of(estimate, kind)
    decode = speed_of(costs_of(estimate)).decode_tokens_per_s
    return gain.describe_speeds(decode, assumed.SPREAD_DECODE.value) if gain else ""


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
