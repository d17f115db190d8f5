"""GPU memory that an earlier start held apart from the KV cache; it replaces the assumed growth after readiness. Pure.

It is used only if the largest work was seen, since the figure contains no activations before. It holds only for the
configuration that served: tokens of a step, ranks and graphs change it, the context length does not. A plan made from
it gets its cache in bytes. The figure also contains the error of the estimate for weights, activations and graphs, so
the cache gets `free - held apart from the cache - margin`, whatever was assumed.
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
    """Return for each stage the MiB held beyond its estimate, of the rank with most; negative if it held less. None if
    this configuration was not seen.

    The estimate is taken without `sampling`, since a long prompt, which the peak was seen with, does not cause it.
    """
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
    """True if observed memory is not used: the user set the reserve, the utilization or the cache's bytes, or no plan
    would fit with it."""
    pins = facts.pins
    is_asked = facts.settings.is_set("reserve_mib") or pins.utilization is not None or pins.kv_bytes is not None
    return is_asked or facts.ignores_peaks


def resized(reserve: Reserve, beyond_mib: float) -> Reserve:
    """Return the reserve with the observed memory in place of the parts assumed for growth."""
    words = f"seen in service, assumed were {reserve.growth_mib:,.0f}"
    return Reserve(parts=(*reserve.lasting, (words, max(0.0, beyond_mib))))


def corrected(memory: RankMemory, beyond_mib: float) -> RankMemory:
    """Return the memory reduced by what the observation fell short of the estimate. Activations, the least certain
    part, are reduced first, then vision, then graphs. Unchanged if the observation was higher."""
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
