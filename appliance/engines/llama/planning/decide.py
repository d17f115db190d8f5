"""(Settings, ImageFacts, EngineFacts, Hardware, Model) -> Plan: pure, and every choice carries its reason.

The first plan is the prediction; the others are space.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from appliance.engines.llama.planning import assumptions, reasons
from appliance.engines.llama.planning.batch import (
    BATCH,
    PINNED,
    load_mode,
    predicted_speed,
    ubatch_words,
    with_batch,
)
from appliance.engines.llama.planning.beside import with_adapters
from appliance.engines.llama.planning.context import Aim, ContextPlan, ContextRequest, choose_context
from appliance.engines.llama.planning.cpu_variant import choose_kernels
from appliance.engines.llama.planning.devices import usable_devices
from appliance.engines.llama.planning.engine_args import check_engine_args
from appliance.engines.llama.planning.extras import extra_choices, extras_of
from appliance.engines.llama.planning.flash import EXACT_TYPES, why_no_kernel
from appliance.engines.llama.planning.job_time import placement_costs
from appliance.engines.llama.planning.kv_types import is_fast_pair, kv_candidates
from appliance.engines.llama.planning.launch import LlamaLaunch
from appliance.engines.llama.planning.limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.memory import (
    CHECKPOINTS_MAX,
    UBATCH,
    Copies,
    can_keep,
    checkpoint_mib,
    copies,
    drafts_mib,
    host_overhead_mib,
    padded,
    weights_mib,
)
from appliance.engines.llama.planning.numa import check_numa, numa_modes
from appliance.engines.llama.planning.placement import Placed, PlacementJob, Resources, place
from appliance.engines.llama.planning.rates import cpu_rates
from appliance.engines.llama.planning.rope import check_context, rope_for, served_context
from appliance.engines.llama.planning.slots import NO_ROOM, conversation_mib, idle_slots_stay, slots
from appliance.engines.llama.planning.slots import choices as slot_choices
from appliance.engines.llama.planning.speculation import check_speculation
from appliance.errors import ConfigError, ModelDoesNotFitError, ModelUnreadableError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, Projector, plain_name
from appliance.plan import CONTEXT_STEP, Device, Kernels, KvCheck, Memory, Placement, Plan, Speed, k_and_v
from appliance.plan.choice import Choice
from appliance.probe import Hardware
from appliance.settings import Settings
from appliance.values import dataclass

WHOLE_UBATCH_MAX = 8192  # of a model that reads a text in one batch; the masks grow with its square
MIN_CONTEXT = CONTEXT_STEP
CACHE_MAX_MIB = 8192.0  # llama-server's own default
CACHE_MIN_MIB = 128.0
CACHE_SPARE = 0.05  # beside one conversation that fills the context, for a side request
SPARE_SHARE = 0.03  # of usable memory, left alone: page cache for the weights' file, other processes of the container
CHECKPOINTS_SHARE = 0.25  # of what is left


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The facts of one start, and what follows from them at once."""

    settings: Settings
    engine: EngineFacts
    hardware: Hardware
    model: Model
    kernels: Kernels
    resources: Resources
    notes: tuple[str, ...]  # devices that are not used, and why
    kv_checks: tuple[KvCheck, ...] = ()  # on types of the KV cache below q8_0
    limits: Limits = NO_LIMITS
    is_bare: bool = False  # memory is so short that there is a model, or the prompt cache and context checkpoints
    projector_on_host: bool = False  # though there is a GPU
    left_away: Projector | None = None  # since the model would not fit beside it

    @property
    def usable_mib(self) -> float:
        """Of host memory."""
        return self.limits.of_host(self.hardware.memory)

    @property
    def job(self) -> PlacementJob:
        return PlacementJob(
            model=self.model,
            context=0,
            kv_type="f16",
            ubatch=usual_ubatch(self.settings, self.model),
            parallel=slots(self.settings),
            projector_on_host=self.projector_on_host,
            gpu_layers=self.settings.gpu_layers,
            cpu_expert_layers=self.settings.n_cpu_moe,
            has_flash=self.no_flash is None,
        )

    @property
    def no_flash(self) -> str | None:
        """Why flash attention is off."""
        return why_no_kernel(self.model) if self.resources.devices else None

    @property
    def parallel(self) -> int:
        """Slots."""
        return slots(self.settings)

    @property
    def least_cache_mib(self) -> float:
        """Of prompts."""
        return least_cache(self.settings, is_bare=self.is_bare)

    @property
    def spare_mib(self) -> float:
        """Of host memory, what may be filled."""
        return self.usable_mib * (1 - SPARE_SHARE)


def is_read_whole(settings: Settings, model: Model) -> bool:
    """Whether the batch is as long as the longest text."""
    return model.reads_whole and not settings.ubatch


def usual_ubatch(settings: Settings, model: Model) -> int:
    if is_read_whole(settings, model):
        return min(padded(settings.ctx_size or model.native_context), WHOLE_UBATCH_MAX)
    return settings.ubatch or UBATCH


def check(settings: Settings, engine: EngineFacts, model: Model) -> None:
    check_speculation(settings, engine, model)
    check_numa(settings, engine)
    check_context(settings, model)
    check_engine_args(settings, engine)
    if model.cache_kind != "attention":
        message = f"model cannot be planned yet: {model.path}: {model.cache_reason}"
        raise ModelUnreadableError(message, hint="use a model of a supported architecture")
    if settings.kv_type != "auto" and not set(k_and_v(settings.kv_type)) <= set(engine.kv_types):
        message = f"setting kv_type is not offered by this engine: '{settings.kv_type}' ({settings.sources['kv_type']})"
        raise ConfigError(message, hint=f"this image offers {', '.join(engine.kv_types)}")
    if settings.kv_type != "auto" and not can_keep(model, settings.kv_type):
        message = (
            f"setting kv_type does not suit this model: '{settings.kv_type}' ({settings.sources['kv_type']}), "
            f"whose heads of {model.key_length} and {model.value_length} values are no multiples of its blocks of 32"
        )
        raise ConfigError(message, hint="use f16")


def plan_inputs(
    settings: Settings,
    image: ImageFacts,
    engine: EngineFacts,
    hardware: Hardware,
    model: Model,
    kernels: Kernels | None = None,
    limits: Limits = NO_LIMITS,
) -> PlanInputs:
    """`kernels` are those that were chosen with what is remembered of this CPU; without them nothing is."""
    model = with_adapters(model)
    kernels = kernels or choose_kernels(settings, engine, hardware.cpu)
    found, notes = usable_devices(hardware, image, engine, limits, reserve_mib=settings.reserve_mib)
    devices = tuple(_beside_pages(device, settings, model) for device in _chosen(settings, found))
    if devices:
        _check_flash(settings, model)
    usable = limits.of_host(hardware.memory)
    more = 0.0 if devices else copies(model, kernels.isa).more
    bare = float("inf") if settings.allow_disk else usable * (1 - SPARE_SHARE) - host_overhead_mib(model) - more
    spare = bare - least_cache(settings) - slots(settings) * checkpoint_mib(model, "f16")
    measured = hardware.speeds.dram_gb_s if hardware.speeds else None
    dram = (measured or assumptions.DRAM_GB_S.value) * assumptions.DRAM_SHARE.value
    cpu = cpu_rates(kernels.isa, max(1, hardware.cpu.cores), dram)
    inputs = PlanInputs(
        settings=settings,
        engine=engine,
        hardware=hardware,
        model=model,
        kernels=kernels,
        resources=Resources(
            devices=devices,
            spare_mib=spare,
            dram_gb_s=cpu.gb_s(cpu.cores),
            dram_is_measured=measured is not None,
            is_pinned=settings.load_mode in ("auto", *PINNED) and not settings.allow_disk,
            cpu=cpu,
        ),
        notes=notes,
        limits=limits,
    )
    return inputs if _has_room(inputs) else _bared(inputs, bare)


def _has_room(inputs: PlanInputs) -> bool:
    """For the smallest context that would be served, in any type of the cache, and the least caches beside it."""
    least = inputs.settings.ctx_size or min(inputs.model.native_context, MIN_CONTEXT)
    return any(
        _is_placed(inputs, replace(inputs.job, context=padded(least), kv_type=kind)) for kind in offered_kinds(inputs)
    )


def _is_placed(inputs: PlanInputs, job: PlacementJob) -> bool:
    # What fits into host memory alone has room: one search, and on a start from a profile no other is made.
    is_free = job.gpu_layers in (None, 0) and job.cpu_expert_layers in (None, 0)
    if is_free and place(job, replace(inputs.resources, devices=())) is not None:
        return True
    return place(job, inputs.resources) is not None


def _bared(inputs: PlanInputs, bare_mib: float) -> PlanInputs:
    """What is optional goes before a model is refused, slots last; what was asked for stays."""
    asked = inputs.settings.cache_ram_mib or 0.0
    found = replace(inputs, resources=replace(inputs.resources, spare_mib=bare_mib - asked), is_bare=True)
    settings = inputs.settings
    if _has_room(found) or settings.is_set("parallel"):
        return found
    return replace(found, settings=replace(settings, parallel=1, sources={**settings.sources, "parallel": NO_ROOM}))


def _check_flash(settings: Settings, model: Model) -> None:
    """Raises ConfigError for a type of the V cache that needs flash attention where no GPU has a kernel for it."""
    why = why_no_kernel(model)
    if why and settings.kv_type not in ("auto", *EXACT_TYPES):
        message = f"setting kv_type needs flash attention: '{settings.kv_type}' ({settings.sources['kv_type']}), {why}"
        raise ConfigError(message, hint="use f16, or --devices none")


def _beside_pages(device: Device, settings: Settings, model: Model) -> Device:
    """Memory that GPU and host share is free as MemAvailable says, pages of files included: the kernel gives them up
    (llama.cpp#17368, NVIDIA's known issues of DGX Spark). But a mapped file's pages come back while it is read."""
    if not device.is_unified or "mmap" not in settings.load_mode:
        return device
    return replace(device, free_mib=max(0.0, device.free_mib - weights_mib(model)))


def _chosen(settings: Settings, found: tuple[Device, ...]) -> tuple[Device, ...]:
    """In the order that was asked for. Raises ConfigError for a device that is not there."""
    if settings.devices == "auto":
        return () if settings.gpu_layers == 0 else found
    if settings.devices == "none":
        return ()
    names = [name.strip() for name in settings.devices.split(",") if name.strip()]
    by_name = {key: device for device in found for key in (device.id, str(device.index))}
    missing = [name for name in names if name not in by_name]
    if missing:
        there = ", ".join(f"{d.index} ({d.name}, {d.id})" for d in found) or "none"
        message = f"setting devices names what cannot be used: {', '.join(missing)} ({settings.sources['devices']})"
        raise ConfigError(message, hint=f"usable GPUs here: {there}")
    return tuple(dict.fromkeys(by_name[name] for name in names))


def aim_of(settings: Settings) -> Aim:
    aims: dict[str, Aim] = {"speed": "speed", "balanced": "balanced", "context": "context"}
    return aims[settings.mode]


def with_less(inputs: PlanInputs) -> Iterator[PlanInputs]:
    """The inputs, then with what can be done without moved and left away: no model is refused for its projector,
    unless that was named."""
    yield inputs
    projector = inputs.model.projector
    if projector and inputs.resources.devices:
        yield replace(inputs, projector_on_host=True)
    if projector and inputs.settings.mmproj == "auto":
        yield replace(inputs, model=replace(inputs.model, projector=None), left_away=projector)


def context_for(inputs: PlanInputs, aim: Aim) -> ContextPlan:
    request = wanted_context(inputs, aim)
    context_plan = choose_context(inputs.job, inputs.resources, request)
    if context_plan is None or (not request.is_explicit and context_plan.context < min(request.tokens, MIN_CONTEXT)):
        raise _refusal(inputs, request.kinds[0], request.tokens)
    context_plan = with_batch(context_plan, inputs.job, inputs.resources, request, inputs.settings)
    if request.is_explicit:
        return replace(context_plan, context=served_context(inputs.settings, inputs.model, context_plan.context))
    return context_plan


def wanted_context(inputs: PlanInputs, aim: Aim) -> ContextRequest:
    settings, model = inputs.settings, inputs.model
    tokens = settings.ctx_size or model.native_context
    if settings.allow_disk and not settings.ctx_size:
        tokens = _from_disk(inputs, tokens)
    return ContextRequest(
        tokens=tokens, is_explicit=settings.ctx_size is not None, kinds=offered_kinds(inputs), aim=aim
    )


def offered_kinds(inputs: PlanInputs) -> tuple[str, ...]:
    """Types of the cache that a plan may use, the exact one first."""
    on_gpu = bool(inputs.resources.devices)
    return kv_candidates(inputs.settings, inputs.engine, inputs.model, inputs.kv_checks, on_gpu=on_gpu)


def _from_disk(inputs: PlanInputs, tokens: int) -> int:
    """Without a limit every context would fit: where the weights exceed memory, a small one is taken."""
    usable = inputs.spare_mib
    bounded = replace(
        inputs.resources, spare_mib=usable - least_cache(inputs.settings) - host_overhead_mib(inputs.model)
    )
    request = ContextRequest(tokens=tokens, is_explicit=False, kinds=("f16",))
    context_plan = choose_context(inputs.job, bounded, request)
    return context_plan.context if context_plan else padded(min(tokens, 4096))


def least_cache(settings: Settings, *, is_bare: bool = False) -> float:
    if settings.cache_ram_mib is not None:
        return float(settings.cache_ram_mib)
    return 0.0 if is_bare else CACHE_MIN_MIB


def _refusal(inputs: PlanInputs, kv_type: str, request: int) -> ModelDoesNotFitError:
    """Without `allow_disk` mmap would start all the same, and then read the weights from disk for every token."""
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
    smaller += "--mmproj off, " if inputs.model.projector else ""
    if inputs.resources.devices:
        smaller += "a smaller --gpu-layers, " if settings.gpu_layers else ""
        smaller += "another --n-cpu-moe, " if settings.n_cpu_moe else ""
    return ModelDoesNotFitError(
        message,
        hint=f"use {smaller}a smaller model or quantization, raise the limit, or --allow-disk on to read from disk",
    )


def _lacking(inputs: PlanInputs, job: PlacementJob) -> str:
    """How much more it takes to fit, in each place alone: of the host's memory, or on the first GPU."""
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
    """MiB, by halving; None where no amount helps."""
    low, high = 0, int(2 * weights_mib(job.model)) + 65536
    if place(job, grown(high)) is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if place(job, grown(middle)) else (middle, high)
    return high


def predicted(inputs: PlanInputs, image: ImageFacts, context_plan: ContextPlan) -> Plan:
    settings, hardware, model = inputs.settings, inputs.hardware, inputs.model
    placement = context_plan.placed.placement
    ubatch = min(context_plan.ubatch, padded(context_plan.context))
    job = replace(inputs.job, context=padded(context_plan.context), kv_type=context_plan.kv_type, ubatch=ubatch)
    mode, loading = _load_mode(inputs, job, context_plan.placed)
    costs = placement_costs(job, inputs.resources, placement, is_pinned=mode in PINNED)
    speed = predicted_speed(placement, context_plan.placed.speed, costs, settings)
    threads, by_threads = thread_counts(settings, hardware)
    numa = numa_modes(settings, inputs.engine, hardware, placement, context_plan.placed.host.weights)[0]
    count = min(threads[0], numa.threads_max or threads[0])
    host = host_memory(inputs, context_plan.placed.host, mode, bool(placement.shares))
    spare = inputs.spare_mib - unified_mib(inputs, context_plan.placed.placement)
    checkpoints, host, by_checkpoints = kept_checkpoints(inputs, host, context_plan.kv_type, spare)
    longest = conversation_mib(
        model, context_plan.kv_type, context_plan.context, ubatch=ubatch, checkpoints=checkpoints
    )
    host, by_cache = prompt_cache(inputs, host, context_plan.kv_type, spare, longest)
    is_on_host = inputs.projector_on_host or not context_plan.placed.placement.shares
    extras = extras_of(settings, model, on_host=is_on_host)
    return Plan(
        engine=image.engine,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        context=context_plan.context,
        kv_type=context_plan.kv_type,
        parallel=slots(settings),
        is_embedding=model.is_embedding_model,
        memory=host,
        usable_mib=float(inputs.usable_mib - unified_mib(inputs, context_plan.placed.placement)),
        launch=LlamaLaunch(
            threads=count,
            threads_batch=count,
            numa=numa.mode,
            cpus=numa.cpus,
            batch=max(BATCH, ubatch),
            ubatch=ubatch,
            cache_ram_mib=int(host.cache),
            flash_attention=inputs.no_flash is None,
            load_mode=mode,
            checkpoints=checkpoints,
            extras=extras,
            rope=rope_for(settings, model, context_plan.context),
            idle_slots_stay=idle_slots_stay(settings, host.cache, longest),
        ),
        cpu_variant=inputs.kernels.variant,
        placement=context_plan.placed.placement,
        speed=speed,
        choices=(
            reasons.context(settings, hardware, model, context_plan),
            reasons.kv_type(
                settings,
                context_plan,
                inputs.kv_checks,
                is_slow=bool(inputs.resources.devices) and not is_fast_pair(inputs.engine, context_plan.kv_type),
            ),
            *_placement_choices(inputs, placement, speed),
            by_cache,
            *by_checkpoints,
            by_threads if count == threads[0] else replace(by_threads, value=str(count)),
            *((numa.choice,) if numa.choice else ()),
            *((inputs.kernels.choice,) if inputs.kernels.choice else ()),
            reasons.whole_ubatch(ubatch)
            if is_read_whole(settings, model)
            else reasons.ubatch(settings, ubatch, ubatch_words(costs, settings) if placement.copies_weights else ""),
            *slot_choices(settings, model, context_plan.context, cache_mib=host.cache, needed_mib=longest),
            *reasons.fixed(inputs.no_flash),
            loading,
            *extra_choices(inputs.settings, model, extras, inputs.left_away, inputs.resources.devices),
        ),
    )


def _placement_choices(inputs: PlanInputs, placement: Placement, speed: Speed) -> tuple[Choice, ...]:
    """Where there is no GPU and none is left out only the speed; numbers that mean nothing without one are refused."""
    devices, settings = inputs.resources.devices, inputs.settings
    lost = reasons.left_out(inputs.notes)
    where = (reasons.placement(placement, speed, inputs.resources, settings), *lost)
    if not (devices or lost):
        where = (reasons.speed(speed, placement, inputs.resources),)
    return where if devices else (*where, *reasons.without_gpu(settings))


def host_memory(inputs: PlanInputs, found: Memory, load_mode: str, has_gpu: bool) -> Memory:
    """What is copied beside the mapped file counts as allocated; its originals only in the engine's own sums."""
    copied = Copies() if has_gpu else copies(inputs.model, inputs.kernels.isa)
    is_mapped = "mmap" in load_mode
    return replace(
        found,
        weights=found.weights + copied.more,
        overhead=host_overhead_mib(inputs.model) + found.overhead,
        repacked=copied.made,
        mapped_twice=copied.originals + drafts_mib(inputs.model) if is_mapped else 0.0,
    )


def unified_mib(inputs: PlanInputs, placement: Placement) -> float:
    """What GPUs take of host memory, since they have none of their own."""
    unified = {device.id for device in inputs.resources.devices if device.is_unified}
    return sum(share.memory.total + share.gpu.held_back_mib for share in placement.shares if share.gpu.id in unified)


def kept_checkpoints(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float
) -> tuple[int | None, Memory, tuple[Choice, ...]]:
    """Copies of what cannot be rolled back, so that a chat that goes back is not read anew from its beginning."""
    each = checkpoint_mib(inputs.model, kv_type) * slots(inputs.settings)
    if not each:
        return None, host, ()
    left = spare_mib - host.total - inputs.least_cache_mib
    count = int(
        max(0 if inputs.is_bare else 1, min(CHECKPOINTS_MAX, min(CACHE_MAX_MIB, left * CHECKPOINTS_SHARE) / each))
    )
    return count, replace(host, checkpoints=count * each), (reasons.checkpoints(count, each, CHECKPOINTS_MAX),)


def prompt_cache(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float, longest_mib: float
) -> tuple[Memory, Choice]:
    """Without it a side request costs the conversation a whole prefill: it is off only where the model would not fit
    beside it. It is larger than the engine's default where one conversation can be."""
    asked = inputs.settings.cache_ram_mib
    if asked is not None:
        return replace(host, cache=float(asked)), reasons.cache_asked(inputs.settings)
    left = spare_mib - host.total
    most = max(CACHE_MAX_MIB, float(math.ceil(longest_mib * (1 + CACHE_SPARE))))
    size = float(int(min(most, max(inputs.least_cache_mib, left / 2))))
    return replace(host, cache=size), reasons.cache(inputs.model, kv_type, size, left, most)


def thread_counts(settings: Settings, hardware: Hardware) -> tuple[tuple[int, ...], Choice]:
    """Candidates, the predicted one first; never above what the container may use: the engine sees the host's cores."""
    cpu = hardware.cpu
    most = cpu.threads_max
    if settings.threads:
        threads = min(settings.threads, most)
        return (threads,), reasons.threads_asked(settings, threads)
    first = max(1, min(cpu.cores, most))
    return tuple(dict.fromkeys((first, most, max(1, first // 2)))), reasons.threads(cpu, first)


def _load_mode(inputs: PlanInputs, job: PlacementJob, placed: Placed) -> tuple[str, Choice]:
    """Locking only where the limit allows it: a refusal is said here and is not fatal."""
    settings, hardware, model = inputs.settings, inputs.hardware, inputs.model
    if settings.load_mode == "auto":
        needed = placed.host.total + inputs.least_cache_mib + host_overhead_mib(model)
        fits = needed <= inputs.spare_mib - unified_mib(inputs, placed.placement)
        mode, why = load_mode(job, inputs.resources, placed.placement, settings, fits=fits)
        return mode, Choice(name="load_mode", value=mode, reason=why, source="default" if mode == "mmap" else "memory")
    source = settings.sources["load_mode"]
    lockable = hardware.memory.memlock_limit_mib
    if "mlock" in settings.load_mode and lockable is not None and lockable < weights_mib(model):
        mode = "mmap" if "mmap" in settings.load_mode else "none"
        why = (
            f"{settings.load_mode} was asked for, but only {lockable:,.0f} MiB may be locked and the weights are "
            f"{weights_mib(model):,.0f}; give the container --ulimit memlock=-1"
        )
        return mode, Choice(name="load_mode", value=mode, reason=why, source=source, is_refusal=True)
    return settings.load_mode, Choice(name="load_mode", value=settings.load_mode, reason="asked for", source=source)
