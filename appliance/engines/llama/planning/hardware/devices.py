"""GPUs that a plan may use, the fastest first, and the reasons why others are left out. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.gpus import device_id, judged
from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.hardware.cuda_context import context_mib, held_back_mib
from appliance.engines.llama.planning.hardware.gpu_throttling import handicaps, power_share
from appliance.engines.llama.planning.hardware.observed_limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.hardware.rates import card_rates
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.plan import Device
from appliance.probe import Gpu, Hardware


def usable_devices(
    hardware: Hardware,
    image: ImageFacts,
    engine: EngineFacts,
    limits: Limits = NO_LIMITS,
    *,
    reserve_mib: float = 0.0,
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Return the usable GPUs, the fastest first, and a sentence for each GPU that cannot be used.

    Both are empty if the engine has no backend for GPUs. `reserve_mib` stays free on each GPU.
    """
    if image.cuda is None and not any("cuda" in name for name in engine.backends):
        return (), ()
    devices: list[Device] = []
    refused: list[str] = []
    for gpu, why in judged(hardware, image):
        if why:
            refused.append(f"GPU {gpu.index} ({_name(gpu)}) is left out: {why}")
        else:
            devices.append(_capped(_device(gpu, hardware, limits, reserve_mib), power_share(gpu)))
    return tuple(sorted(devices, key=_rank)), tuple(refused)


def _capped(device: Device, share: float) -> Device:
    """Return the device with matrix product rates reduced to `share`, for a card with a power cap."""
    if share == 1:
        return device
    tflops, tflops_16 = (rate and rate * share for rate in (device.tflops, device.tflops_16))
    return replace(device, tflops=tflops, tflops_16=tflops_16)


def _rank(device: Device) -> tuple[float | int | str, ...]:
    """Return the sort key: faster memory first, then faster link, then more free memory, then the slot."""
    return (-device.bandwidth_gb_s, -device.upload_gb_s, -device.free_mib, device.index, device.id)


def _device(gpu: Gpu, hardware: Hardware, limits: Limits, reserve_mib: float) -> Device:
    margin = reserve_mib + held_back_mib(gpu)
    if gpu.is_unified:
        free = limits.of_host(hardware.memory)
    else:
        free = min(float(gpu.vram_free_mib or 0), limits.of_gpu(device_id(gpu)))
    measured = next((s for s in hardware.speeds.gpus if s.uuid == gpu.uuid), None) if hardware.speeds else None
    memory = (measured.memory_gb_s if measured else None) or gpu.bandwidth_gb_s or assumptions.GPU_GB_S.value
    pinned = (measured.pinned_gb_s if measured else None) or _link_gb_s(gpu)
    pageable = (measured.pageable_gb_s if measured else None) or pinned * assumptions.PAGEABLE_SHARE.value
    rates = card_rates(gpu, memory)
    return Device(
        id=device_id(gpu),
        name=_name(gpu),
        index=gpu.index,
        free_mib=max(0.0, free - margin),
        held_back_mib=margin,
        context_mib=context_mib(gpu),
        bandwidth_gb_s=rates.gb_s,
        weights_g_s=rates.weights_g_s,
        layer_us=rates.layer_us,
        tflops=rates.tflops,
        tflops_16=rates.tflops_16,
        tflops_attention=rates.tflops_attention,
        upload_gb_s=pageable,
        pinned_gb_s=pinned,
        peers=gpu.nvlink_peers,
        is_slice=gpu.mig_profile is not None,
        is_unified=gpu.is_unified,
        note=_note(gpu),
    )


def unknown_links(hardware: Hardware) -> frozenset[str]:
    """Return the ids of the GPUs whose link is assumed: neither its speed was measured nor its generation probed."""
    timed = {speed.uuid for speed in hardware.speeds.gpus if speed.pinned_gb_s} if hardware.speeds else set()
    gpus = (gpu for gpu in hardware.gpus.gpus if gpu.uuid not in timed)
    return frozenset(device_id(gpu) for gpu in gpus if _probed_link_gb_s(gpu) is None)


def _link_gb_s(gpu: Gpu) -> float:
    return _probed_link_gb_s(gpu) or assumptions.PCIE_GB_S.value


def _probed_link_gb_s(gpu: Gpu) -> float | None:
    """Return the GB/s of the link at its highest generation, because an idle card runs it at a lower one.

    None if the probe found no link.
    """
    generation = gpu.pcie_generation_max or gpu.pcie_generation
    width = gpu.pcie_width or gpu.pcie_width_max  # a card in a narrow slot stays narrow
    if generation not in assumptions.PCIE_GT_S or not width:
        return None
    rate = assumptions.PCIE_GT_S[generation] * assumptions.PCIE_LANE_GB_S.value
    return rate * width * assumptions.PCIE_SHARE.value


def _note(gpu: Gpu) -> str:
    notes = []
    if gpu.holders:
        held = ", ".join(
            f"{h.name or 'a process'} ({h.pid})" + (f" {h.used_mib:,} MiB" if h.used_mib is not None else "")
            for h in gpu.holders
        )
        notes.append(f"in use by {held}")
    if gpu.display:
        notes.append("a screen is attached")
    notes += handicaps(gpu)
    if gpu.bandwidth_gb_s is None:
        notes.append(f"its bandwidth is unknown, taken as {assumptions.GPU_GB_S.value:g} GB/s")
    return "; ".join(notes)


def _name(gpu: Gpu) -> str:
    name = gpu.name or "unnamed GPU"
    return f"{name} slice {gpu.mig_profile}" if gpu.mig_profile and gpu.mig_profile not in name else name
