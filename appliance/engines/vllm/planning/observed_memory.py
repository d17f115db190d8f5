"""What an earlier start held of its cards beside the KV cache, in place of what is assumed to grow after readiness.

Only once its largest work was seen: before, what is held contains no activations. Only of the configuration that
served: tokens of a step, ranks and graphs decide what is held, the context does not.
Such a plan is given its cache in bytes. What the estimate of weights, activations and graphs is wrong by is in the
figure as well, so that `free - held beside the cache - margin` are left for the cache, whatever was assumed. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from appliance.engines.gpus import device_id
from appliance.engines.vllm.planning.arguments.launch import VllmLaunch
from appliance.engines.vllm.planning.inputs import Facts
from appliance.engines.vllm.planning.memory.memory import RankMemory, Reserve
from appliance.engines.vllm.planning.stages import Option, Stage
from appliance.plan import MemoryPeak


def beyond_estimate(facts: Facts, option: Option, stages: Sequence[Stage]) -> tuple[float, ...] | None:
    """MiB of each stage that were held beyond its estimate, of the rank with most; below 0 where it was less. What
    sampling takes beyond a forward pass is left out, as a prompt does not show it. None where this configuration was
    not seen."""
    peak = next((each for each in facts.given.memory_peaks if each.is_whole and _is_of(each, facts, option)), None)
    if peak is None:
        return None
    held = [card.beside_kv_mib for card in peak.cards]
    ranks = option.layout.tensor
    return tuple(
        max(held[at * ranks : (at + 1) * ranks]) - (stage.memory.beside_kv - stage.memory.sampling)
        for at, stage in enumerate(stages)
    )


def is_decided(facts: Facts) -> bool:
    """By the user: what is left free, or how much the cache takes; or since nothing fits beside what was seen. Then it
    is not used."""
    pins = facts.pins
    is_asked = facts.settings.is_set("reserve_mib") or pins.utilization is not None or pins.kv_bytes is not None
    return is_asked or facts.ignores_peaks


def resized(reserve: Reserve, beyond_mib: float) -> Reserve:
    """With what was seen in place of the parts that stand for growth."""
    words = f"seen in service, assumed were {reserve.growth_mib:,.0f}"
    return Reserve(parts=(*reserve.lasting, (words, max(0.0, beyond_mib))))


def corrected(memory: RankMemory, beyond_mib: float) -> RankMemory:
    """Less was held of what the estimate assumes, the widest guess first, where less was held of all."""
    less_mib, parts = max(0.0, -beyond_mib), {}
    for name, least_mib in (("activation", memory.sampling), ("vision", 0.0), ("graphs", 0.0)):
        assumed_mib: float = getattr(memory, name)
        parts[name] = max(least_mib, assumed_mib - less_mib)
        less_mib -= assumed_mib - parts[name]
    return replace(memory, **parts)


def _is_of(peak: MemoryPeak, facts: Facts, option: Option) -> bool:
    plan, launch, layout = peak.plan, peak.plan.launch, option.layout
    if not isinstance(launch, VllmLaunch) or layout.nodes > 1:
        return False
    drafts = (plan.speculation.tokens, plan.speculation.kind == "mtp") if plan.speculation else (0, False)
    then = (
        tuple(card.device for card in peak.cards),
        (launch.tensor_parallel, launch.pipeline_parallel, launch.stage_layers),
        (launch.max_num_batched_tokens, plan.parallel, launch.graph_mode, launch.asked_block_size),
        (launch.dtype, plan.kv_type, drafts),
    )
    return then == (
        tuple(map(device_id, option.cards)),
        (layout.tensor, layout.pipeline, layout.layers),
        (option.tokens, option.seqs, option.graph_mode, option.block_size),
        (facts.dtype, option.kv_type, (option.drafted, option.has_draft_layers)),
    )
