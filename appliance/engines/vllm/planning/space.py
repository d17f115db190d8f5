"""Space of plans of one start: the predicted plan, its neighbours, and plans of an earlier start adapted to the memory
that is free now. Pure; plans are computed on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial

from appliance.engines import engine as doors
from appliance.engines.engine import Inputs, Reduced
from appliance.engines.gpus import device_id
from appliance.engines.vllm.planning.alternatives import alternatives
from appliance.engines.vllm.planning.arguments.launch import KNOB_EFFECTS, launch_of
from appliance.engines.vllm.planning.decide import plan_of
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.inputs import Facts, read_facts, total_mib
from appliance.engines.vllm.planning.memory.memory import MIB, Layout
from appliance.engines.vllm.planning.model.precision import OUR_TYPES
from appliance.engines.vllm.planning.observed_limits import NO_LIMITS, Limits
from appliance.engines.vllm.planning.options import around, choose
from appliance.engines.vllm.planning.speculation import (
    applied,
    gain_words,
    offers_of,
    speculation_of,
    still_applied,
    tokens_of,
    with_drafts,
    with_gain,
)
from appliance.engines.vllm.planning.speed import costs_of
from appliance.engines.vllm.planning.stages import Option
from appliance.errors import ModelDoesNotFitError
from appliance.plan import (
    SMALLEST_CONTEXT,
    Allocated,
    Choice,
    Costs,
    Kind,
    KnobEffect,
    Offer,
    Plan,
    Shortage,
    Speculation,
    with_choice,
)
from appliance.probe import Gpu

FRAGMENTS_MIB = 64.0  # least shortage assumed: fragmentation can refuse a buffer although enough memory is free


class Space(doors.Space):
    """Space of vLLM's plans. Making it raises ConfigError (10) for a setting that the engine does not support; reading
    a plan raises ModelDoesNotFitError (31) with figures if none fits."""

    def __init__(self, inputs: Inputs, limits: Limits = NO_LIMITS) -> None:
        self._facts: Facts = read_facts(inputs).with_limits(limits)
        self._estimates: dict[str, Estimate] = {}
        self._with_limits = partial(Space, inputs)

    @cached_property
    def _best(self) -> Estimate:
        return _chosen(self._facts)

    @cached_property
    def best(self) -> Plan:
        plan = self._kept(self._best)
        return replace(plan, choices=(*plan.choices, *alternatives(self._best)))

    @property
    def predicted(self) -> Plan:
        """Best plan, with the kind of speculative decoding that was asked for. The context length then leaves room for
        the draft layers."""
        asked = self._facts.settings.speculation
        kind = next((offer.kind for offer in offers_of(self._facts) if offer.kind == asked), None)
        if kind is None:
            return self.best
        speculation = speculation_of(kind, tokens_of(self._facts, kind))
        estimate = _chosen(self._facts.speculating(speculation))
        plan = plan_of(estimate)
        source = self._facts.settings.sources["speculation"]
        why = "; ".join(filter(None, ("asked for", speculation.describe(), gain_words(estimate, kind))))
        choice = Choice(name="speculation", value=kind, reason=why, source=source)
        return with_choice(replace(plan, speculation=speculation), choice)

    @property
    def native(self) -> int:
        return self._facts.wanted

    def all(self) -> list[Plan]:
        """Return all plans, the best first. The others are also returned with the best one's context, if it fits."""
        found = {self.best.key: self.best}
        for option in around(replace(self._facts, seqs=self._best.option.seqs), self._best):
            estimate = Estimate(facts=self._facts, option=option)
            if estimate.fits:
                plan = self._kept(estimate)
                for each in (plan, self.at_context(plan, self.best.context)):
                    if each is not None and (each.context == self.best.context or each is plan):
                        found.setdefault(each.key, each)
        return list(found.values())

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        estimate = self._estimate_of(plan)
        if context > self._facts.wanted or estimate is None:
            return None
        narrowed = replace(estimate, facts=replace(estimate.facts, wanted=context))
        return self._kept(narrowed) if narrowed.fits and narrowed.context == context else None

    def exact(self, plan: Plan) -> Plan | None:
        facts, own = self._facts, OUR_TYPES[self._facts.dtype]
        is_given = facts.settings.kv_type != "auto" or plan.kv_type in (own, facts.kv_type)
        estimate = None if is_given else self._estimate_of(plan)
        if estimate is None:
            return None
        option = replace(estimate.option, kv_type=own, kv_bytes=None, drafted=0, has_draft_layers=False)
        # With the plan's own context first: what torch.compile kept is for one context.
        found = (self._estimate(option, wanted) for wanted in (plan.context, min(plan.context, SMALLEST_CONTEXT)))
        return next((self._kept(each) for each in found if each.fits), None)

    def _estimate(self, option: Option, context: int) -> Estimate:
        return Estimate(facts=replace(self._facts, wanted=context), option=option)

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        """Return the plan with the cache size of the earlier start in bytes, so that vLLM does not profile its memory
        again."""
        option = self._option_of(measured)
        if isinstance(option, str):
            return option
        facts = replace(self._facts, wanted=measured.context)
        kv_bytes = _kv_bytes(measured, allocated)
        if kv_bytes is not None:  # two decimals of a GiB in the engine's log
            kv_bytes = max(kv_bytes, Estimate(facts=facts, option=option).kv.bytes_for(measured.context))
        estimate = Estimate(facts=facts, option=replace(option, kv_bytes=kv_bytes))
        if not estimate.fits and kv_bytes is not None and estimate.seen_mib is None:
            return f"{_lack(estimate)} for the cache of {kv_bytes / MIB:,.0f} MiB that it had"
        if not estimate.fits or estimate.context < measured.context:
            return f"{_lack(estimate)} for {measured.context:,} tokens"
        found = self._kept(estimate)
        return self.speculating_as(found, measured) if measured.speculation else found

    def costs(self, plan: Plan) -> Costs:
        estimate = self._estimate_of(plan)
        return Costs() if estimate is None else costs_of(estimate)

    @property
    def knob_effects(self) -> Mapping[str, KnobEffect]:
        return KNOB_EFFECTS

    def kv_tokens(self, plan: Plan) -> int | None:
        """Return the cache capacity in tokens as vLLM computes it: the number of full contexts in all blocks, times the
        context (v1/core/kv_cache_utils.py `get_kv_cache_capacity`)."""
        estimate = self._estimate_of(plan)
        if estimate is None or plan.context < 1:
            return None
        return int(estimate.blocks / estimate.kv.blocks_for(plan.context) * plan.context)

    def kv_mib(self, plan: Plan, tokens: int) -> tuple[float, ...]:
        estimate = self._estimate_of(plan)
        if estimate is None or plan.context < 1:
            return ()
        if plan.speculation:
            estimate = with_drafts(estimate, plan.speculation)
        blocks = round(tokens * estimate.kv.blocks_for(plan.context) / plan.context)
        each = (estimate.stage_of(rank).kv.bytes_per_block for rank in range(len(plan.placement.shares)))
        return tuple(blocks * bytes_per_block / MIB for bytes_per_block in each)

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        return tuple((share.device, share.memory.total, share.gpu.free_mib) for share in plan.placement.shares)

    def offers(self) -> tuple[Offer, ...]:
        return tuple(with_gain(offer, self._best) for offer in offers_of(self._facts))

    def speculation(self, plan: Plan, kind: Kind, tokens: int) -> Speculation:
        return speculation_of(kind, tokens)

    def speculating(self, plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
        estimate = self._estimate_of(plan)
        return applied(plan, speculation, choice, estimate)

    def speculating_as(self, plan: Plan, measured: Plan) -> Plan:
        return still_applied(plan, measured, self._estimate_of(plan))

    def after(self, plan: Plan, shortage: Shortage) -> Reduced | None:
        """Return a smaller space: limited to the context that the engine named, or to the memory that it found free on
        a GPU, else with the cache reduced by what was missing."""
        limits, where = self._facts.limits, shortage.device or ("each GPU" if plan.placement.shares else "the host")
        if shortage.is_whole and shortage.free_mib is not None:
            return self._with_less_free(plan, where, shortage.refused_mib, shortage.free_mib)
        missing = max(shortage.refused_mib - (shortage.free_mib or 0.0), FRAGMENTS_MIB)
        if shortage.context is None:
            kept = replace(limits, kv_mib=max(0.0, min(limits.kv_mib, _cache_mib(plan)) - missing))
        else:
            kept, missing = replace(limits, context=min(limits.context, shortage.context)), shortage.refused_mib
        space = self._with_limits(limits=kept)
        return Reduced(space=space, missing_mib=missing, where=where, taken_mib=self._asked_mib)

    def _with_less_free(self, plan: Plan, where: str, wanted: float, free: float) -> Reduced:
        """Return a space for a GPU that lost free memory since the probe. In a group all GPUs are limited, since the
        error does not name the host."""
        limits, shares = self._facts.limits, plan.placement.shares
        ids = [share.gpu.id for share in shares if share.device == where and launch_of(plan).nodes == 1]
        ids = ids or [share.gpu.id for share in shares]
        found = {**limits.free_mib, **{card: min(limits.free_of(card), free) for card in ids}}
        space = self._with_limits(limits=replace(limits, free_mib=found))

        def wanted_mib(plan: Plan) -> float:
            totals = [total_mib(card, self._facts.hardware) for card in self._facts.all_cards if device_id(card) in ids]
            used = {share.gpu.id for share in plan.placement.shares}
            return max(totals) * (launch_of(plan).utilization or 0.0) if used & set(ids) else 0.0

        return Reduced(space=space, missing_mib=wanted - free, where=where, taken_mib=wanted_mib)

    def _asked_mib(self, plan: Plan) -> float:
        """Return the cache of one rank that the plan's context needs, MiB: vLLM compares this with the memory left."""
        estimate = self._estimate_of(plan)
        return _cache_mib(plan) if estimate is None else estimate.kv.bytes_for(plan.context) / MIB

    def _kept(self, estimate: Estimate) -> Plan:
        plan = plan_of(estimate)
        self._estimates[plan.key] = estimate
        return plan

    def _estimate_of(self, plan: Plan) -> Estimate | None:
        if plan.key in self._estimates:
            return self._estimates[plan.key]
        option = self._option_of(plan)
        if isinstance(option, str):
            return None
        return Estimate(facts=replace(self._facts, wanted=max(1, plan.context)), option=option)

    def _option_of(self, plan: Plan) -> Option | str:
        """Return the option of a plan on the present GPUs, or a sentence if one of its GPUs is missing."""
        launch = launch_of(plan)
        cards = _same_cards(plan, self._facts.all_cards)
        if cards is None:
            return f"a GPU that it used is not there: {', '.join(share.gpu.name for share in plan.placement.shares)}"
        layout = Layout(
            tensor=launch.tensor_parallel,
            pipeline=launch.pipeline_parallel,
            layers=launch.stage_layers,
            nodes=launch.nodes,
        )
        return Option(
            layout=layout,
            cards=cards,
            kv_type=plan.kv_type,
            tokens=launch.max_num_batched_tokens,
            seqs=plan.parallel,
            graph_mode=launch.graph_mode,
            block_size=launch.asked_block_size,
            kv_bytes=launch.kv_bytes if cards else None,
        )


def _chosen(facts: Facts) -> Estimate:
    """Return the best estimate. If nothing fits with the memory seen in service, choose without it and report that:
    observations must never prevent a start."""
    try:
        return choose(facts)
    except ModelDoesNotFitError:
        if not facts.given.memory_peaks:
            raise
        return choose(replace(facts, ignores_peaks=True))


def _same_cards(plan: Plan, cards: tuple[Gpu, ...]) -> tuple[Gpu, ...] | None:
    """Return the plan's GPUs among `cards`, by id, else by name in the same order (for a profile of a like machine).
    None if one is missing."""
    left, found = list(cards), []
    for share in plan.placement.shares:
        same = [card for card in left if device_id(card) == share.gpu.id]
        same = same or [card for card in left if (card.name or "unnamed GPU") == share.gpu.name]
        if not same:
            return None
        left.remove(same[0])
        found.append(same[0])
    return tuple(found)


def _kv_bytes(measured: Plan, allocated: Allocated | None) -> int | None:
    """Return the cache bytes of one rank in the earlier start, or None if unknown. None on the CPU, where the plan
    computes them again since vLLM does not profile."""
    ranks = len(measured.placement.shares)
    if not ranks:
        return None
    if allocated is not None and allocated.kv:
        return int(allocated.kv * MIB)
    return launch_of(measured).kv_bytes


def _cache_mib(plan: Plan) -> float:
    """Return the KV cache of the rank that has most, MiB."""
    shares = plan.placement.shares
    return max(share.memory.kv for share in shares) if shares else plan.memory.kv / launch_of(plan).local_ranks


def _lack(estimate: Estimate) -> str:
    if not estimate.option.cards:
        return f"host memory has no room: {estimate.host_usable_mib:,.0f} MiB are usable"
    stage = estimate.tightest
    needed = stage.memory.counted + estimate.kv_mib_of(stage)
    free = min(room for card, room in zip(estimate.option.cards, estimate.room_mib, strict=True) if card in stage.cards)
    return f"it needs {needed:,.0f} MiB of each of its GPUs, and {free:,.0f} are free"
