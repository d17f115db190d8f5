"""How many tokens of a prompt are worked on at once where weights lie in host memory beside a GPU, and how weights are
loaded. Pure.

They are copied to the GPU once for every ubatch of a prompt, from pinned memory about twice as fast as from mapped. A
larger ubatch takes room for its buffers, so some experts more leave the GPU. Both are priced by a long prompt of the
workload: with a short one nothing is gained. None below the default is predicted: for the few MiB that it saves, plans
of better machines were worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.engines.llama.planning.context import (
    GOOD_CONTEXT,
    ContextPlan,
    ContextRequest,
    choose_context,
)
from appliance.engines.llama.planning.job_time import job_ms, placement_costs, speed_of
from appliance.engines.llama.planning.memory import UBATCH
from appliance.engines.llama.planning.placement import PlacementJob, Resources, place
from appliance.engines.llama.planning.roofline import DEPTH
from appliance.plan import CONTEXT_WORTH, SMALLEST_CONTEXT, Costs, Device, Placement, Speed
from appliance.settings import Settings, parse_jobs

BATCH = 2048
UBATCHES_GPU = (512, 1024, 2048, 4096)  # host weights are copied once a batch: twice the batch, half the copies
# Tokens of the prompt that a ubatch is priced by: a chat with a file in it, an agent's history, a long document.
LONG_PROMPTS: Mapping[str, int] = {"chat": 4096, "agent": 8192, "document": 16384}
PINNED = ("none", "dio", "mlock")  # ways to load after which weights in host memory are in the GPU's host buffer
WORTH_A_BATCH = 0.97  # of the job's time, or the smaller ubatch stays


def long_prompt(settings: Settings) -> int:
    """The mean of the workload's."""
    jobs = list(parse_jobs(settings.workload))
    whole = sum(weight for _, weight in jobs)
    return round(sum(LONG_PROMPTS[name] * weight for name, weight in jobs) / whole)


def with_batch(
    context_plan: ContextPlan, job: PlacementJob, resources: Resources, request: ContextRequest, settings: Settings
) -> ContextPlan:
    """The same decision with the ubatch that reads a long prompt soonest, its buffer counted. The context may become
    smaller for it, but stays worth its name."""
    if settings.ubatch or job.model.reads_whole or not context_plan.placed.placement.copies_weights:
        return context_plan
    for ubatch in _by_time(context_plan, job, resources, settings):
        if ubatch == job.ubatch:
            break
        found = choose_context(replace(job, ubatch=ubatch), resources, request)
        if found and _is_enough(found, context_plan):
            return found
    return context_plan


def _is_enough(found: ContextPlan, before: ContextPlan) -> bool:
    least = min(before.context, SMALLEST_CONTEXT)
    return found.context >= least and found.context * CONTEXT_WORTH >= before.context


def _by_time(context_plan: ContextPlan, job: PlacementJob, resources: Resources, settings: Settings) -> list[int]:
    """Ubatches by the time of a job with a long prompt, at a context that most need."""
    tokens = long_prompt(settings)
    at = replace(job, kv_type=context_plan.kv_type, context=min(context_plan.context, GOOD_CONTEXT))
    times: dict[int, float] = {}
    for ubatch in UBATCHES_GPU:
        of_size = replace(at, ubatch=ubatch)
        placed = place(of_size, resources) if ubatch <= at.context else None
        if placed:
            times[ubatch] = _long_job_ms(of_size, resources, placed.placement, tokens, settings)
    usual = times.get(job.ubatch, float("inf"))
    worth = {size: ms for size, ms in times.items() if size == job.ubatch or ms <= usual * WORTH_A_BATCH}
    return sorted(worth, key=lambda size: (worth[size], size))


def _long_job_ms(
    job: PlacementJob, resources: Resources, placement: Placement, tokens: int, settings: Settings
) -> float:
    costs = placement_costs(job, resources, placement, is_pinned=resources.is_pinned)
    return job_ms(costs, tokens / 2, tokens_in=tokens)


def load_mode(
    job: PlacementJob, resources: Resources, placement: Placement, settings: Settings, *, fits: bool
) -> tuple[str, str]:
    """How weights are loaded where nobody asks for a way, and why. What exceeds memory is read from disk, and only
    mapped files are."""
    if not fits:
        return "mmap", "weights exceed memory, and only mapped files are read from disk"
    if any(device.is_unified for device in _used(resources, placement)):
        why = "GPU and host share one memory: pages of the file would take room beside the weights"
        return "dio", why
    if placement.copies_weights:
        mapped, pinned = _prompt_speeds(job, resources, placement, settings)
        if pinned * WORTH_A_BATCH > mapped:
            tokens = long_prompt(settings)
            return "none", (
                f"weights in host memory are pinned: a prompt of {tokens:,} tokens is read at {pinned:,.0f} tok/s, "
                f"from mapped pages at {mapped:,.0f}"
            )
    return (
        "mmap",
        "pages are read once, shared between containers on one volume, and dropped under pressure, not swapped",
    )


def _used(resources: Resources, placement: Placement) -> list[Device]:
    used = {share.gpu.id for share in placement.shares}
    return [device for device in resources.devices if device.id in used]


def _prompt_speeds(
    job: PlacementJob, resources: Resources, placement: Placement, settings: Settings
) -> tuple[float, float]:
    """Tokens a second of a long prompt, with weights that are mapped and with pinned ones."""
    tokens = long_prompt(settings)
    mapped, pinned = (placement_costs(job, resources, placement, is_pinned=is_pinned) for is_pinned in (False, True))
    return speed_of(mapped, DEPTH, tokens).prefill_tokens_per_s, speed_of(pinned, DEPTH, tokens).prefill_tokens_per_s


def predicted_speed(placement: Placement, found: Speed, costs: Costs, settings: Settings) -> Speed:
    """Of the chat job as placed; with a long prompt where weights are copied for it."""
    return speed_of(costs, DEPTH, long_prompt(settings)) if placement.copies_weights else found


def ubatch_words(costs: Costs, settings: Settings) -> str:
    """What a ubatch is taken for, where weights are copied for every one of a prompt."""
    tokens = long_prompt(settings)
    if costs.batch == UBATCH:
        return f"llama.cpp's default: a larger one would push more off the GPU than a prompt of {tokens:,} tokens gains"
    here, usual = (speed_of(each, DEPTH, tokens).prefill_tokens_per_s for each in (costs, replace(costs, batch=UBATCH)))
    return (
        f"weights in host memory are copied to the GPU for each: a prompt of {tokens:,} tokens is read at "
        f"{here:,.0f} tok/s, with {UBATCH} at {usual:,.0f}"
    )
