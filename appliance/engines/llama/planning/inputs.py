"""The inputs of a plan: the facts of one start, checked against each other, and the values computed from them."""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.llama.planning.arguments.engine_args import check_engine_args
from appliance.engines.llama.planning.arguments.numa import check_numa, usable_nodes
from appliance.engines.llama.planning.experts.asked import check_experts, with_experts_used
from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.hardware.cpu_variant import choose_kernels
from appliance.engines.llama.planning.hardware.devices import usable_devices
from appliance.engines.llama.planning.hardware.observed_limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.hardware.rates import cpu_rates
from appliance.engines.llama.planning.memory.attachments import with_adapters
from appliance.engines.llama.planning.memory.flash import EXACT_TYPES, why_no_kernel
from appliance.engines.llama.planning.memory.kv_types import kv_candidates
from appliance.engines.llama.planning.memory.memory import (
    KV_BYTES,
    UBATCH,
    Copies,
    can_keep,
    checkpoint_mib,
    copies,
    host_overhead_mib,
    padded,
    weights_mib,
)
from appliance.engines.llama.planning.memory.rope import check_context
from appliance.engines.llama.planning.memory.slots import NO_ROOM
from appliance.engines.llama.planning.placement.batch import (
    PINNED,
)
from appliance.engines.llama.planning.placement.placement import PlacementJob, Resources, place
from appliance.engines.llama.planning.speculation import check_speculation
from appliance.engines.llama.planning.threads import (
    parts_of,
)
from appliance.errors import ConfigError, ModelUnreadableError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, Projector
from appliance.plan import CONTEXT_STEP, SMALLEST_CONTEXT, Device, Kernels, KvCheck, k_and_v
from appliance.probe import Hardware
from appliance.settings import Settings
from appliance.values import dataclass

# Largest ubatch of a model that reads each text in one batch: the attention mask grows with its square.
WHOLE_UBATCH_MAX = 8192
MIN_CONTEXT = CONTEXT_STEP
CACHE_MIN_MIB = 128.0
# Share of usable host memory that stays free: page cache of the weights file, other processes of the container.
SPARE_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The facts of one start and the values computed from them."""

    settings: Settings
    engine: EngineFacts
    hardware: Hardware
    model: Model
    kernels: Kernels
    resources: Resources
    notes: tuple[str, ...]  # devices that are not used, and why
    kv_checks: tuple[KvCheck, ...] = ()  # results of quality checks of KV cache types below q8_0
    limits: Limits = NO_LIMITS
    is_bare: bool = False  # True if host memory is so short that prompt cache and context checkpoints may shrink to 0
    projector_on_host: bool = False  # True if the projector lies in host memory although there is a GPU
    left_away: Projector | None = None  # the projector that is not loaded, because the model would not fit with it

    @property
    def usable_mib(self) -> float:
        """Host memory that is usable, MiB; `spare_mib` is the part that a plan may fill."""
        return self.limits.of_host(self.hardware.memory)

    @property
    def native(self) -> int:
        """The model's own context length, or the one that was asked for."""
        return self.settings.ctx_size or self.model.native_context

    @property
    def job(self) -> PlacementJob:
        return PlacementJob(
            model=self.model,
            context=0,
            kv_type="f16",
            ubatch=usual_ubatch(self.settings, self.model),
            parallel=self.settings.slots,
            projector_on_host=self.projector_on_host,
            gpu_layers=self.settings.gpu_layers,
            cpu_expert_layers=self.settings.n_cpu_moe,
            has_flash=self.no_flash is None,
        )

    @property
    def no_flash(self) -> str | None:
        """Reason why flash attention is off; None if it is on. The CPU has kernels for heads of any size."""
        return why_no_kernel(self.model) if self.resources.devices else None

    @property
    def parallel(self) -> int:
        """Number of slots: requests that run at the same time."""
        return self.settings.slots

    @property
    def least_cache_mib(self) -> float:
        """Smallest prompt cache that a plan may have, MiB."""
        return least_cache(self.settings, is_bare=self.is_bare)

    @property
    def spare_mib(self) -> float:
        """Host memory that a plan may fill, MiB: usable memory less SPARE_SHARE."""
        return self.usable_mib * (1 - SPARE_SHARE)


def is_read_whole(settings: Settings, model: Model) -> bool:
    """Return True if the model reads each text in one batch and no ubatch is set: then the ubatch is the context."""
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
    check_experts(settings, engine, model)
    if model.cache_kind != "attention":
        message = f"model cannot be planned yet: {model.path}: {model.cache_reason}"
        raise ModelUnreadableError(message, hint="use a model of a supported architecture")
    offered = [name for name in engine.kv_types if name in KV_BYTES]
    if settings.kv_type != "auto" and not set(k_and_v(settings.kv_type)) <= set(offered):
        message = f"setting kv_type is not offered by this engine: '{settings.kv_type}' ({settings.sources['kv_type']})"
        near = difflib.get_close_matches(settings.kv_type, offered, 1)
        meant = f"perhaps you meant '{near[0]}'; " if near else ""
        raise ConfigError(message, hint=f"{meant}this image offers {', '.join(offered)}")
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
    """Return the inputs of the plans of one start. Raises ConfigError for a setting that GPUs or model cannot take.

    `kernels` is the CPU variant chosen with the record of failed variants; None: it is chosen here without the record.
    """
    model = with_experts_used(with_adapters(model), settings)
    kernels = kernels or choose_kernels(settings, engine, hardware.cpu)
    found, notes = usable_devices(hardware, image, engine, limits, reserve_mib=settings.reserve_mib)
    devices = tuple(_beside_pages(device, settings, model) for device in _chosen(settings, found))
    if devices:
        _check_flash(settings, model)
    usable = limits.of_host(hardware.memory)
    copied = Copies() if devices else copies(model, kernels.isa)
    bare = float("inf") if settings.allow_disk else usable * (1 - SPARE_SHARE) - host_overhead_mib(model) - copied.more
    spare = bare - least_cache(settings) - settings.slots * checkpoint_mib(model, "f16")
    measured = hardware.speeds.dram_gb_s if hardware.speeds else None
    nodes = max(1, len(usable_nodes(hardware)))  # each NUMA node has memory channels of its own
    memory = measured or min(nodes * assumptions.DRAM_GB_S.value, limits.dram_gb_s)
    cpu = cpu_rates(
        kernels.isa,
        max(1, hardware.cpu.cores),
        memory * assumptions.DRAM_SHARE.value,
        hardware.cpu.capacities,
        parts=parts_of(model, is_repacked=copied.made > 0),
        asked=settings.threads and min(settings.threads, hardware.cpu.threads_max),
        part=hardware.cpu.groups[0].part if hardware.cpu.groups else None,
    )
    inputs = PlanInputs(
        settings=settings,
        engine=engine,
        hardware=hardware,
        model=model,
        kernels=kernels,
        resources=Resources(
            devices=devices,
            spare_mib=spare,
            dram_gb_s=cpu.gb_s(cpu.threads),
            memory_gb_s=memory,
            dram_is_measured=measured is not None,
            is_pinned=settings.load_mode in ("auto", *PINNED) and not settings.allow_disk,
            cpu=cpu,
        ),
        notes=notes,
        limits=limits,
    )
    return inputs if _has_room(inputs, SMALLEST_CONTEXT) else _bared(inputs, bare)


def _has_room(inputs: PlanInputs, at_least: int) -> bool:
    """Return True if `at_least` tokens of context, or --ctx-size if it is set, fit with some KV cache type."""
    least = inputs.settings.ctx_size or min(inputs.model.native_context, at_least)
    return any(
        _is_placed(inputs, replace(inputs.job, context=padded(least), kv_type=kind)) for kind in offered_kinds(inputs)
    )


def _is_placed(inputs: PlanInputs, job: PlacementJob) -> bool:
    # A placement in host memory alone proves that there is room. It costs one search, and a start from a profile makes
    # no other.
    is_free = job.gpu_layers in (None, 0) and job.cpu_expert_layers in (None, 0)
    if is_free and place(job, replace(inputs.resources, devices=())) is not None:
        return True
    return place(job, inputs.resources) is not None


def _bared(inputs: PlanInputs, bare_mib: float) -> PlanInputs:
    """Return inputs that may give up prompt cache and checkpoints, so that the context fits.

    Both keep as much as SMALLEST_CONTEXT leaves. If MIN_CONTEXT does not fit even without them, one slot is planned.
    Sizes that the user set stay.
    """
    settings = inputs.settings
    most_mib = bare_mib - (settings.cache_ram_mib or 0.0)

    def holding(mib: int) -> PlanInputs:
        return replace(inputs, resources=replace(inputs.resources, spare_mib=most_mib - mib), is_bare=True)

    found = holding(0)
    if _has_room(found, SMALLEST_CONTEXT):
        optional_mib = range(math.ceil(most_mib - inputs.resources.spare_mib))
        too_much = bisect_left(optional_mib, True, lo=1, key=lambda mib: not _has_room(holding(mib), SMALLEST_CONTEXT))
        return holding(too_much - 1)
    if _has_room(found, MIN_CONTEXT) or settings.is_set("parallel"):
        return found
    return replace(found, settings=replace(settings, parallel=1, sources={**settings.sources, "parallel": NO_ROOM}))


def _check_flash(settings: Settings, model: Model) -> None:
    """Raise ConfigError if the V cache type needs flash attention and GPUs have no kernel for the model's heads."""
    why = why_no_kernel(model)
    if why and settings.kv_type not in ("auto", *EXACT_TYPES):
        message = f"setting kv_type needs flash attention: '{settings.kv_type}' ({settings.sources['kv_type']}), {why}"
        raise ConfigError(message, hint="use f16, or --devices none")


def _beside_pages(device: Device, settings: Settings, model: Model) -> Device:
    """Return the device; if it shares the host's memory and weights are mapped, with their size off its free memory.

    MemAvailable counts pages of files as free, because the kernel gives them up (llama.cpp#17368, NVIDIA's known
    issues of DGX Spark). The pages of mapped weights come back, because each token reads them.
    """
    if not device.is_unified or "mmap" not in settings.load_mode:
        return device
    return replace(device, free_mib=max(0.0, device.free_mib - weights_mib(model)))


def _chosen(settings: Settings, found: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the GPUs to use, in the order of --devices. Raises ConfigError for a GPU that is not usable."""
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


def with_less(inputs: PlanInputs) -> Iterator[PlanInputs]:
    """Yield the inputs, then the same with the projector in host memory, then without the projector.

    The second and third are tried only if the model does not fit: a model is not refused because of a projector that
    --mmproj does not name.
    """
    yield inputs
    projector = inputs.model.projector
    if projector and inputs.resources.devices:
        yield replace(inputs, projector_on_host=True)
    if projector and inputs.settings.mmproj == "auto":
        yield replace(inputs, model=replace(inputs.model, projector=None), left_away=projector)


def offered_kinds(inputs: PlanInputs) -> tuple[str, ...]:
    """Return the KV cache types that a plan may use, the most exact first."""
    on_gpu = bool(inputs.resources.devices)
    return kv_candidates(inputs.settings, inputs.engine, inputs.model, inputs.kv_checks, on_gpu=on_gpu)


def least_cache(settings: Settings, *, is_bare: bool = False) -> float:
    if settings.cache_ram_mib is not None:
        return float(settings.cache_ram_mib)
    return 0.0 if is_bare else CACHE_MIN_MIB
