"""Conversion of an estimate into a plan, each choice with its reason. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.gpus import device_id
from appliance.engines.vllm.planning.arguments.engine_args import thinking_arguments
from appliance.engines.vllm.planning.arguments.launch import VllmLaunch, compile_key
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.inputs import free_mib
from appliance.engines.vllm.planning.memory.memory import MIB, context_mib
from appliance.engines.vllm.planning.memory.parallel import are_linked
from appliance.engines.vllm.planning.reasons import choices_of
from appliance.engines.vllm.planning.speed import costs_of, speed_of
from appliance.model import plain_name
from appliance.plan import NOTHING, Device, GpuAllocation, Memory, Placement, Plan
from appliance.probe import Gpu


def plan_of(estimate: Estimate) -> Plan:
    facts = estimate.facts
    settings, model, image = facts.settings, facts.given.model, facts.given.image
    plan = Plan(
        engine=image.engine,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        context=estimate.context,
        kv_type=estimate.option.kv_type,
        parallel=estimate.option.seqs,
        is_embedding=model.is_embedding_model,
        memory=_host_memory(estimate),
        usable_mib=estimate.host_usable_mib,
        launch=_launch(estimate),
        placement=_placement(estimate),
        speed=speed_of(costs_of(estimate)),
    )
    return replace(plan, choices=choices_of(estimate, compile_key(plan)))


def _launch(estimate: Estimate) -> VllmLaunch:
    facts, option = estimate.facts, estimate.option
    template, parsers = facts.settings.chat_template_file, facts.parsers
    return VllmLaunch(
        dtype=facts.dtype,
        max_num_batched_tokens=option.tokens,
        graph_mode=option.graph_mode,
        graph_sizes=estimate.graph_sizes,
        block_size=estimate.kv.block_size,
        asked_block_size=option.block_size,
        tensor_parallel=option.layout.tensor,
        pipeline_parallel=option.layout.pipeline,
        nodes=option.layout.nodes,
        stage_layers=option.layout.layers,
        kv_bytes=None if estimate.share is not None else estimate.kv_bytes,
        utilization=estimate.share_asked,
        blocks=estimate.blocks,
        has_prefix_cache=facts.has_prefix_cache,
        names_kv_type=facts.names_kv_type,
        attention_backend=facts.attention_backend,
        gdn_backend=facts.gdn_backend,
        hf_overrides=facts.hf_overrides,
        is_text_only=facts.is_text_only,
        threads=_threads(estimate),
        chat_template=str(template) if template else None,
        tool_parser=parsers.tools,
        reasoning_parser=parsers.reasoning,
        sees=facts.shape.sees and not facts.is_text_only,
        variables=facts.variables,
        engine_args=(*thinking_arguments(facts.settings), *facts.pins.passed),
    )


def _threads(estimate: Estimate) -> int | None:
    """Return the number of threads of each rank of the CPU build. None: vLLM binds one thread to each core, which is
    best if the container has no CPU quota."""
    if estimate.option.cards:
        return None
    cpu, settings = estimate.facts.hardware.cpu, estimate.facts.settings
    if settings.threads:
        return max(1, min(settings.threads, cpu.threads_max))
    return cpu.cores if cpu.quota is not None else None


def _host_memory(estimate: Estimate) -> Memory:
    if estimate.option.cards:
        return replace(NOTHING, overhead=estimate.host_overhead_mib)
    ranks, found = estimate.option.layout.local_ranks, estimate.memory
    return replace(
        NOTHING,
        weights=found.weights * ranks,
        kv=estimate.kv_bytes * ranks / MIB,
        compute=(found.activation + found.vision) * ranks,
        overhead=estimate.host_overhead_mib,
    )


def _placement(estimate: Estimate) -> Placement:
    layout, cards = estimate.option.layout, estimate.option.cards
    if not cards:
        return Placement()
    shares = tuple(_allocation(estimate, at) for at in range(len(cards)))
    if layout.pipeline > 1:
        return Placement(shares=shares, split_mode="pipeline")
    parts = (1,) * layout.tensor if layout.tensor > 1 else ()
    return Placement(shares=shares, split_mode="tensor" if parts else "none", parts=parts)


def _allocation(estimate: Estimate, at: int) -> GpuAllocation:
    """Return what one rank takes of its GPU. The output layer counts as a layer. All ranks of a stage report the
    stage's number of layers, since each holds a part of every layer."""
    layout, of_stage = estimate.option.layout, estimate.stage_of(at)
    stage, found = at // layout.tensor, of_stage.memory
    layers = layout.layers[stage] if layout.layers else estimate.facts.shape.layers
    is_last = stage == layout.pipeline - 1
    memory = replace(
        NOTHING,
        weights=found.weights,
        kv=estimate.kv_mib_of(of_stage),
        compute=found.activation + found.vision,
        output=found.graphs,
    )
    return GpuAllocation(gpu=_device(estimate, at), device=f"cuda:{at}", layers=layers + is_last, memory=memory)


def _device(estimate: Estimate, at: int) -> Device:
    card = estimate.option.cards[at]
    hardware = estimate.facts.hardware
    free = max(0.0, estimate.room_mib[at])
    held = free_mib(card, hardware) - free
    return Device(
        id=device_id(card),
        name=_name(card),
        index=card.index,
        free_mib=free,
        held_back_mib=held,
        context_mib=context_mib(card, estimate.option.layout.ranks),
        bandwidth_gb_s=card.bandwidth_gb_s or 0.0,
        upload_gb_s=0.0,
        pinned_gb_s=0.0,
        peers=card.nvlink_peers if are_linked(estimate.option.own_cards) else (),
        is_slice=card.mig_profile is not None,
        is_unified=card.is_unified,
    )


def _name(card: Gpu) -> str:
    name = card.name or "unnamed GPU"
    return f"{name} slice {card.mig_profile}" if card.mig_profile and card.mig_profile not in name else name
