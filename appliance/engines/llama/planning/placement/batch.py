"""Ubatch and load mode of plans with a GPU. Pure.

Weights in host memory are copied to the GPU once for every ubatch of a prompt, from pinned memory about twice as fast
as from mapped memory. A larger ubatch needs larger buffers, so more experts leave the GPU. If everything lies on one
GPU, a larger ubatch gives each expert more tokens at once and takes free memory; no figure is known beyond 2,048. Both
are priced by a job with a long prompt of the workload, because short prompts gain nothing.

An ubatch below the default is taken if the memory it frees makes a short chat clearly faster, and a long prompt no
slower. By that rule a better machine is never worse at both.
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
SMALLER = 256  # tried in case the default's larger buffer pushes layers off a faster card
CLEARLY_FASTER = 0.98  # share of a chat's time: measuring could not tell a smaller gain from chance
UBATCHES_GPU = (512, 1024, 2048, 4096)  # host weights are copied once a ubatch: twice the ubatch, half the copies
PINNED = ("none", "dio", "mlock")  # load modes that put weights in host memory into the GPU's (pinned) host buffer
WORTH_A_BATCH = 0.97  # a larger ubatch has to bring the job's time down to this share
CONTEXT_KEPT = 0.9  # share of the context that a larger ubatch has to keep if everything is on a GPU
# Price of a larger ubatch, in multiples of the share of a long job's time that it saves: the share of the context that
# it may take; the share by which a short chat, which gains nothing, may be slower; the same in mode `speed`.
CONTEXT_FOR, CHAT_FOR, CHAT_FOR_IN_SPEED = 2.0, 1.0, 0.5
HALF = 0.5  # share of the context that stays at least in mode `speed`; in other modes 1 / CONTEXT_WORTH


def with_batch(
    context_plan: ContextPlan,
    job: PlacementJob,
    resources: Resources,
    request: ContextRequest,
    settings: Settings,
    *,
    at_least: Callable[[], int],
) -> ContextPlan:
    """Return the decision with the ubatch that reads a long prompt fastest, with its buffer counted.

    The context may become smaller, within the limits above, but never smaller than `at_least` returns: the tokens of
    the mode with the next smaller context.
    """
    shares = context_plan.placed.placement.shares
    if settings.ubatch or job.model.reads_whole or not shares:
        return context_plan
    is_whole = context_plan.placed.placement.is_whole
    if is_whole and len(shares) > 1:
        return context_plan  # several cards work on different ubatches at once: larger ones give them fewer
    # If weights are copied, mode `speed` judges by the whole job with its prompt, so decode alone sets no limit.
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
    """Return the decision with ubatch SMALLER if that makes a short chat clearly faster and a long prompt no slower.

    Its smaller buffer leaves more room on faster cards, or room on a card at all. The context is at least as long as
    before.
    """
    placement = context_plan.placed.placement
    devices = resources.devices
    if settings.ubatch or job.model.reads_whole or not devices or is_unbeatable(placement, devices):
        return context_plan
    small = replace(job, ubatch=SMALLER)
    at = replace(small, context=padded(context_plan.context))
    wins = partial(_wins, small, before=context_plan, resources=resources, settings=settings)
    placed = {kind: place(replace(at, kv_type=kind), resources) for kind in request.kinds}
    if not any(each and wins(kind, each) for kind, each in placed.items()):
        return context_plan  # no type gains, so the search below is spared
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
    """Return the saved share of the time of a job with a prompt of `tokens`; negative if the job takes longer."""

    def taken_ms(plan: ContextPlan) -> float:
        of_plan = replace(job, kv_type=plan.kv_type, ubatch=plan.ubatch)
        return _long_job_ms(of_plan, resources, plan.placed.placement, tokens)

    return 1 - taken_ms(found) / taken_ms(before)


def _pays(found: ContextPlan, before: ContextPlan, saved: float, lost: float, *, has_bar: bool) -> bool:
    """Return True if the saved share of a long job's time is worth the context and the time of short chats.

    `lost` is the share by which a short chat becomes slower.
    """
    if 1 - found.context / before.context > CONTEXT_FOR * saved:
        return False
    return lost <= (CHAT_FOR if has_bar else CHAT_FOR_IN_SPEED) * saved


def _is_enough(
    found: ContextPlan, before: ContextPlan, at_least: Callable[[], int], *, least: float, request: ContextRequest
) -> bool:
    """Return True if the context is still large enough. `least` is the share of the former context that has to stay.

    `at_least` computes a whole decision, so it is called last.
    """
    if found.context >= before.context:
        return True
    if request.is_below_floor(found.context, before.context):
        return False
    is_usable = found.context >= max(SMALLEST_CONTEXT, least * before.context)
    return is_usable and found.context >= at_least()


def _is_still_whole(found: ContextPlan, before: ContextPlan, at_least: Callable[[], int]) -> bool:
    """Return True if everything still lies on no more GPUs than before, at little or no loss of context.

    If everything is on a GPU, a larger ubatch saves less, so it may take little else than free memory.
    """
    here, there = found.placed.placement, before.placed.placement
    if not here.is_whole or len(here.shares) > len(there.shares) or found.kv_type != before.kv_type:
        return False
    if found.context >= before.context:
        return True
    is_ended = bool(before.bound)  # False for the native length and for --ctx-size: neither is shortened
    least = max(CONTEXT_KEPT * before.context, min(before.context, SMALLEST_CONTEXT))
    return is_ended and found.context >= least and found.context >= at_least()


def _by_time(context_plan: ContextPlan, job: PlacementJob, resources: Resources, settings: Settings) -> list[int]:
    """Return the ubatches, the fastest first, by the time of a job with a long prompt.

    The job runs at a usual context length. A larger ubatch is listed only if it saves enough against every smaller one.
    """
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
    """Return the placement with this ubatch; None if none fits. A plan whole on one GPU keeps its placement."""
    before = context_plan.placed.placement
    if before.is_whole:
        return before
    placed = place(job, resources)
    return placed.placement if placed else None


def _long_job_ms(job: PlacementJob, resources: Resources, placement: Placement, tokens: int) -> float:
    costs = long_costs(job, resources, placement, tokens, is_pinned=resources.is_pinned)
    return job_ms(costs, tokens / 2, tokens_in=tokens)


def long_costs(job: PlacementJob, resources: Resources, placement: Placement, tokens: int, *, is_pinned: bool) -> Costs:
    """Return the costs of a plan that reads a prompt of `tokens`.

    By arithmetic an ubatch above the default gains more on a card than published figures show. So only a share of that
    gain counts (LARGE_UBATCH_SHARE).
    """
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
    """Return the load mode if --load-mode is auto, and the reason.

    `fits` is False if weights exceed host memory: then they are mapped, because only mapped files are read from disk
    on demand.
    """
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
    """Return the prefill speed of a long prompt, tokens/s, with mapped weights and with pinned weights."""
    tokens = long_prompt(settings)
    mapped, pinned = (placement_costs(job, resources, placement, is_pinned=is_pinned) for is_pinned in (False, True))
    return speed_of(mapped, DEPTH, tokens).prefill_tokens_per_s, speed_of(pinned, DEPTH, tokens).prefill_tokens_per_s


def predicted_speed(placement: Placement, found: Speed, costs: Costs, settings: Settings, model: Model) -> Speed:
    """Return the predicted speed with its intervals: in the chat job, or with a long prompt if weights are copied."""
    speed = speed_of(costs, DEPTH, long_prompt(settings)) if placement.copies_weights else found
    return with_intervals(speed, placement, model)


def _lacking(
    job: PlacementJob, resources: Resources, placement: Placement, settings: Settings, *, is_pinned: bool
) -> str:
    """Return words on the host memory that the largest ubatch lacks, and its speed; "" if memory is not the reason."""
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
    """Return the reason for the ubatch in words; "" if the plan uses no GPU, or the default with all on GPUs."""
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
        return f"llama.cpp's default: a larger one costs more room on the GPU than a prompt of {tokens:,} tokens gains"
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
