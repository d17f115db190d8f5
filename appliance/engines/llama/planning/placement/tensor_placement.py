"""Placements in split mode tensor: each card holds its part of every matrix and of the KV cache. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from appliance.engines.llama.planning.memory.memory import (
    MIB,
    compute_mib,
    layer_kv_bytes,
    layers_of,
    mask_bytes,
    output_mib,
    padded,
)
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob, Resources, roofline_of
from appliance.engines.llama.planning.placement.roofline import DEPTH, in_parallel
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR, parts_of, shares_of, why_not
from appliance.model import Layer
from appliance.plan import Device, GpuAllocation, Memory, Placement


def place_tensors(
    job: PlacementJob, resources: Resources, split_modes: Sequence[str], cards: Iterable[tuple[Device, ...]]
) -> tuple[Placed, ...]:
    """Return a placement for each group of `cards` that can hold the job, in their order."""
    layers = layers_of(job.model)
    fixes_some = job.gpu_layers is not None and job.gpu_layers <= len(layers)
    if fixes_some or job.cpu_expert_layers or why_not(job.model, split_modes, job.kv_type):
        return ()
    host = _host(job)
    if host.total > resources.spare_mib:
        return ()
    found = (_placed(job, resources, each, host) for each in cards)
    return tuple(placed for placed in found if placed)


def place_same(job: PlacementJob, resources: Resources, before: Placement, split_modes: Sequence[str]) -> Placed | None:
    """Return the job on the same cards as an earlier placement; None if it does not fit or a card is missing."""
    cards = cards_of(before, resources.devices)
    found = place_tensors(job, resources, split_modes, [cards]) if cards else ()
    return found[0] if found else None


def missing_mib(job: PlacementJob, devices: Sequence[Device]) -> float:
    """Return the MiB that a card lacks at least for the job, by the split with the smallest lack; 0 if all fits."""
    lacks = (
        max(
            _of_card(job, share).total - device.free_mib
            for share, device in zip(shares_of(parts), devices, strict=True)
        )
        for parts in parts_of(devices)
    )
    return max(0.0, min(lacks))


def cards_of(placement: Placement, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the cards of a placement; empty if one of them is missing now."""
    there = {device.id: device for device in devices}
    cards = tuple(there[share.gpu.id] for share in placement.shares if share.gpu.id in there)
    return cards if len(cards) == len(placement.shares) else ()


def _placed(job: PlacementJob, resources: Resources, devices: tuple[Device, ...], host: Memory) -> Placed | None:
    """Return the fastest split that fits; None if none does.

    All splits are timed: with few heads, equal parts may be faster than parts by bandwidth.
    """
    found: list[Placed] = []
    for parts in parts_of(devices):
        memories = [_of_card(job, share) for share in shares_of(parts)]
        if all(memory.total <= device.free_mib for memory, device in zip(memories, devices, strict=True)):
            found.append(_timed(job, resources, _placement(job, devices, parts, memories), host))
    return min(found, key=lambda placed: placed.cost, default=None)


def _placement(
    job: PlacementJob, devices: tuple[Device, ...], parts: tuple[int, ...], memories: list[Memory]
) -> Placement:
    count = len(layers_of(job.model)) + 1
    shares = tuple(
        GpuAllocation(gpu=device, device=f"CUDA{at}", layers=count, memory=memory)
        for at, (device, memory) in enumerate(zip(devices, memories, strict=True))
    )
    return Placement(shares=shares, split_mode=TENSOR, parts=parts)


def _timed(job: PlacementJob, resources: Resources, placement: Placement, host: Memory) -> Placed:
    roofline = replace(roofline_of(job, resources, None), depth=DEPTH)
    devices = {share.gpu.id: share.gpu for share in placement.shares}
    cost = roofline.job(in_parallel(roofline, placement, devices))
    return Placed(placement=placement, host=host, speed=cost.speed(), cost=cost.job)


def _of_card(job: PlacementJob, share: float) -> Memory:
    """Return the memory of a card that holds `share` of each matrix.

    In a mixture of experts, everything but the routed experts counts in full on each card: shared experts and routers
    lie there whole, and the rest is small. States count in full too, because some models keep them whole. If heads do
    not divide evenly, each next layer begins with another card: one layer more than the part covers the remainder.
    """
    model, layers = job.model, [layer for layer in layers_of(job.model) if not layer.is_draft]
    ubatch = min(job.ubatch, padded(job.context))
    caches = [layer_kv_bytes(layer, job.kv_type, job.context, job.ubatch, job.parallel) for layer in layers]
    cut, whole = zip(*(_cut(layer) for layer in layers), strict=True)
    matrices = share * (sum(cut) + model.output_bytes) + max(cut) * share * (1 - share)
    exchanged = 2 * 4 * ubatch * model.embedding_length / MIB
    compute = compute_mib(model, ubatch, job.context, job.parallel) + exchanged + output_mib(model, job.parallel)
    return Memory(
        weights=(matrices + sum(whole)) / MIB,
        kv=(share * sum(caches) + max(caches) * share * (1 - share)) / MIB,
        state=sum(layer.state_bytes for layer in layers) * job.parallel / MIB,
        compute=compute,
        output=0.0,
        cache=0.0,
        overhead=0.0,
    )


def _cut(layer: Layer) -> tuple[int, int]:
    """Return the bytes of a layer that are cut over the cards, and the bytes that every card holds whole."""
    return (layer.expert_bytes, layer.dense_bytes) if layer.expert_bytes else (layer.dense_bytes, 0)


def _host(job: PlacementJob) -> Memory:
    """Return the host memory: the embedding, the inputs of a batch, and the logits."""
    model, ubatch = job.model, min(job.ubatch, padded(job.context))
    return Memory(
        weights=model.embedding_bytes / MIB,
        kv=0.0,
        compute=(8 * ubatch * model.embedding_length + mask_bytes(model, ubatch, job.context, job.parallel)) / MIB,
        output=output_mib(model, job.parallel),
        cache=0.0,
        overhead=0.0,
    )
