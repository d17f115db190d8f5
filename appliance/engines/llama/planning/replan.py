"""A plan of an earlier start, fitted to the memory that is free now. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.arguments.launch import NODE, launch_of
from appliance.engines.llama.planning.arguments.numa import Numa
from appliance.engines.llama.planning.arguments.passthrough_options import extras_of
from appliance.engines.llama.planning.host_memory import caches, spare_beside, unified_mib
from appliance.engines.llama.planning.inputs import SPARE_SHARE, PlanInputs
from appliance.engines.llama.planning.memory.slots import idle_slots_stay
from appliance.engines.llama.planning.threads import cpus_of
from appliance.model import plain_name
from appliance.plan import Device, GpuAllocation, Placement, Plan, with_launch


def plan_now(inputs: PlanInputs, measured: Plan) -> Plan | str:
    """Return the measured plan with the caches that fit now, or a text that says what it lacks.

    Layers stay where they were, because speeds were measured with that placement. Prompt cache and checkpoints take
    the memory that is left.
    """
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
        of_all = f"{free:,.0f} are usable, of which {SPARE_SHARE:.0%} stay free"
        return f"it needs {need:,.0f} MiB of host memory without caches, and {of_all}"
    return fitted


def with_caches(inputs: PlanInputs, plan: Plan) -> Plan | None:
    """Return the plan with the prompt cache and checkpoints that fit; None if the smallest do not fit."""
    spare = spare_beside(inputs, plan.placement)
    bare = replace(plan.memory, cache=0.0, checkpoints=0.0)
    if bare.total + inputs.least_cache_mib > spare and not inputs.settings.allow_disk:
        return None
    found = caches(inputs, bare, spare, kv_type=plan.kv_type, context=plan.context, ubatch=launch_of(plan).ubatch)
    words = {choice.name: choice for choice in (found.by_cache, *found.by_checkpoints)}
    choices = tuple(words.get(choice.name, choice) for choice in plan.choices)
    return with_launch(
        replace(plan, memory=found.memory, choices=choices),
        checkpoints=found.checkpoints,
        idle_slots_stay=idle_slots_stay(inputs.settings, found.memory.cache, found.longest_mib),
        cache_ram_mib=found.prompts_mib,
    )


def _there(inputs: PlanInputs, measured: Plan, devices: list[Device]) -> Plan:
    """Return the measured plan on these devices, with their free memory, and with today's settings and files."""
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
    launch = launch_of(measured)
    if launch.extras.projector is None:  # the model did not fit with its projector
        model = replace(model, projector=None)
    extras = extras_of(settings, model, on_host=launch.extras.projector_on_host)
    # A container may have been given other CPUs of the same kinds since.
    numa = Numa(mode=launch.numa, cpus=launch.cpus if launch.numa == NODE else ())
    return with_launch(
        there, extras=extras, cpus=cpus_of(inputs.hardware.cpu, inputs.engine, numa, there.placement, launch.threads)
    )


def _same_devices(shares: tuple[GpuAllocation, ...], devices: tuple[Device, ...]) -> list[Device] | None:
    """Return the devices of a plan's shares; None if one is missing.

    They are found by id, else by name and order: a profile may come from another machine of the same kind.
    """
    left = list(devices)
    found: list[Device] = []
    for share in shares:
        same = [d for d in left if d.id == share.gpu.id] or [d for d in left if d.name == share.gpu.name]
        if not same:
            return None
        left.remove(same[0])
        found.append(same[0])
    return found
