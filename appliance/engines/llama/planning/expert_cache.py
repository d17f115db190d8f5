"""The modelled speed of an expert cache, for mixture-of-experts models larger than the GPU; for `plan --explain`."""

from __future__ import annotations

from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.memory.memory import MIB, layers_of
from appliance.engines.llama.planning.placement.placement import Resources
from appliance.engines.llama.planning.replays import load_replays
from appliance.model import Model
from appliance.moe.cost import Cost, Rates
from appliance.moe.outlook import Outlook, Replay, cached, static_layers
from appliance.plan import Device, Placement

GPU_EXPERT_MS = 0.005  # start of a kernel: chosen, not measured
# Each rate may be this many times too high or too low: rates are computed, not measured with CPU and PCIe busy at once.
OFF = 1.25


def modelled(model: Model, resources: Resources, placement: Placement) -> str | None:
    """Return one line on the modelled expert cache.

    None if all experts lie on GPUs, if the plan uses several GPUs, or if no trace of this architecture was recorded.
    """
    with_experts = [layer for layer in layers_of(model) if layer.expert_bytes and not layer.is_draft]
    if len(placement.shares) != 1 or not placement.cpu_expert_layers or not with_experts:
        return None
    replay = _replay_of(model)
    if replay is None:
        return None
    share = placement.shares[0]
    device = next(device for device in resources.devices if device.id == share.gpu.id)
    expert_mb = sum(layer.expert_bytes for layer in with_experts) / len(with_experts) / model.experts / 1e6
    cost = Cost(_rates(model, resources, device, expert_mb), expert_mb)
    on_gpu = sum(layer.expert_bytes for layer in layers_of(model)[placement.cpu_expert_layers :]) / MIB
    room_mib = on_gpu + share.gpu.free_mib - share.memory.total
    slots = int(room_mib * MIB / 1e6 / expert_mb / len(with_experts))
    fixed_ms = model.output_bytes / (device.bandwidth_gb_s * 1e6)
    static = static_layers(replay, cost, placement.cpu_expert_layers, fixed_ms=fixed_ms, off=OFF)
    beside = f"--n-cpu-moe {placement.cpu_expert_layers} by the same formula {_speed(static)}"
    found = cached(replay, cost, slots, fixed_ms=fixed_ms, off=OFF)
    if found is None:
        return f"modelled: none, {slots} slots a layer are fewer than a token's experts; {beside}"
    counts = f"{replay.top_k} of the model's {model.experts_used} experts a token in both"
    return (
        f"modelled: {slots} slots a layer in the same memory, {found.hit_rate:.0%} hits, {found.copied_mb:.1f} MB "
        f"copied for a layer and token: {_speed(found)}; {beside}; replayed from one prompt of {replay.name}, "
        f"{replay.tokens} tokens, {counts}: short and optimistic"
    )


def _replay_of(model: Model) -> Replay | None:
    same = (r for r in load_replays() if (r.architecture, r.experts) == (model.architecture, model.experts))
    return next(same, None)


def _rates(model: Model, resources: Resources, device: Device, expert_mb: float) -> Rates:
    """Return the rates of the model. CPU and PCIe share the bandwidth of DRAM; CPU kernels reach `DRAM_SHARE` of it."""
    dense = sum(layer.dense_bytes for layer in layers_of(model)) / len(layers_of(model)) / 1e6
    return Rates(
        cpu_gb_s=resources.dram_gb_s,
        pcie_gb_s=device.pinned_gb_s,
        dram_gb_s=resources.dram_gb_s / assumptions.DRAM_SHARE.value,
        other_ms=dense / device.bandwidth_gb_s + device.layer_us / 1000,
        cpu_fixed_ms=assumptions.EXPERTS_HOP_US.value / 1000,
        gpu_expert_ms=expert_mb / device.bandwidth_gb_s + GPU_EXPERT_MS,
    )


def _speed(found: Outlook) -> str:
    return f"{found.tokens_per_s:.0f} tok/s ({found.low:.0f} to {found.high:.0f} with rates {OFF:g} times off)"
