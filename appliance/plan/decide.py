"""(Settings, ImageFacts, EngineFacts, Hardware, Model) -> list[Plan]: pure, and every choice carries its reason.

The first plan is the prediction; those after it differ from it only in what measuring decides: threads, ubatch, how
many layers' experts stay in host memory, how weights are loaded and split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from appliance.errors import ConfigError, ModelDoesNotFitError, ModelUnreadableError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, plain_name
from appliance.plan import assumptions, reasons
from appliance.plan.choice import Choice
from appliance.plan.devices import Device, usable_devices
from appliance.plan.kv_types import Verdict, is_fast_pair, kv_candidates, unjudged, worth_checking
from appliance.plan.memory import (
    CHECKPOINTS_MAX,
    CONTEXT_STEP,
    Memory,
    can_keep,
    checkpoint_mib,
    drafts_mib,
    host_overhead_mib,
    padded,
    repacked_mib,
    tied_copy_mib,
    weights_mib,
)
from appliance.plan.placement import Machine, Placed, Placement, Work, place
from appliance.plan.speed import Speed
from appliance.plan.window import Aim, Wanted, Window, choose_window, enough_of
from appliance.probe import Hardware
from appliance.settings import Settings

UBATCH = 512
UBATCHES = (512, 256)  # on a CPU: more than a chat brings along cannot show in a chat's time
UBATCHES_GPU = (512, 1024, 2048)  # host weights are copied once a batch: twice the batch, half the copies
BATCH = 2048
MIN_CONTEXT = CONTEXT_STEP
CACHE_MAX_MIB = 8192.0  # llama-server's own default
CACHE_MIN_MIB = 128.0
SPARE_SHARE = 0.03  # of usable memory, left alone: page cache for the weights' file, other processes of the container
CHECKPOINTS_SHARE = 0.25  # of what is left
EXPERTS_AROUND = (-1, 1, 2, 4)  # layers whose experts stay in host memory, more or fewer than predicted
PLANS_MAX = 12
NEAR = 1.25  # of the predicted job's time, what is still worth measuring: predictions are not that exact


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the engine's command line is made from. Sizes in tokens unless the name says otherwise."""

    engine: str
    model_path: str
    alias: str
    context: int
    kv_type: str
    threads: int
    threads_batch: int
    batch: int
    ubatch: int
    parallel: int
    cache_ram_mib: int
    flash_attention: bool
    load_mode: str
    is_embedding: bool  # the model gives vectors and no text: there is nothing to decode, and nothing to measure by it
    memory: Memory  # of the host; each GPU's is in the placement
    usable_mib: float
    checkpoints: int | None = None  # context checkpoints of each slot; None: the model needs none
    placement: Placement = field(default_factory=Placement)
    speed: Speed | None = None  # predicted
    choices: tuple[Choice, ...] = field(default=(), repr=False)

    @property
    def predicted_mib(self) -> float:
        """Everything that the engine's log will count, on the host and on GPUs."""
        return self.memory.as_logged + sum(share.memory.as_logged for share in self.placement.shares)

    @property
    def variant(self) -> str:
        """What measuring tells plans apart by, beside threads and ubatch; empty for one that is all on the CPU."""
        if not self.placement.shares:
            return ""
        return self.placement.in_short() + ("" if self.load_mode == "mmap" else f", load mode {self.load_mode}")


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """The facts of one start, and what follows from them at once."""

    settings: Settings
    engine: EngineFacts
    hardware: Hardware
    model: Model
    machine: Machine
    notes: tuple[str, ...]  # devices that are not used, and why
    verdicts: tuple[Verdict, ...] = ()  # on types of the KV cache below q8_0

    @property
    def work(self) -> Work:
        return Work(
            model=self.model,
            context=0,
            kv_type="f16",
            ubatch=self.settings.ubatch or UBATCH,
            parallel=self.settings.parallel,
            gpu_layers=self.settings.gpu_layers,
            cpu_expert_layers=self.settings.n_cpu_moe,
        )

    @property
    def spare_mib(self) -> float:
        """Of host memory, what may be filled."""
        return self.hardware.memory.usable_mib * (1 - SPARE_SHARE)


def plan(
    settings: Settings,
    image: ImageFacts,
    engine: EngineFacts,
    hardware: Hardware,
    model: Model,
    *,
    aim: Aim = "balanced",
    verdicts: Sequence[Verdict] = (),
) -> list[Plan]:
    """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""
    _check(settings, engine, model)
    scene = replace(_scene(settings, image, engine, hardware, model), verdicts=tuple(verdicts))
    window = _window(scene, aim)
    best = _planned(scene, image, window)
    return [best, *_alternatives(scene, best, window)]


def kinds_to_check(
    settings: Settings,
    image: ImageFacts,
    engine: EngineFacts,
    hardware: Hardware,
    model: Model,
    *,
    aim: Aim = "balanced",
    verdicts: Sequence[Verdict] = (),
) -> tuple[str, ...]:
    """Types of the KV cache that would carry a much larger window, if they were shown to be harmless; what helps most
    first. The plan that is already possible is what they are checked with."""
    scene = replace(_scene(settings, image, engine, hardware, model), verdicts=tuple(verdicts))
    wanted = _wanted(scene, aim)
    more = unjudged(settings, engine, model, verdicts, on_gpu=bool(scene.machine.devices))
    if not more or settings.allow_disk or model.is_embedding_model:  # from disk every window would fit
        return ()
    window = choose_window(scene.work, scene.machine, replace(wanted, kinds=(*wanted.kinds, *more)))
    return worth_checking(window.carried, enough=enough_of(wanted)) if window else ()


def as_measured(planned: Plan, measured: Plan) -> Plan:
    """`planned` with what measuring decided: threads and ubatch of `measured`, and the words for them.

    All else is decided by the facts of this start: memory that is free now, not when it was measured. A larger ubatch
    whose buffers do not fit now is not taken.
    """
    words = {choice.name: choice for choice in measured.choices if choice.source == "measured"}
    resized = _resized(planned, measured)
    if not _has_room(resized, planned):
        resized = planned
        words.pop("ubatch", None)
    return replace(
        resized,
        threads=measured.threads,
        threads_batch=measured.threads_batch,
        choices=tuple(words.get(choice.name, choice) for choice in planned.choices),
    )


def _resized(planned: Plan, measured: Plan) -> Plan:
    """With the other plan's ubatch, and buffers in proportion."""
    scale = measured.ubatch / planned.ubatch
    shares = tuple(replace(s, memory=_scaled(s.memory, scale)) for s in planned.placement.shares)
    return replace(
        planned,
        ubatch=measured.ubatch,
        batch=measured.batch,
        memory=_scaled(planned.memory, scale),
        placement=replace(planned.placement, shares=shares),
    )


def _has_room(resized: Plan, planned: Plan) -> bool:
    """On each GPU and on the host; what `planned` takes beyond that is its own affair, as from disk."""
    pairs = zip(resized.placement.shares, planned.placement.shares, strict=True)
    on_gpus = all(new.memory.total <= max(new.free_mib, old.memory.total) for new, old in pairs)
    return on_gpus and resized.memory.total <= max(planned.usable_mib, planned.memory.total)


def nearest(plans: Sequence[Plan], measured: Plan) -> Plan:
    """Of the plans of this start the one that was measured, or that has its placement; else the first."""
    same = [
        p for p in plans if (p.variant, p.context, p.kv_type) == (measured.variant, measured.context, measured.kv_type)
    ]
    exact = [p for p in same if (p.threads, p.ubatch) == (measured.threads, measured.ubatch)]
    return (*exact, *same, *plans)[0]


def with_measured(plan: Plan, words: str) -> Plan:
    """The plan with measuring as the reason for what it decided."""
    measured = {"threads": plan.threads, "ubatch": plan.ubatch}
    choices = tuple(
        replace(choice, value=str(measured[choice.name]), reason=words, source="measured")
        if choice.name in measured and choice.source in ("probe", "default")  # what was asked for stays asked for
        else choice
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def _scaled(memory: Memory, scale: float) -> Memory:
    return replace(memory, compute=memory.compute * scale)  # every term of it grows with ubatch


def _check(settings: Settings, engine: EngineFacts, model: Model) -> None:
    if model.cache_kind != "attention":
        message = f"model cannot be planned yet: {model.path}: {model.cache_reason}"
        raise ModelUnreadableError(message, hint="use a model of an architecture that is reckoned")
    if settings.kv_type != "auto" and settings.kv_type not in engine.kv_types:
        message = f"setting kv_type is not offered by this engine: '{settings.kv_type}' ({settings.sources['kv_type']})"
        raise ConfigError(message, hint=f"this image offers {', '.join(engine.kv_types)}")
    if settings.kv_type != "auto" and not can_keep(model, settings.kv_type):
        message = (
            f"setting kv_type does not suit this model: '{settings.kv_type}' ({settings.sources['kv_type']}), "
            f"whose heads of {model.key_length} and {model.value_length} values are no multiples of its blocks of 32"
        )
        raise ConfigError(message, hint="use f16")


def _scene(settings: Settings, image: ImageFacts, engine: EngineFacts, hardware: Hardware, model: Model) -> _Scene:
    found, notes = usable_devices(hardware, image, engine)
    devices = _chosen(settings, found)
    usable = float(hardware.memory.usable_mib)
    least = _least_cache(settings) + settings.parallel * checkpoint_mib(model, "f16") + host_overhead_mib()
    copies = 0.0 if devices else tied_copy_mib(model, hardware.cpu.isa)
    spare = float("inf") if settings.allow_disk else usable * (1 - SPARE_SHARE) - least - copies
    measured = hardware.speeds.dram_gb_s if hardware.speeds else None
    dram = (measured or assumptions.DRAM_GB_S.value) * assumptions.DRAM_SHARE.value
    return _Scene(
        settings=settings,
        engine=engine,
        hardware=hardware,
        model=model,
        machine=Machine(devices=devices, spare_mib=spare, dram_gb_s=dram, dram_is_measured=measured is not None),
        notes=notes,
    )


def _chosen(settings: Settings, found: tuple[Device, ...]) -> tuple[Device, ...]:
    """Raises ConfigError for a device that was asked for and is not there."""
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
    return tuple(device for device in found if device in [by_name[name] for name in names])


def _window(scene: _Scene, aim: Aim) -> Window:
    wanted = _wanted(scene, aim)
    window = choose_window(scene.work, scene.machine, wanted)
    if window is None or (not wanted.is_asked and window.context < min(wanted.tokens, MIN_CONTEXT)):
        raise _refusal(scene, wanted.kinds[0], wanted.tokens)
    return replace(window, context=padded(window.context) if wanted.is_asked else window.context)


def _wanted(scene: _Scene, aim: Aim) -> Wanted:
    settings, model = scene.settings, scene.model
    kinds = kv_candidates(settings, scene.engine, model, scene.verdicts, on_gpu=bool(scene.machine.devices))
    tokens = settings.ctx_size or model.native_context
    if settings.allow_disk and not settings.ctx_size:
        tokens = _from_disk(scene, tokens)
    return Wanted(tokens=tokens, is_asked=settings.ctx_size is not None, kinds=kinds, aim=aim)


def _from_disk(scene: _Scene, tokens: int) -> int:
    """Without a limit every window would fit: where the weights exceed memory, a small one is taken."""
    usable = scene.hardware.memory.usable_mib * (1 - SPARE_SHARE)
    bounded = replace(scene.machine, spare_mib=usable - _least_cache(scene.settings) - host_overhead_mib())
    wanted = Wanted(tokens=tokens, is_asked=False, kinds=("f16",))
    window = choose_window(scene.work, bounded, wanted)
    return window.context if window else padded(min(tokens, 4096))


def _least_cache(settings: Settings) -> float:
    return float(settings.cache_ram_mib) if settings.cache_ram_mib is not None else CACHE_MIN_MIB


def _refusal(scene: _Scene, kv_type: str, wanted: int) -> ModelDoesNotFitError:
    """Without `allow_disk` mmap would start all the same, and then read the weights from disk for every token."""
    settings = scene.settings
    least = settings.ctx_size or min(wanted, MIN_CONTEXT)
    anywhere = replace(scene.machine, devices=(), spare_mib=float("inf"))
    work = replace(scene.work, context=padded(least), kv_type=kv_type, gpu_layers=None, cpu_expert_layers=None)
    placed = place(work, anywhere)
    need = replace(placed.host, cache=_least_cache(settings), overhead=host_overhead_mib()) if placed else None
    sizes = reasons.needs(need, kv_type, padded(least)) if need else "more than anything"
    gpus = "".join(f"; {d.free_mib:,.0f} MiB on {d.name}" for d in scene.machine.devices)
    message = (
        f"model does not fit: {scene.model.path.name} needs {sizes}, "
        f"and {scene.hardware.memory.usable_mib:,.0f} MiB are usable ({reasons.limit(scene.hardware)}){gpus}"
    )
    smaller = "a smaller --ctx-size, " if settings.ctx_size else ""
    if scene.machine.devices:
        smaller += "a smaller --gpu-layers, " if settings.gpu_layers else ""
        smaller += "another --n-cpu-moe, " if settings.n_cpu_moe else ""
    return ModelDoesNotFitError(
        message,
        hint=f"use {smaller}a smaller model or quantization, raise the limit, or --allow-disk on to read from disk",
    )


def _planned(scene: _Scene, image: ImageFacts, window: Window) -> Plan:
    settings, hardware, model = scene.settings, scene.hardware, scene.model
    load_mode, loading = _load_mode(settings, hardware, model)
    ubatch = min(settings.ubatch or UBATCH, padded(window.context))
    threads, by_threads = _threads(settings, hardware)
    host = _host(scene, window.placed.host, load_mode, bool(window.placed.placement.shares))
    spare = scene.spare_mib - _unified_mib(scene, window.placed.placement)
    checkpoints, host, by_checkpoints = _checkpoints(scene, host, window.kv_type, spare)
    host, by_cache = _cache(scene, host, window, spare)
    placed = (
        (reasons.placement(window.placed, scene.machine, scene.notes, settings),)
        if scene.machine.devices or scene.notes
        else ()
    )
    return Plan(
        engine=image.engine,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        context=window.context,
        kv_type=window.kv_type,
        threads=threads[0],
        threads_batch=threads[0],
        batch=max(BATCH, ubatch),
        ubatch=ubatch,
        parallel=settings.parallel,
        cache_ram_mib=int(host.cache),
        flash_attention=True,
        load_mode=load_mode,
        is_embedding=model.is_embedding_model,
        memory=host,
        usable_mib=hardware.memory.usable_mib - _unified_mib(scene, window.placed.placement),
        checkpoints=checkpoints,
        placement=window.placed.placement,
        speed=window.placed.speed,
        choices=(
            reasons.context(settings, hardware, model, window),
            reasons.kv_type(
                settings,
                window,
                scene.verdicts,
                is_slow=bool(scene.machine.devices) and not is_fast_pair(scene.engine, window.kv_type),
            ),
            *placed,
            *(() if scene.machine.devices else reasons.without_gpu(settings)),
            by_cache,
            *by_checkpoints,
            by_threads,
            reasons.ubatch(settings, ubatch),
            *reasons.fixed(settings),
            loading,
        ),
    )


def _host(scene: _Scene, found: Memory, load_mode: str, has_gpu: bool) -> Memory:
    """What is copied beside the mapped file counts as allocated; its originals only in the engine's own sums."""
    isa = scene.hardware.cpu.isa
    repacked = 0.0 if has_gpu else repacked_mib(scene.model, isa)
    tied = 0.0 if has_gpu else tied_copy_mib(scene.model, isa)
    is_mapped = "mmap" in load_mode
    return replace(
        found,
        weights=found.weights + tied,
        overhead=host_overhead_mib(),
        repacked=repacked,
        mapped_twice=repacked - tied + drafts_mib(scene.model) if is_mapped else 0.0,
    )


def _unified_mib(scene: _Scene, placement: Placement) -> float:
    """What GPUs take of host memory, since they have none of their own."""
    unified = {device.id for device in scene.machine.devices if device.is_unified}
    return sum(share.memory.total + share.held_back_mib for share in placement.shares if share.id in unified)


def _checkpoints(
    scene: _Scene, host: Memory, kv_type: str, spare_mib: float
) -> tuple[int | None, Memory, tuple[Choice, ...]]:
    """Copies of what cannot be rolled back, so that a chat that goes back is not read anew from its beginning."""
    each = checkpoint_mib(scene.model, kv_type) * scene.settings.parallel
    if not each:
        return None, host, ()
    left = spare_mib - host.total - _least_cache(scene.settings)
    count = int(max(1, min(CHECKPOINTS_MAX, min(CACHE_MAX_MIB, left * CHECKPOINTS_SHARE) / each)))
    return count, replace(host, checkpoints=count * each), (reasons.checkpoints(count, each, CHECKPOINTS_MAX),)


def _cache(scene: _Scene, host: Memory, window: Window, spare_mib: float) -> tuple[Memory, Choice]:
    """The prompt cache is never off by itself: without it a side request costs the conversation a whole prefill."""
    asked = scene.settings.cache_ram_mib
    if asked is not None:
        return replace(host, cache=float(asked)), reasons.cache_asked(scene.settings)
    left = spare_mib - host.total
    size = float(int(min(CACHE_MAX_MIB, max(CACHE_MIN_MIB, left / 2))))
    return replace(host, cache=size), reasons.cache(scene.model, window.kv_type, size, left, CACHE_MAX_MIB)


def _threads(settings: Settings, hardware: Hardware) -> tuple[tuple[int, ...], Choice]:
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


def _alternatives(scene: _Scene, best: Plan, window: Window) -> list[Plan]:
    """The first plan's neighbours, only what fits, each once."""
    found = list(_around_cpu(scene, best, window))
    if best.placement.shares:
        found = list(_around_gpu(scene, best, window))
    room = float("inf") if scene.settings.allow_disk else max(best.usable_mib, best.memory.total)
    fits = [p for p in found if p.memory.total <= room and _is_near(p, best)]
    distinct = {(p.threads, p.ubatch, p.variant): p for p in reversed(fits)}
    distinct.pop((best.threads, best.ubatch, best.variant), None)
    ordered = [p for p in fits if distinct.get((p.threads, p.ubatch, p.variant)) is p]
    return ordered[: PLANS_MAX - 1]


def _is_near(other: Plan, best: Plan) -> bool:
    """Not worth measuring is what bandwidths alone make much slower."""
    return other.speed is None or best.speed is None or other.speed.job_s <= best.speed.job_s * NEAR


def _around_cpu(scene: _Scene, best: Plan, window: Window) -> Iterator[Plan]:
    """Other threads, other ubatches, and both."""
    settings = scene.settings
    threads, _ = _threads(settings, scene.hardware)
    ubatches = (
        (best.ubatch,) if settings.ubatch else tuple(dict.fromkeys(min(u, padded(best.context)) for u in UBATCHES))
    )
    for ubatch in ubatches:
        placed = _again(scene, window, ubatch=ubatch)
        for count in threads:
            if placed:
                yield _with(scene, best, placed, ubatch=ubatch, threads=count)


def _around_gpu(scene: _Scene, best: Plan, window: Window) -> Iterator[Plan]:
    """Experts of a few layers more or fewer in host memory, larger batches where something is copied for each, other
    threads where the CPU works, weights loaded and not mapped, rows split where cards are linked."""
    settings, placement = scene.settings, best.placement
    works_on_cpu = bool(placement.cpu_layers or placement.cpu_expert_layers)
    if works_on_cpu and settings.n_cpu_moe is None and placement.cpu_expert_layers:
        for more in EXPERTS_AROUND:
            placed = _again(scene, window, ubatch=best.ubatch, experts=placement.cpu_expert_layers + more)
            if placed and placed.placement.cpu_layers == placement.cpu_layers:
                yield _with(scene, best, placed, ubatch=best.ubatch)
    if not settings.ubatch:
        for ubatch in UBATCHES_GPU:
            if ubatch <= padded(best.context) and (placed := _again(scene, window, ubatch=ubatch)):
                yield _with(scene, best, placed, ubatch=ubatch)
    if works_on_cpu:
        threads, _ = _threads(settings, scene.hardware)
        yield from (replace(best, threads=count, threads_batch=count) for count in threads)
        # Then host weights are pinned, and copies of them twice as fast; from disk they are read only while mapped.
        if settings.load_mode == "auto" and best.memory.total <= best.usable_mib:
            why = "host weights are loaded, and pinned for the GPU, instead of mapped; measured beside mmap"
            yield _reworded(replace(best, load_mode="none"), load_mode=("none", why))
    elif "row" in scene.engine.split_modes and _are_linked(scene, placement):
        split = replace(placement, split_mode="row")
        why = "rows of each matrix are split over the linked cards; measured beside whole layers"
        yield _reworded(replace(best, placement=split), placement=(split.in_short(), why))


def _reworded(plan: Plan, **words: tuple[str, str]) -> Plan:
    """With another value and reason for some of its choices."""
    choices = tuple(
        replace(choice, value=words[choice.name][0], reason=words[choice.name][1]) if choice.name in words else choice
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def _are_linked(scene: _Scene, placement: Placement) -> bool:
    used = [device for device in scene.machine.devices if device.id in {share.id for share in placement.shares}]
    return len(used) > 1 and all(other.index in one.peers for one in used for other in used if other is not one)


def _again(scene: _Scene, window: Window, *, ubatch: int, experts: int | None = None) -> Placed | None:
    if experts is not None and experts < 0:
        return None
    work = replace(scene.work, context=padded(window.context), kv_type=window.kv_type, ubatch=ubatch)
    return place(work if experts is None else replace(work, cpu_expert_layers=experts), scene.machine)


def _with(scene: _Scene, best: Plan, placed: Placed, *, ubatch: int, threads: int | None = None) -> Plan:
    host = _host(scene, placed.host, best.load_mode, bool(placed.placement.shares))
    host = replace(host, cache=best.memory.cache, checkpoints=best.memory.checkpoints)
    count = threads or best.threads
    where = reasons.placement(placed, scene.machine, scene.notes, scene.settings)
    words = {"placement": (where.value, where.reason)}
    if ubatch != best.ubatch:
        words["ubatch"] = (str(ubatch), f"measured beside {best.ubatch}")
    return replace(
        _reworded(best, **words),
        threads=count,
        threads_batch=count,
        ubatch=ubatch,
        batch=max(BATCH, ubatch),
        memory=host,
        placement=placed.placement,
        speed=placed.speed,
    )
