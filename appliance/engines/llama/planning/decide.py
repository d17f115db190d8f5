"""The predicted plan of a start, from its inputs: every choice carries its reason. Pure.

space.py has the other plans, which measuring compares with the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.alternatives import alternatives
from appliance.engines.llama.planning.arguments.launch import LlamaLaunch
from appliance.engines.llama.planning.arguments.passthrough_options import extra_choices, extras_of
from appliance.engines.llama.planning.experts.asked import overrides_of, used_choice
from appliance.engines.llama.planning.hardware.devices import unknown_links
from appliance.engines.llama.planning.host_memory import caches, host_memory, load_mode_of, spare_beside, unified_mib
from appliance.engines.llama.planning.inputs import MIN_CONTEXT, PlanInputs, is_read_whole, least_cache, offered_kinds
from appliance.engines.llama.planning.memory.flash import converted_layers
from appliance.engines.llama.planning.memory.kv_types import is_fast_pair
from appliance.engines.llama.planning.memory.memory import (
    host_overhead_mib,
    layers_of,
    padded,
)
from appliance.engines.llama.planning.memory.rope import rope_for, served_context
from appliance.engines.llama.planning.memory.slots import choices as slot_choices
from appliance.engines.llama.planning.memory.slots import idle_slots_stay
from appliance.engines.llama.planning.placement.batch import (
    BATCH,
    PINNED,
    SMALLER,
    predicted_speed,
    ubatch_words,
    with_batch,
    with_smaller,
)
from appliance.engines.llama.planning.placement.context import (
    AS_WHOLE,
    BY_CONTEXT,
    NO_FIT,
    TOO_LONG,
    Aim,
    ContextPlan,
    ContextRequest,
    choose_context,
)
from appliance.engines.llama.planning.placement.job_time import placement_costs
from appliance.engines.llama.planning.placement.placement import Placed, PlacementJob
from appliance.engines.llama.planning.placement.tensor_mode import (
    CLEARLY,
    GOOD_LINK_GB_S,
    SLOWEST_LINK_GB_S,
    TRUSTED,
    pairs,
    teams,
    why_not,
)
from appliance.engines.llama.planning.placement.tensor_placement import missing_mib, place_same, place_tensors
from appliance.engines.llama.planning.refusal import refusal
from appliance.engines.llama.planning.threads import threads_of
from appliance.image_facts import ImageFacts
from appliance.model import plain_name
from appliance.plan import CONTEXT_STEP, Device, Placement, Plan, Speed
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings

# Of the context without a limit in time: a cut of less than a tenth would be read hardly sooner.
CUT_WORTH = 0.9
_EXPERIMENTAL = "that mode is experimental in llama.cpp"


def aim_of(settings: Settings) -> Aim:
    aims: dict[str, Aim] = {"speed": "speed", "balanced": "balanced", "context": "context"}
    return aims[settings.mode]


def context_for(inputs: PlanInputs, aim: Aim) -> ContextPlan:
    request = wanted_context(inputs, aim)
    context_plan = choose_context(inputs.job, inputs.resources, request)
    if context_plan is None or (not request.is_explicit and context_plan.context < min(request.tokens, MIN_CONTEXT)):
        raise refusal(inputs, request.kinds[0], request.tokens)
    at_least = partial(_context_of_the_mode_before, inputs, aim, request)
    context_plan = with_batch(context_plan, inputs.job, inputs.resources, request, inputs.settings, at_least=at_least)
    context_plan = with_smaller(context_plan, inputs.job, inputs.resources, request, inputs.settings)
    if context_plan.reads_along and context_plan.context < request.tokens:
        context_plan = _not_less(context_plan, inputs, aim)
    if context_plan.bound == TOO_LONG:
        unhurried = context_for(replace(inputs, settings=replace(inputs.settings, fill_minutes=0)), aim)
        if CUT_WORTH * unhurried.context < context_plan.context:
            return unhurried
        context_plan = replace(context_plan, unhurried=unhurried)
    if request.is_explicit:
        return replace(context_plan, context=served_context(inputs.settings, inputs.model, context_plan.context))
    return context_plan


def _not_less(context_plan: ContextPlan, inputs: PlanInputs, aim: Aim) -> ContextPlan:
    """Return the decision of the mode with the next smaller context if its context is longer, else `context_plan`.

    Only mode `context` asks for a readable speed when the context is full. Tokens that cost nothing until they are
    filled are not given up for it.
    """
    before = context_for(inputs, BY_CONTEXT[BY_CONTEXT.index(aim) - 1])
    if before.context <= context_plan.context:
        return context_plan
    return replace(before, minds_full=True, reads_along=True)


def _context_of_the_mode_before(inputs: PlanInputs, aim: Aim, request: ContextRequest) -> int:
    """Return the context length of the mode with the next smaller context; 0 if there is none or --ctx-size is set."""
    before = BY_CONTEXT.index(aim) - 1
    return 0 if before < 0 or request.is_explicit else context_for(inputs, BY_CONTEXT[before]).context


def wanted_context(inputs: PlanInputs, aim: Aim) -> ContextRequest:
    settings, tokens = inputs.settings, inputs.native
    if settings.allow_disk and not settings.ctx_size:
        tokens = _from_disk(inputs, tokens)
    return ContextRequest(
        tokens=tokens,
        is_explicit=settings.ctx_size is not None,
        kinds=offered_kinds(inputs),
        aim=aim,
        fill_s=0.0 if aim == "context" else 60.0 * settings.fill_minutes,
    )


def _from_disk(inputs: PlanInputs, tokens: int) -> int:
    """Return the context length for --allow-disk, where no memory limit holds: the length that fits into memory.

    If the weights alone exceed memory, at most 4,096 tokens.
    """
    usable = inputs.spare_mib
    bounded = replace(
        inputs.resources, spare_mib=usable - least_cache(inputs.settings) - host_overhead_mib(inputs.model)
    )
    request = ContextRequest(tokens=tokens, is_explicit=False, kinds=("f16",))
    context_plan = choose_context(inputs.job, bounded, request)
    return context_plan.context if context_plan else padded(min(tokens, 4096))


def predicted(inputs: PlanInputs, image: ImageFacts, context_plan: ContextPlan, split: Choice | None = None) -> Plan:
    """Return the plan of a context decision. `split` is the choice of the split mode; None if there is nothing to
    choose."""
    settings, model, placed = inputs.settings, inputs.model, context_plan.placed
    placement, context, kv_type = placed.placement, context_plan.context, context_plan.kv_type
    ubatch = min(context_plan.ubatch, padded(context))
    job = replace(inputs.job, context=padded(context), kv_type=kv_type, ubatch=ubatch)
    mode, by_mode = load_mode_of(inputs, job, placed)
    costs = placement_costs(job, inputs.resources, placement, is_pinned=mode in PINNED)
    speed = predicted_speed(placement, placed.speed, costs, settings, model)
    threads = threads_of(settings, inputs.engine, inputs.hardware, inputs.resources.cpu, placed, costs)
    host = host_memory(inputs, placed.host, mode, bool(placement.shares))
    kept = caches(inputs, host, spare_beside(inputs, placement), kv_type=kv_type, context=context, ubatch=ubatch)
    extras = extras_of(settings, model, on_host=inputs.projector_on_host or not placement.shares)
    return Plan(
        engine=image.engine,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        context=context,
        kv_type=kv_type,
        parallel=settings.slots,
        is_embedding=model.is_embedding_model,
        memory=kept.memory,
        usable_mib=float(inputs.usable_mib - unified_mib(inputs, placement)),
        launch=LlamaLaunch(
            threads=threads.count,
            threads_batch=threads.reading,
            numa=threads.numa.mode,
            cpus=threads.cpus,
            batch=max(BATCH, ubatch),
            ubatch=ubatch,
            cache_ram_mib=kept.prompts_mib,
            flash_attention=inputs.no_flash is None,
            load_mode=mode,
            checkpoints=kept.checkpoints,
            extras=extras,
            rope=rope_for(settings, model, context),
            overrides=overrides_of(model, settings),
            idle_slots_stay=idle_slots_stay(settings, kept.memory.cache, kept.longest_mib),
        ),
        cpu_variant=inputs.kernels.variant,
        placement=placement,
        speed=speed,
        choices=(
            *_context_choices(inputs, context_plan),
            *_placement_choices(inputs, placement, speed),
            *((split,) if split else ()),
            _ubatch_choice(inputs, job, context_plan, is_pinned=mode in PINNED),
            by_mode,
            *threads.choices,
            *((inputs.kernels.choice,) if inputs.kernels.choice else ()),
            kept.by_cache,
            *kept.by_checkpoints,
            *slot_choices(settings, model, context, cache_mib=kept.memory.cache, needed_mib=kept.longest_mib),
            *used_choice(settings),
            *reasons.fixed(inputs.no_flash),
            *extra_choices(settings, model, extras, inputs.left_away, inputs.resources.devices),
            *alternatives(inputs, wanted_context(inputs, aim_of(settings)), context_plan),
        ),
    )


def _context_choices(inputs: PlanInputs, context_plan: ContextPlan) -> tuple[Choice, ...]:
    """Return the choices of the context length and of the KV cache type."""
    kv_type, has_gpu = context_plan.kv_type, bool(inputs.resources.devices)
    is_on_gpu = bool(context_plan.placed.placement.shares)
    return (
        reasons.context(inputs.settings, inputs.hardware, inputs.model, context_plan),
        reasons.kv_type(
            inputs.settings,
            context_plan,
            inputs.kv_checks,
            is_slow=has_gpu and not is_fast_pair(inputs.engine, kv_type),
            is_converted=is_on_gpu and kv_type != "f16" and bool(converted_layers(inputs.model)),
        ),
    )


def _ubatch_choice(inputs: PlanInputs, job: PlacementJob, context_plan: ContextPlan, *, is_pinned: bool) -> Choice:
    settings, placement = inputs.settings, context_plan.placed.placement
    if is_read_whole(settings, inputs.model):
        return reasons.whole_ubatch(job.ubatch)
    why = ubatch_words(job, inputs.resources, placement, settings, is_pinned=is_pinned)
    return reasons.ubatch(settings, job.ubatch, why + reasons.batch_price(context_plan))


def _placement_choices(inputs: PlanInputs, placement: Placement, speed: Speed) -> tuple[Choice, ...]:
    """Return the choices of the placement, and refusals of settings that have no effect on this machine or model.

    If the machine has no GPU at all, the placement is not worth a line: the choice of the speed replaces it.
    """
    devices, settings = inputs.resources.devices, inputs.settings
    lost = reasons.left_out(inputs.notes)
    where = (reasons.placement(placement, speed, inputs.resources, settings), *lost)
    if not (devices or lost):
        where = (reasons.speed(speed, placement, inputs.resources),)
    if not devices:
        return (*where, *reasons.without_gpu(settings))
    return (*where, *reasons.without_experts(settings, inputs.model))


def with_split(inputs: PlanInputs, found: ContextPlan) -> tuple[ContextPlan, Choice | None]:
    """Return the same context in split mode tensor if that is clearly faster than whole layers, else `found`; and the
    choice of the split mode, None if there are no two cards to choose for.

    Only combinations that were seen to work are predicted: two cards with good links, and an architecture of TRUSTED.
    The others are measured.

    The context is the one of whole layers, even if this mode has room for more: the mode is experimental, and if it
    aborts or is slower, whole layers have to serve the promised context. The KV cache type is the same or more exact.
    """
    cards = [device for device in inputs.resources.devices if not (device.is_slice or device.is_unified)]
    if len(cards) < 2 or not found.placed.placement.shares:
        return found, None
    is_known = inputs.model.architecture in TRUSTED
    first: ContextPlan | None = None
    for plan in _tensor_plans(inputs, found, tuple(pairs(cards))):
        if is_known and _is_clearly_faster(plan, found):
            return plan, reasons.split(plan, found)
        first = first or plan
    first = first or next(_tensor_plans(inputs, found, tuple(teams(cards))), None)
    return found, reasons.whole_layers(found, first, _why_whole_layers(inputs, cards, found, first))


def _is_clearly_faster(plan: ContextPlan, than: ContextPlan) -> bool:
    return plan.placed.cost * CLEARLY <= than.placed.cost and plan.half_full >= than.half_full


def _why_whole_layers(
    inputs: PlanInputs, cards: Sequence[Device], found: ContextPlan, tensor: ContextPlan | None
) -> str:
    """Return why `found` is not split by tensors. `tensor` is such a split; None if there is none."""
    model, job = inputs.model, inputs.job
    kinds = _no_rounder(offered_kinds(inputs), found.kv_type)
    impossible = [why_not(model, inputs.engine.split_modes, kind) for kind in kinds]
    if all(impossible):
        return str(impossible[0])
    if job.cpu_expert_layers or (job.gpu_layers is not None and job.gpu_layers <= len(layers_of(model))):
        return "layers stay outside of the GPUs, as asked for"
    unknown = unknown_links(inputs.hardware)
    if not any(teams(cards)):
        return reasons.slow_links(cards, SLOWEST_LINK_GB_S, unknown)
    if tensor is None:
        smallest = replace(job, context=padded(found.context), kv_type=kinds[-1], ubatch=_ubatches(inputs)[-1])
        return reasons.no_room(found, min(missing_mib(smallest, team) for team in teams(cards)))
    if tensor.placed.cost * CLEARLY > found.placed.cost:
        return f"{_EXPERIMENTAL}, so it has to be {CLEARLY:g} times as fast"
    if model.architecture not in TRUSTED:
        return f"{_EXPERIMENTAL}, and no run with {model.architecture} is known"
    if len(tensor.placed.placement.shares) > 2:
        return f"{_EXPERIMENTAL}, and predicted on two cards only"
    used = {share.gpu.id for share in tensor.placed.placement.shares}
    if slow := [card for card in cards if card.id in used and card.pinned_gb_s < GOOD_LINK_GB_S]:
        return reasons.slow_links(slow, GOOD_LINK_GB_S, unknown)
    return reasons.slower_half_full(tensor, found)


def _tensor_plans(
    inputs: PlanInputs, found: ContextPlan, cards: tuple[tuple[Device, ...], ...]
) -> Iterator[ContextPlan]:
    """Yield the fastest split by tensors for each KV cache type and ubatch, the most exact type first."""
    for kind in _no_rounder(offered_kinds(inputs), found.kv_type):
        for ubatch in _ubatches(inputs):
            job = replace(inputs.job, context=padded(found.context), kv_type=kind, ubatch=ubatch)
            all_placed = place_tensors(job, inputs.resources, inputs.engine.split_modes, cards)
            if best := min(all_placed, key=lambda placed: placed.cost, default=None):
                yield _tensor_plan(inputs, found, best, kind=kind, ubatch=ubatch)


def _ubatches(inputs: PlanInputs) -> tuple[int, ...]:
    """Return the ubatches to try; the smaller one may fit if only the buffer of the first is too large."""
    is_fixed = inputs.settings.ubatch or inputs.model.reads_whole
    return (inputs.job.ubatch,) if is_fixed else (inputs.job.ubatch, SMALLER)


def _no_rounder(kinds: Sequence[str], than: str) -> Sequence[str]:
    """Return the KV cache types that are at least as exact as `than`; all if `than` is not among them."""
    return kinds[: kinds.index(than) + 1] if than in kinds else kinds


def _tensor_plan(inputs: PlanInputs, found: ContextPlan, placed: Placed, *, kind: str, ubatch: int) -> ContextPlan:
    """Return the context decision for a placement in split mode tensor.

    It holds no figures of the search for the context, because that search compared placements of whole layers.
    """
    job = replace(inputs.job, context=padded(found.context), kv_type=kind, ubatch=ubatch)
    more = replace(job, context=padded(found.context + CONTEXT_STEP))
    costs = placement_costs(job, inputs.resources, placed.placement)
    return ContextPlan(
        kv_type=kind,
        context=found.context,
        placed=placed,
        carried={kind: found.context},
        ubatch=ubatch,
        bound=AS_WHOLE if place_same(more, inputs.resources, placed.placement, inputs.engine.split_modes) else NO_FIT,
        half_full=1000 / costs.decode_ms(found.context / 2),
        is_explicit=found.is_explicit,
    )
