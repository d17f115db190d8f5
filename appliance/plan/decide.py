"""(Settings, ImageFacts, EngineFacts, Hardware, Model) -> list[Plan]: pure, and every choice carries its reason.

The first plan is the prediction; those after it differ from it only in what measuring decides (threads, ubatch).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from appliance.errors import ConfigError, ModelDoesNotFitError, ModelUnreadableError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, plain_name
from appliance.plan.memory import (
    APPLIANCE_MIB,
    CONTEXT_STEP,
    ENGINE_MIB,
    MIB,
    Memory,
    compute_mib,
    kv_bytes_per_token,
    kv_mib,
    output_mib,
    padded,
    weights_mib,
)
from appliance.probe import Hardware
from appliance.settings import Settings

UBATCH = 512
UBATCHES = (512, 256)  # more than a chat brings along cannot show in a chat's time
BATCH = 2048
MIN_CONTEXT = 256
GOOD_CONTEXT = 32768  # f16 is kept down to here before q8_0 buys a larger window
CACHE_MAX_MIB = 8192.0  # llama-server's own default
CACHE_MIN_MIB = 128.0
SPARE_SHARE = 0.03  # of usable memory, left alone: page cache for the weights' file, other processes of the container


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value of a plan with the reason for it; `source` says which fact or setting decided."""

    name: str
    value: str
    reason: str
    source: str
    is_refusal: bool = False  # something was asked for and is not done: said at the start, not only when asked


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
    memory: Memory
    usable_mib: float
    choices: tuple[Choice, ...] = field(default=(), repr=False)


def plan(settings: Settings, image: ImageFacts, engine: EngineFacts, hardware: Hardware, model: Model) -> list[Plan]:
    """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""
    _check(settings, engine, model)
    usable_mib = float(hardware.memory.usable_mib)
    kv_type, context, window = _window(settings, engine, hardware, model, usable_mib)
    cache_mib, cache = _cache(settings, model, usable_mib, kv_type, context)
    threads, by_threads = _threads(settings, hardware)
    ubatch = min(settings.ubatch or UBATCH, padded(context))
    load_mode, loading = _load_mode(settings, hardware, model)
    best = Plan(
        engine=image.engine,
        model_path=str(model.path),
        alias=settings.alias or plain_name(model.path),
        context=context,
        kv_type=kv_type,
        threads=threads[0],
        threads_batch=threads[0],
        batch=max(BATCH, ubatch),
        ubatch=ubatch,
        parallel=settings.parallel,
        cache_ram_mib=int(cache_mib),
        flash_attention=True,
        load_mode=load_mode,
        is_embedding=model.is_embedding_model,
        memory=_memory(settings, model, kv_type, context, ubatch, cache_mib),
        usable_mib=usable_mib,
        choices=(*window, cache, by_threads, _by_ubatch(settings, ubatch), *_fixed(settings), loading),
    )
    return [best, *_alternatives(best, settings, model, threads)]


def as_measured(planned: Plan, measured: Plan) -> Plan:
    """`planned` with what measuring decided: threads and ubatch of `measured`, and the words for them.

    All else is decided by the facts of this start: memory that is free now, not when it was measured.
    """
    words = {choice.name: choice for choice in measured.choices if choice.source == "measured"}
    scale = measured.ubatch / planned.ubatch
    return replace(
        planned,
        threads=measured.threads,
        threads_batch=measured.threads_batch,
        ubatch=measured.ubatch,
        batch=measured.batch,
        memory=replace(planned.memory, compute=planned.memory.compute * scale),  # every term of it grows with ubatch
        choices=tuple(words.get(choice.name, choice) for choice in planned.choices),
    )


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


def _check(settings: Settings, engine: EngineFacts, model: Model) -> None:
    if model.cache_kind != "attention":
        message = f"model cannot be planned yet: {model.path}: {model.cache_reason}"
        raise ModelUnreadableError(message, hint="use a model with plain attention layers")
    if settings.kv_type != "auto" and settings.kv_type not in engine.kv_types:
        message = f"setting kv_type is not offered by this engine: '{settings.kv_type}' ({settings.sources['kv_type']})"
        raise ConfigError(message, hint=f"this image offers {', '.join(engine.kv_types)}")


def _memory(settings: Settings, model: Model, kv_type: str, context: int, ubatch: int, cache_mib: float) -> Memory:
    return Memory(
        weights=weights_mib(model),
        kv=kv_mib(model, kv_type, context),
        compute=compute_mib(model, ubatch, context),
        output=output_mib(model, settings.parallel),
        cache=cache_mib,
        overhead=ENGINE_MIB + APPLIANCE_MIB,
    )


def _window(
    settings: Settings, engine: EngineFacts, hardware: Hardware, model: Model, usable_mib: float
) -> tuple[str, int, tuple[Choice, Choice]]:
    """The largest context that memory carries, at most native, and the KV type that gets it."""
    limit = _limit_in_words(hardware)
    kinds = [settings.kv_type] if settings.kv_type != "auto" else [t for t in ("f16", "q8_0") if t in engine.kv_types]
    carried = {kind: _carried(settings, model, kind, usable_mib) for kind in kinds}
    wanted = settings.ctx_size or model.native_context
    kv_type = kinds[0]
    if len(kinds) > 1 and carried["f16"] < min(wanted, GOOD_CONTEXT) and carried["q8_0"] > carried["f16"]:
        kv_type = "q8_0"
    context = min(carried[kv_type], padded(wanted) if settings.ctx_size else wanted)
    if context < min(wanted, MIN_CONTEXT) or (settings.ctx_size and context < settings.ctx_size):
        context = _refused_or_from_disk(settings, model, kv_type, usable_mib, limit, wanted)
    return (
        kv_type,
        context,
        (
            _why_context(settings, model, kv_type, context, carried, limit),
            _why_kv_type(settings, kv_type, carried),
        ),
    )


def _carried(settings: Settings, model: Model, kv_type: str, usable_mib: float) -> int:
    """Tokens of context that fit beside weights, buffers and the smallest prompt cache; 0 when none does."""
    fixed = _memory(settings, model, kv_type, 0, settings.ubatch or UBATCH, _least_cache(settings)).total
    free_bytes = (usable_mib * (1 - SPARE_SHARE) - fixed) * MIB
    per_token = kv_bytes_per_token(model, kv_type) + 2 * (settings.ubatch or UBATCH)  # the mask grows with context too
    return max(0, int(free_bytes / per_token) // CONTEXT_STEP * CONTEXT_STEP)


def _least_cache(settings: Settings) -> float:
    return float(settings.cache_ram_mib) if settings.cache_ram_mib is not None else CACHE_MIN_MIB


def _refused_or_from_disk(
    settings: Settings, model: Model, kv_type: str, usable_mib: float, limit: str, wanted: int
) -> int:
    """Without `allow_disk` mmap would start all the same, and then read the weights from disk for every token."""
    least = settings.ctx_size or min(wanted, MIN_CONTEXT)
    if settings.allow_disk:
        return padded(settings.ctx_size or min(wanted, 4096))
    need = _memory(settings, model, kv_type, least, settings.ubatch or UBATCH, _least_cache(settings))
    message = (
        f"model does not fit: {model.path.name} needs {need.total:,.0f} MiB ({need.weights:,.0f} weights, "
        f"{need.kv:,.0f} KV cache at {kv_type} for {padded(least):,} tokens, "
        f"{need.compute + need.output + need.overhead:,.0f} buffers, {need.cache:,.0f} prompt cache), "
        f"and {usable_mib:,.0f} MiB are usable ({limit})"
    )
    smaller = "a smaller --ctx-size, " if settings.ctx_size else ""
    raise ModelDoesNotFitError(
        message,
        hint=f"use {smaller}a smaller model or quantization, raise the limit, or --allow-disk on to read from disk",
    )


def _limit_in_words(hardware: Hardware) -> str:
    memory = hardware.memory
    if memory.limit_mib is None:
        return f"MemAvailable of this machine, {memory.total_mib:,.0f} MiB in all"
    return f"memory limit of this container: {memory.limit_mib:,.0f} MiB"


def _why_context(
    settings: Settings, model: Model, kv_type: str, context: int, carried: dict[str, int], limit: str
) -> Choice:
    size = (
        f"{kv_mib(model, kv_type, context):,.0f} MiB of KV at {kv_type} beside {weights_mib(model):,.0f} MiB of weights"
    )
    if settings.ctx_size:
        beyond = f"; beyond the model's native {model.native_context:,}" if context > model.native_context else ""
        return Choice(
            name="context",
            value=f"{context:,}",
            reason=f"asked for{beyond}: {size}",
            source=settings.sources["ctx_size"],
        )
    if context >= model.native_context:
        why, source = f"the model's native length, and it fits: {size}", "model"
    elif carried[kv_type] == 0:
        why, source = f"weights exceed memory and --allow-disk is on: {size}", "allow_disk"
    else:
        why, source = f"what memory carries, of the model's native {model.native_context:,}: {size}", limit
    return Choice(name="context", value=f"{context:,}", reason=why, source=source)


def _why_kv_type(settings: Settings, kv_type: str, carried: dict[str, int]) -> Choice:
    if settings.kv_type != "auto":
        return Choice(name="kv_type", value=kv_type, reason="asked for", source=settings.sources["kv_type"])
    if kv_type == "q8_0":
        why = f"f16 would carry only {carried['f16']:,} tokens, q8_0 carries {carried['q8_0']:,} at almost no loss"
    else:
        why = f"exact, and carries {carried[kv_type]:,} tokens here"
    return Choice(name="kv_type", value=kv_type, reason=why, source="memory")


def _cache(settings: Settings, model: Model, usable_mib: float, kv_type: str, context: int) -> tuple[float, Choice]:
    """The prompt cache is never off by itself: without it a side request costs the conversation a whole prefill."""
    if settings.cache_ram_mib is not None:
        why = "asked for; without a cache a side request costs the conversation a whole prefill"
        return float(settings.cache_ram_mib), Choice(
            name="cache_ram_mib",
            value=str(settings.cache_ram_mib),
            reason=why,
            source=settings.sources["cache_ram_mib"],
        )
    without = _memory(settings, model, kv_type, context, settings.ubatch or UBATCH, 0.0).total
    left = usable_mib * (1 - SPARE_SHARE) - without
    size = float(int(min(CACHE_MAX_MIB, max(CACHE_MIN_MIB, left / 2))))
    tokens = int(size * MIB / kv_bytes_per_token(model, kv_type))
    why = f"half of the {max(left, 0):,.0f} MiB that are left, at most {CACHE_MAX_MIB:,.0f}: about {tokens:,} tokens"
    return size, Choice(name="cache_ram_mib", value=f"{size:.0f}", reason=why, source="memory")


def _threads(settings: Settings, hardware: Hardware) -> tuple[tuple[int, ...], Choice]:
    """Candidates, the predicted one first; never above what the container may use: the engine sees the host's cores."""
    cpu = hardware.cpu
    most = cpu.threads_max
    if settings.threads:
        threads = min(settings.threads, most)
        held = f" ({settings.threads}), held at what this container may use" if threads < settings.threads else ""
        return (threads,), Choice(
            name="threads",
            value=str(threads),
            reason=f"asked for{held}",
            source=settings.sources["threads"],
            is_refusal=bool(held),
        )
    first = max(1, min(cpu.cores, most))
    candidates = tuple(dict.fromkeys((first, most, max(1, first // 2))))
    quota = f", quota {cpu.quota:g}" if cpu.quota is not None else ""
    seen = f"{cpu.physical or 'unknown'} physical, {cpu.logical} logical{quota}"
    why = f"physical cores that this container may use ({seen}); its neighbours are measured"
    return candidates, Choice(name="threads", value=str(first), reason=why, source="probe")


def _by_ubatch(settings: Settings, ubatch: int) -> Choice:
    if settings.ubatch:
        return Choice(name="ubatch", value=str(ubatch), reason="asked for", source=settings.sources["ubatch"])
    why = "llama.cpp's default, a good start on a CPU; its neighbours are measured"
    return Choice(name="ubatch", value=str(ubatch), reason=why, source="default")


def _fixed(settings: Settings) -> tuple[Choice, ...]:
    return (
        Choice(
            name="parallel",
            value=str(settings.parallel),
            reason="slots share one context, so they cost no memory; a second request runs beside the first",
            source=settings.sources["parallel"],
        ),
        Choice(
            name="flash_attention",
            value="on",
            reason="no scores of context by ubatch are kept, and a quantized V cache needs it",
            source="default",
        ),
        Choice(
            name="priority",
            value="normal",
            reason="raising it needs a capability that a hardened container has dropped",
            source="default",
        ),
        Choice(
            name="fit",
            value="off",
            reason="every value is set here; the engine's own fit knows no cgroup",
            source="default",
        ),
    )


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


def _alternatives(best: Plan, settings: Settings, model: Model, threads: tuple[int, ...]) -> list[Plan]:
    """The first plan's neighbours: other threads, other ubatches, and both; only what fits."""
    ubatches = (
        (best.ubatch,) if settings.ubatch else tuple(dict.fromkeys(min(u, padded(best.context)) for u in UBATCHES))
    )
    found = [
        replace(
            best,
            threads=t,
            threads_batch=t,
            ubatch=u,
            batch=max(BATCH, u),
            memory=replace(best.memory, compute=compute_mib(model, u, best.context)),
        )
        for u in ubatches
        for t in threads
    ]
    fits = best.usable_mib if not settings.allow_disk else float("inf")
    return [p for p in found if p != best and p.memory.total <= max(fits, best.memory.total)]
