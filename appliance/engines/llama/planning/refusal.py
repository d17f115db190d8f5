"""The error for a model that does not fit: the memory that it needs, the memory there is, and how much is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.inputs import MIN_CONTEXT, SPARE_SHARE, PlanInputs, least_cache
from appliance.engines.llama.planning.memory.memory import (
    host_overhead_mib,
    padded,
    weights_mib,
)
from appliance.engines.llama.planning.placement.placement import PlacementJob, Resources, place
from appliance.errors import ModelDoesNotFitError


def refusal(inputs: PlanInputs, kv_type: str, request: int) -> ModelDoesNotFitError:
    """Return the error for a model that does not fit with `request` tokens of context, with figures.

    Mapped weights would start all the same, and then be read from disk for every token: --allow-disk permits that.
    """
    settings = inputs.settings
    least = settings.ctx_size or min(request, MIN_CONTEXT)
    anywhere = replace(inputs.resources, devices=(), spare_mib=float("inf"))
    job = replace(inputs.job, context=padded(least), kv_type=kv_type, gpu_layers=None, cpu_expert_layers=None)
    placed = place(job, anywhere)
    overhead = host_overhead_mib(inputs.model) + (placed.host.overhead if placed else 0.0)
    need = replace(placed.host, cache=least_cache(settings, is_bare=True), overhead=overhead) if placed else None
    sizes = reasons.needs(need, kv_type, padded(least)) if need else "more than anything"
    gpus = "".join(f"; {d.free_mib:,.0f} MiB on {d.name}" for d in inputs.resources.devices)
    message = (
        f"model does not fit: {inputs.model.title} needs {sizes}, and {inputs.spare_mib:,.0f} of "
        f"{inputs.usable_mib:,.0f} MiB may be used ({reasons.limit(inputs.hardware)}; "
        f"{SPARE_SHARE:.0%} stay free){gpus}"
        f"{_lacking(inputs, replace(inputs.job, context=padded(least), kv_type=kv_type))}"
    )
    smaller = "a smaller --ctx-size, " if settings.ctx_size else ""
    smaller += "a smaller --cache-ram-mib, " if settings.cache_ram_mib else ""
    smaller += "--mmproj off, " if inputs.model.projector else ""
    if inputs.resources.devices:
        smaller += "a smaller --gpu-layers, " if settings.gpu_layers else ""
        smaller += "another --n-cpu-moe, " if settings.n_cpu_moe else ""
    return ModelDoesNotFitError(
        message,
        hint=f"use {smaller}a smaller model or quantization, raise the limit, or --allow-disk on to read from disk",
    )


def _lacking(inputs: PlanInputs, job: PlacementJob) -> str:
    """Return words on how much more memory would be enough: on the host alone, or on the first GPU alone."""
    resources = inputs.resources

    def with_host(more: int) -> Resources:
        return replace(resources, spare_mib=resources.spare_mib + more)

    def with_gpu(at: int, more: int) -> Resources:
        grown = tuple(
            replace(device, free_mib=device.free_mib + (more if index == at else 0))
            for index, device in enumerate(resources.devices)
        )
        return replace(resources, devices=grown)

    ways = [("of host memory", with_host)]
    ways += [
        (f"on {device.name}", partial(with_gpu, at))
        for at, device in enumerate(resources.devices[:1])
        if not device.is_unified
    ]
    found = [f"{more:,} MiB {where}" for where, grown in ways if (more := _least_more(job, grown)) is not None]
    return f"; missing are {' or '.join(found)}" if found else ""


def _least_more(job: PlacementJob, grown: Callable[[int], Resources]) -> int | None:
    """Return the fewest MiB with which `job` fits, found by halving; None if no amount is enough."""
    low, high = 0, int(2 * weights_mib(job.model)) + 65536
    if place(job, grown(high)) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if place(job, grown(middle)) else (middle, high)
    return high
