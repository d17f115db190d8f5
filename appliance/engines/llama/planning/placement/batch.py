"""How many tokens of a prompt are worked on at once beside a GPU, and how weights are loaded. Pure.

Weights in host memory are copied to the GPU once for every ubatch of a prompt, from pinned memory about twice as fast
as from mapped. A larger ubatch takes room for its buffers, so some experts more leave the GPU. Where everything is on
one GPU it hands each expert more tokens at once, for memory that is left; no figure is known beyond 2,048. All are
priced by a job with a long prompt of the workload: with a short one nothing is gained. One below the default is taken
where the room that it leaves makes a short chat clearly faster, and a long prompt no slower: by that rule a better
machine is never worse at both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.memory.memory import UBATCH, padded
from appliance.engines.llama.planning.placement.context import (
    GOOD_CONTEXT,
    Candidate,
    ContextPlan,
    ContextRequest,
    choose_context,
    same_context,
)
from appliance.engines.llama.planning.placement.intervals import with_intervals
from appliance.engines.llama.planning.placement.job_time import job_ms, placement_costs, speed_of
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob, Resources, is_unbeatable, place
from appliance.engines.llama.planning.placement.roofline import DEPTH
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR
from appliance.model import Model
from appliance.plan import (
    CHAT_TOKENS_IN,
    CONTEXT_WORTH,
    SMALLEST_CONTEXT,
    Costs,
    Device,
    Placement,
    Speed,
    long_prompt,
)
from appliance.settings import Settings

BATCH = 2048
SMALLER = 256  # where the default's buffer pushes layers off a faster card
CLEARLY_FASTER = 0.98  # of a chat's time: measuring could not tell less from chance
UBATCHES_GPU = (512, 1024, 2048, 4096)  # host weights are copied once a batch: twice the batch, half the copies
PINNED = ("none", "dio", "mlock")  # ways to load after which weights in host memory are in the GPU's host buffer
WORTH_A_BATCH = 0.97  # of the job's time, or the smaller ubatch stays
CONTEXT_KEPT = 0.9  # of the context, where everything is on a GPU
# What a larger ubatch may take, by the share of a long job's time that it saves: of the context twice that share; of a
# short chat's time, which gains nothing, as much, and half of it in mode `speed`.
CONTEXT_FOR, CHAT_FOR, CHAT_FOR_IN_SPEED = 2.0, 1.0, 0.5
HALF = 0.5  # of the context at least stays in mode `speed`; elsewhere what stays is still worth its name


def with_batch(
    context_plan: ContextPlan,
    job: PlacementJob,
    resources: Resources,
    request: ContextRequest,
    settings: Settings,
    *,
    at_least: Callable[[], int],
) -> ContextPlan:
    """The same decision with the ubatch that reads a long prompt soonest, its buffer counted. The context may become
    smaller for it, but stays worth its name, and `at_least` what a mode has that asks for less: tokens."""
    shares = context_plan.placed.placement.shares
    if settings.ubatch or job.model.reads_whole or not shares:
        return context_plan
    is_whole = context_plan.placed.placement.is_whole
    if is_whole and len(shares) > 1:
        return context_plan  # several work at once on the parts of a batch, and a larger part leaves them fewer
    # Where weights are copied `speed` goes by the job itself, in which the prompt counts: answers alone are no bar.
    bar = None if request.aim == "speed" and not is_whole else context_plan
    least = 1 / CONTEXT_WORTH if bar else HALF
    is_enough = _is_still_whole if is_whole else partial(_is_enough, least=least, request=request)
    for ubatch in _by_time(context_plan, job, resources, settings):
        if ubatch == job.ubatch:
            break
        found = choose_context(replace(job, ubatch=ubatch), resources, request, bar)
        if found is None or not is_enough(found, context_plan, at_least):
            continue
        saved, lost = (
            _saved(found, context_plan, job, resources, tokens) for tokens in (long_prompt(settings), CHAT_TOKENS_IN)
        )
        if _pays(found, context_plan, saved, -lost, has_bar=bar is not None):
            usual = Candidate(kv_type=context_plan.kv_type, context=context_plan.context, placed=context_plan.placed)
            return replace(found, usual=usual, usual_knees=context_plan.knees)
    return context_plan


def with_smaller(
    context_plan: ContextPlan, job: PlacementJob, resources: Resources, request: ContextRequest, settings: Settings
) -> ContextPlan:
    """At least the same context with a ubatch below the default, where the room that it leaves on faster cards makes a
    short chat clearly faster and one with a long prompt no slower."""
    placement = context_plan.placed.placement
    if settings.ubatch or job.model.reads_whole or not placement.shares or is_unbeatable(placement, resources.devices):
        return context_plan
    small = replace(job, ubatch=SMALLER)
    at = replace(small, context=padded(context_plan.context))
    wins = partial(_wins, small, before=context_plan, resources=resources, settings=settings)
    placed = {kind: place(replace(at, kv_type=kind), resources) for kind in request.kinds}
    if not any(each and wins(kind, each) for kind, each in placed.items()):
        return context_plan  # before more is computed
    found = same_context(small, resources, request, context_plan, wins)
    if found is None:
        return context_plan
    usual = Candidate(kv_type=context_plan.kv_type, context=context_plan.context, placed=context_plan.placed)
    return replace(found, usual=usual)


def _wins(
    job: PlacementJob, kind: str, placed: Placed, *, before: ContextPlan, resources: Resources, settings: Settings
) -> bool:
    if placed.cost > CLEARLY_FASTER * before.placed.cost:
        return False
    here = (replace(job, kv_type=kind), placed.placement)
    there = (replace(job, kv_type=before.kv_type, ubatch=before.ubatch), before.placed.placement)

    def taken_ms(job: PlacementJob, placement: Placement, tokens: int) -> float:
        return job_ms(
            placement_costs(job, resources, placement, is_pinned=resources.is_pinned), DEPTH, tokens_in=tokens
        )

    chat, long = CHAT_TOKENS_IN, long_prompt(settings)
    is_faster = taken_ms(*here, chat) <= CLEARLY_FASTER * taken_ms(*there, chat)
    return is_faster and taken_ms(*here, long) <= taken_ms(*there, long)


def _saved(found: ContextPlan, before: ContextPlan, job: PlacementJob, resources: Resources, tokens: int) -> float:
    """The share of the time of a job with a prompt of so many tokens; negative where it takes longer."""

    def taken_ms(plan: ContextPlan) -> float:
        of_plan = replace(job, kv_type=plan.kv_type, ubatch=plan.ubatch)
        return _long_job_ms(of_plan, resources, plan.placed.placement, tokens)

    return 1 - taken_ms(found) / taken_ms(before)


def _pays(found: ContextPlan, before: ContextPlan, saved: float, lost: float, *, has_bar: bool) -> bool:
    """`lost` is the share of a short chat's time."""
    if 1 - found.context / before.context > CONTEXT_FOR * saved:
        return False
    return lost <= (CHAT_FOR if has_bar else CHAT_FOR_IN_SPEED) * saved


def _is_enough(
    found: ContextPlan, before: ContextPlan, at_least: Callable[[], int], *, least: float, request: ContextRequest
) -> bool:
    """`at_least` is a plan of its own: asked where the answer matters. `least` is a share of the
    context."""
    if found.context >= before.context:
        return True
    if request.is_below_floor(found.context, before.context):
        return False
    is_usable = found.context >= max(SMALLEST_CONTEXT, least * before.context)
    return is_usable and found.context >= at_least()


def _is_still_whole(found: ContextPlan, before: ContextPlan, at_least: Callable[[], int]) -> bool:
    """Where everything is on a GPU a larger ubatch saves less: it is taken for little but free memory."""
    here, there = found.placed.placement, before.placed.placement
    if not here.is_whole or len(here.shares) > len(there.shares) or found.kv_type != before.kv_type:
        return False
    if found.context >= before.context:
        return True
    is_ended = bool(before.bound)  # what is all that the model has, or was asked for, stays so
    return is_ended and found.context >= CONTEXT_KEPT * before.context and found.context >= at_least()


def _by_time(context_plan: ContextPlan, job: PlacementJob, resources: Resources, settings: Settings) -> list[int]:
    """Ubatches by the time of a job with a long prompt, at a context that most need. A larger one has to be worth it
    against each smaller."""
    tokens = long_prompt(settings)
    context = context_plan.context if context_plan.is_explicit else min(context_plan.context, GOOD_CONTEXT)
    at = replace(job, kv_type=context_plan.kv_type, context=context)
    worth: dict[int, float] = {}
    is_whole = context_plan.placed.placement.is_whole
    for ubatch in (size for size in UBATCHES_GPU if not is_whole or size <= BATCH):
        of_size = replace(at, ubatch=ubatch)
        placed = _placed(of_size, context_plan, resources) if ubatch <= at.context else None
        if placed is None:
            continue
        taken = _long_job_ms(of_size, resources, placed, tokens)
        if ubatch == job.ubatch or taken <= min(worth.values(), default=float("inf")) * WORTH_A_BATCH:
            worth[ubatch] = taken
    return sorted(worth, key=lambda size: (worth[size], size))


def _placed(job: PlacementJob, context_plan: ContextPlan, resources: Resources) -> Placement | None:
    """With everything on one GPU, a ubatch that keeps it there moves nothing."""
    before = context_plan.placed.placement
    if before.is_whole:
        return before
    placed = place(job, resources)
    return placed.placement if placed else None


def _long_job_ms(job: PlacementJob, resources: Resources, placement: Placement, tokens: int) -> float:
    costs = long_costs(job, resources, placement, tokens, is_pinned=resources.is_pinned)
    return job_ms(costs, tokens / 2, tokens_in=tokens)


def long_costs(job: PlacementJob, resources: Resources, placement: Placement, tokens: int, *, is_pinned: bool) -> Costs:
    """Of a prompt of so many tokens. What a ubatch above the default gains on a card by arithmetic alone is more than
    published figures show: of that only their share counts."""
    if not placement.is_whole or job.ubatch <= UBATCH:
        prompt = tokens if placement.is_whole else 0
        return placement_costs(job, resources, placement, is_pinned=is_pinned, prompt=prompt)
    here, usual = (
        placement_costs(replace(job, ubatch=ubatch), resources, placement, is_pinned=is_pinned, prompt=tokens)
        for ubatch in (job.ubatch, UBATCH)
    )
    gain = 1 + assumptions.LARGE_UBATCH_SHARE.value * (usual.gpu_prefill_ms / here.gpu_prefill_ms - 1)
    return replace(here, gpu_prefill_ms=usual.gpu_prefill_ms / gain)


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


def predicted_speed(placement: Placement, found: Speed, costs: Costs, settings: Settings, model: Model) -> Speed:
    """Of the chat job as placed; with a long prompt where weights are copied for it."""
    speed = speed_of(costs, DEPTH, long_prompt(settings)) if placement.copies_weights else found
    return with_intervals(speed, placement, model)


def _lacking(
    job: PlacementJob, resources: Resources, placement: Placement, settings: Settings, *, is_pinned: bool
) -> str:
    """What host memory keeps a larger ubatch away, and what it would read; empty if memory is not the reason."""
    if not placement.copies_weights or job.ubatch == UBATCHES_GPU[-1]:
        return ""
    tokens, largest = long_prompt(settings), replace(job, ubatch=UBATCHES_GPU[-1])
    if largest.context < largest.ubatch or place(largest, resources) is not None:
        return ""
    found = place(largest, replace(resources, spare_mib=float("inf"), tables={}))
    if found is None:
        return ""
    missing = found.host.total - resources.spare_mib
    costs = (
        placement_costs(each, resources, where, is_pinned=is_pinned)
        for each, where in ((job, placement), (largest, found.placement))
    )
    here, there = (speed_of(each, DEPTH, tokens).prefill_tokens_per_s for each in costs)
    if here >= WORTH_A_BATCH * there:
        return ""
    return (
        f"{largest.ubatch} would read a prompt of {tokens:,} tokens at {there:,.0f} tok/s, not {here:,.0f}, and needs "
        f"at least {missing:,.0f} MiB more of host memory: its buffer takes the room of experts on the GPU; a smaller "
        f"quantization has that room as well"
    )


def ubatch_words(
    job: PlacementJob, resources: Resources, placement: Placement, settings: Settings, *, is_pinned: bool
) -> str:
    """What a ubatch is taken for; empty where it decides nothing."""
    if not placement.shares or (placement.is_whole and job.ubatch == UBATCH):
        return ""
    tokens = long_prompt(settings)
    if job.ubatch < UBATCH:
        is_tensor = placement.split_mode == TENSOR
        gain = "makes split mode tensor the clearly faster one" if is_tensor else "leaves room on faster cards"
        return f"its smaller buffer {gain}"
    if job.ubatch == UBATCH:
        if words := _lacking(job, resources, placement, settings, is_pinned=is_pinned):
            return f"llama.cpp's default: {words}"
        return f"llama.cpp's default: a larger one would push more off the GPU than a prompt of {tokens:,} tokens gains"
    costs = long_costs(job, resources, placement, tokens, is_pinned=is_pinned)
    if placement.copies_weights:
        usual, why = replace(costs, batch=UBATCH), "weights in host memory are copied to the GPU for each: "
    else:
        usual = long_costs(replace(job, ubatch=UBATCH), resources, placement, tokens, is_pinned=is_pinned)
        why = ""
    here, before = (speed_of(each, DEPTH, tokens).prefill_tokens_per_s for each in (costs, usual))
    more = _lacking(job, resources, placement, settings, is_pinned=is_pinned)
    words = f"{why}a prompt of {tokens:,} tokens is read at {here:,.0f} tok/s, with {UBATCH} at {before:,.0f}"
    return f"{words}; {more}" if more else words
