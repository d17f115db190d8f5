"""A plan of an earlier start in the memory that is free now. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.decide import (
    PlanInputs,
    kept_checkpoints,
    prompt_cache,
    unified_mib,
)
from appliance.engines.llama.planning.extras import extras_of
from appliance.engines.llama.planning.launch import launch_of, with_launch
from appliance.engines.llama.planning.slots import conversation_mib, idle_slots_stay
from appliance.model import plain_name
from appliance.plan import Device, GpuAllocation, Placement, Plan


def plan_now(inputs: PlanInputs, measured: Plan) -> Plan | str:
    """Or what it lacks. Its layers lie where they lay: what was measured was that. Caches of prompts and checkpoints
    take what is left."""
    before = measured.placement.shares
    devices = _same_devices(before, inputs.resources.devices)
    if devices is None:
        return f"a GPU that it used is not there: {', '.join(share.gpu.name for share in before)}"
    for device, share in zip(devices, before, strict=True):
        if share.memory.total > device.free_mib and not device.is_unified:
            return f"it needs {share.memory.total:,.0f} MiB of {device.name}, and {device.free_mib:,.0f} are free"
    there = _there(inputs, measured, devices)
    fitted = with_caches(inputs, there)
    if fitted is None:
        need, free = there.memory.total - there.memory.cache - there.memory.checkpoints, there.usable_mib
        return f"it needs {need:,.0f} MiB of host memory without caches, and {free:,.0f} are usable"
    return fitted


def with_caches(inputs: PlanInputs, plan: Plan) -> Plan | None:
    """With the caches of prompts and checkpoints that fit beside it; None when not even the least do."""
    spare = inputs.spare_mib - unified_mib(inputs, plan.placement)
    bare = replace(plan.memory, cache=0.0, checkpoints=0.0)
    if bare.total + inputs.least_cache_mib > spare and not inputs.settings.allow_disk:
        return None
    checkpoints, host, by_checkpoints = kept_checkpoints(inputs, bare, plan.kv_type, spare)
    ubatch = launch_of(plan).ubatch
    longest = conversation_mib(inputs.model, plan.kv_type, plan.context, ubatch=ubatch, checkpoints=checkpoints)
    host, by_cache = prompt_cache(inputs, host, plan.kv_type, spare, longest)
    words = {choice.name: choice for choice in (by_cache, *by_checkpoints)}
    choices = tuple(words.get(choice.name, choice) for choice in plan.choices)
    return with_launch(
        replace(plan, memory=host, choices=choices),
        checkpoints=checkpoints,
        idle_slots_stay=idle_slots_stay(inputs.settings, host.cache, longest),
        cache_ram_mib=int(host.cache),
    )


def _there(inputs: PlanInputs, measured: Plan, devices: list[Device]) -> Plan:
    """On these devices, with what is free on them, and with the files of today."""
    pairs = zip(measured.placement.shares, devices, strict=True)
    shares = tuple(replace(share, gpu=device) for share, device in pairs)
    settings, model = inputs.settings, inputs.model
    there = replace(
        measured,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        parallel=inputs.parallel,
        cpu_variant=inputs.kernels.variant,
        placement=replace(measured.placement, shares=shares),
        usable_mib=inputs.usable_mib - unified_mib(inputs, Placement(shares=shares)),
    )
    if kernels := inputs.kernels.choice:  # a pinned profile may be of an image with other variants
        choices = (kernels if choice.name == kernels.name else choice for choice in there.choices)
        there = replace(there, choices=tuple(choices))
    before = launch_of(measured).extras
    if before.projector is None:  # the model did not fit beside it
        model = replace(model, projector=None)
    return with_launch(there, extras=extras_of(settings, model, on_host=before.projector_on_host))


def _same_devices(shares: tuple[GpuAllocation, ...], devices: tuple[Device, ...]) -> list[Device] | None:
    """By id; a profile that was made on another machine of the same kind finds its cards by name and order."""
    left = list(devices)
    found: list[Device] = []
    for share in shares:
        same = [d for d in left if d.id == share.gpu.id] or [d for d in left if d.name == share.gpu.name]
        if not same:
            return None
        left.remove(same[0])
        found.append(same[0])
    return found
