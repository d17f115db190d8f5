"""(Settings, ImageFacts, EngineFacts, Hardware, Model) -> Plan: pure, and every choice carries its reason.

The first plan is the prediction; the others are space.py's.
"""

from __future__ import annotations

import math
from dataclasses import replace

from appliance.engines.llama.planning import assumptions, reasons
from appliance.engines.llama.planning.context import Aim, ContextPlan, ContextRequest, choose_context
from appliance.engines.llama.planning.cpu_variant import choose_kernels
from appliance.engines.llama.planning.devices import usable_devices
from appliance.engines.llama.planning.kv_types import is_fast_pair, kv_candidates
from appliance.engines.llama.planning.launch import LlamaLaunch
from appliance.engines.llama.planning.limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.memory import (
    CHECKPOINTS_MAX,
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
from appliance.engines.llama.planning.slots import choices as slot_choices
from appliance.engines.llama.planning.slots import conversation_mib, idle_slots_stay, slots
from appliance.engines.llama.planning.speculation import check_speculation
from appliance.errors import ConfigError, ModelDoesNotFitError, ModelUnreadableError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, plain_name
from appliance.plan import CONTEXT_STEP, Device, Kernels, KvCheck, Memory, Placement, Plan
from appliance.plan.choice import Choice
from appliance.probe import Hardware
from appliance.settings import Settings
from appliance.values import dataclass

UBATCH = 512
BATCH = 2048
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
            ubatch=self.settings.ubatch or UBATCH,
            parallel=slots(self.settings),
            gpu_layers=self.settings.gpu_layers,
            cpu_expert_layers=self.settings.n_cpu_moe,
        )

    @property
    def parallel(self) -> int:
        """Slots."""
        return slots(self.settings)

    @property
    def spare_mib(self) -> float:
        """Of host memory, what may be filled."""
        return self.usable_mib * (1 - SPARE_SHARE)


def check(settings: Settings, engine: EngineFacts, model: Model) -> None:
    check_speculation(settings, engine, model)
    check_numa(settings, engine)
    check_context(settings, model)
    if model.cache_kind != "attention":
        message = f"model cannot be planned yet: {model.path}: {model.cache_reason}"
        raise ModelUnreadableError(message, hint="use a model of a supported architecture")
    if settings.kv_type != "auto" and settings.kv_type not in engine.kv_types:
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
    kernels = kernels or choose_kernels(settings, engine, hardware.cpu)
    found, notes = usable_devices(hardware, image, engine, limits)
    devices = _chosen(settings, found)
    usable = limits.of_host(hardware.memory)
    least = least_cache(settings) + slots(settings) * checkpoint_mib(model, "f16") + host_overhead_mib()
    more = 0.0 if devices else copies(model, kernels.isa).more
    spare = float("inf") if settings.allow_disk else usable * (1 - SPARE_SHARE) - least - more
    measured = hardware.speeds.dram_gb_s if hardware.speeds else None
    dram = (measured or assumptions.DRAM_GB_S.value) * assumptions.DRAM_SHARE.value
    cpu = cpu_rates(kernels.isa, max(1, hardware.cpu.cores), dram)
    return PlanInputs(
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
            cpu=cpu,
        ),
        notes=notes,
        limits=limits,
    )


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


def context_for(inputs: PlanInputs, aim: Aim) -> ContextPlan:
    request = wanted_context(inputs, aim)
    context_plan = choose_context(inputs.job, inputs.resources, request)
    if context_plan is None or (not request.is_explicit and context_plan.context < min(request.tokens, MIN_CONTEXT)):
        raise _refusal(inputs, request.kinds[0], request.tokens)
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
    bounded = replace(inputs.resources, spare_mib=usable - least_cache(inputs.settings) - host_overhead_mib())
    request = ContextRequest(tokens=tokens, is_explicit=False, kinds=("f16",))
    context_plan = choose_context(inputs.job, bounded, request)
    return context_plan.context if context_plan else padded(min(tokens, 4096))


def least_cache(settings: Settings) -> float:
    return float(settings.cache_ram_mib) if settings.cache_ram_mib is not None else CACHE_MIN_MIB


def _refusal(inputs: PlanInputs, kv_type: str, request: int) -> ModelDoesNotFitError:
    """Without `allow_disk` mmap would start all the same, and then read the weights from disk for every token."""
    settings = inputs.settings
    least = settings.ctx_size or min(request, MIN_CONTEXT)
    anywhere = replace(inputs.resources, devices=(), spare_mib=float("inf"))
    job = replace(inputs.job, context=padded(least), kv_type=kv_type, gpu_layers=None, cpu_expert_layers=None)
    placed = place(job, anywhere)
    need = replace(placed.host, cache=least_cache(settings), overhead=host_overhead_mib()) if placed else None
    sizes = reasons.needs(need, kv_type, padded(least)) if need else "more than anything"
    gpus = "".join(f"; {d.free_mib:,.0f} MiB on {d.name}" for d in inputs.resources.devices)
    message = (
        f"model does not fit: {inputs.model.title} needs {sizes}, "
        f"and {inputs.usable_mib:,.0f} MiB are usable ({reasons.limit(inputs.hardware)}){gpus}"
    )
    smaller = "a smaller --ctx-size, " if settings.ctx_size else ""
    if inputs.resources.devices:
        smaller += "a smaller --gpu-layers, " if settings.gpu_layers else ""
        smaller += "another --n-cpu-moe, " if settings.n_cpu_moe else ""
    return ModelDoesNotFitError(
        message,
        hint=f"use {smaller}a smaller model or quantization, raise the limit, or --allow-disk on to read from disk",
    )


def predicted(inputs: PlanInputs, image: ImageFacts, context_plan: ContextPlan) -> Plan:
    settings, hardware, model = inputs.settings, inputs.hardware, inputs.model
    load_mode, loading = _load_mode(settings, hardware, model)
    ubatch = min(settings.ubatch or UBATCH, padded(context_plan.context))
    threads, by_threads = thread_counts(settings, hardware)
    placed = context_plan.placed
    numa = numa_modes(settings, inputs.engine, hardware, placed.placement, placed.host.weights)[0]
    count = min(threads[0], numa.threads_max or threads[0])
    host = host_memory(inputs, context_plan.placed.host, load_mode, bool(context_plan.placed.placement.shares))
    spare = inputs.spare_mib - unified_mib(inputs, context_plan.placed.placement)
    checkpoints, host, by_checkpoints = kept_checkpoints(inputs, host, context_plan.kv_type, spare)
    longest = conversation_mib(
        model, context_plan.kv_type, context_plan.context, ubatch=ubatch, checkpoints=checkpoints
    )
    host, by_cache = prompt_cache(inputs, host, context_plan.kv_type, spare, longest)
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
            flash_attention=True,
            load_mode=load_mode,
            checkpoints=checkpoints,
            rope=rope_for(settings, model, context_plan.context),
            idle_slots_stay=idle_slots_stay(settings, host.cache, longest),
        ),
        cpu_variant=inputs.kernels.variant,
        placement=context_plan.placed.placement,
        speed=context_plan.placed.speed,
        choices=(
            reasons.context(settings, hardware, model, context_plan),
            reasons.kv_type(
                settings,
                context_plan,
                inputs.kv_checks,
                is_slow=bool(inputs.resources.devices) and not is_fast_pair(inputs.engine, context_plan.kv_type),
            ),
            *_placement_choices(inputs, context_plan.placed),
            by_cache,
            *by_checkpoints,
            by_threads if count == threads[0] else replace(by_threads, value=str(count)),
            *((numa.choice,) if numa.choice else ()),
            *((inputs.kernels.choice,) if inputs.kernels.choice else ()),
            reasons.ubatch(settings, ubatch),
            *slot_choices(settings, model, context_plan.context, cache_mib=host.cache, needed_mib=longest),
            *reasons.fixed(),
            loading,
        ),
    )


def _placement_choices(inputs: PlanInputs, placed: Placed) -> tuple[Choice, ...]:
    """Said where there is a GPU, or one that is left out; numbers that mean nothing without one are refused."""
    devices, settings = inputs.resources.devices, inputs.settings
    where = (reasons.placement(placed, inputs.resources, inputs.notes, settings),) if devices or inputs.notes else ()
    return where if devices else (*where, *reasons.without_gpu(settings))


def host_memory(inputs: PlanInputs, found: Memory, load_mode: str, has_gpu: bool) -> Memory:
    """What is copied beside the mapped file counts as allocated; its originals only in the engine's own sums."""
    copied = Copies() if has_gpu else copies(inputs.model, inputs.kernels.isa)
    is_mapped = "mmap" in load_mode
    return replace(
        found,
        weights=found.weights + copied.more,
        overhead=host_overhead_mib(),
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
    left = spare_mib - host.total - least_cache(inputs.settings)
    count = int(max(1, min(CHECKPOINTS_MAX, min(CACHE_MAX_MIB, left * CHECKPOINTS_SHARE) / each)))
    return count, replace(host, checkpoints=count * each), (reasons.checkpoints(count, each, CHECKPOINTS_MAX),)


def prompt_cache(
    inputs: PlanInputs, host: Memory, kv_type: str, spare_mib: float, longest_mib: float
) -> tuple[Memory, Choice]:
    """The prompt cache is never off by itself: without it a side request costs the conversation a whole prefill. It is
    larger than the engine's default where one conversation can be."""
    asked = inputs.settings.cache_ram_mib
    if asked is not None:
        return replace(host, cache=float(asked)), reasons.cache_asked(inputs.settings)
    left = spare_mib - host.total
    most = max(CACHE_MAX_MIB, float(math.ceil(longest_mib * (1 + CACHE_SPARE))))
    size = float(int(min(most, max(CACHE_MIN_MIB, left / 2))))
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


def _load_mode(settings: Settings, hardware: Hardware, model: Model) -> tuple[str, Choice]:
    """Locking only where the limit allows it: a refusal is said here and is not fatal."""
    if settings.load_mode == "auto":
        why = "pages are read once, shared between containers on one volume, and dropped under pressure, not swapped"
        return "mmap", Choice(name="load_mode", value="mmap", reason=why, source="default")
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
