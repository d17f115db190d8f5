"""The words for each choice of a plan: what was taken, beside which figures, and what more would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.engines.llama.planning.context import ContextPlan
from appliance.engines.llama.planning.memory import MIB, kv_bytes_per_token, kv_mib, padded, weights_mib
from appliance.engines.llama.planning.placement import Placed, Resources
from appliance.engines.llama.planning.rope import in_words, rope_for
from appliance.engines.llama.planning.slots import slots
from appliance.model import Model
from appliance.plan import Device, GpuAllocation, KvCheck, Memory, Placement
from appliance.plan.choice import Choice
from appliance.probe import Cpu, Hardware
from appliance.settings import Settings


def limit(hardware: Hardware) -> str:
    memory = hardware.memory
    if memory.limit_mib is None:
        return f"MemAvailable of this machine, {memory.total_mib:,.0f} MiB in all"
    return f"memory limit of this container: {memory.limit_mib:,.0f} MiB"


def needs(memory: Memory, kv_type: str, context: int) -> str:
    return (
        f"{memory.total:,.0f} MiB ({memory.weights:,.0f} weights, {memory.kv + memory.state:,.0f} KV cache "
        f"at {kv_type} for {context:,} tokens, {memory.compute + memory.output + memory.overhead:,.0f} buffers, "
        f"{memory.cache:,.0f} prompt cache)"
    )


def context(settings: Settings, hardware: Hardware, model: Model, context_plan: ContextPlan) -> Choice:
    sizes = _beside(settings, hardware, model, context_plan)
    value = f"{context_plan.context:,}"
    if settings.ctx_size:
        rope = rope_for(settings, model, context_plan.context)
        beyond = f"; {in_words(rope)}" if rope else ""
        return Choice(
            name="context", value=value, reason=f"asked for{beyond}: {sizes}", source=settings.sources["ctx_size"]
        )
    if (
        settings.allow_disk
        and weights_mib(model) > hardware.memory.usable_mib
        and not context_plan.placed.placement.shares
    ):
        why, source = f"weights exceed memory and --allow-disk is on: {sizes}", "allow_disk"
    elif context_plan.context >= model.native_context:
        why, source = f"the model's native length, and it fits: {sizes}", "model"
    else:
        why = (
            f"what memory carries, of the model's native {model.native_context:,}: {sizes}{_more(context_plan, model)}"
        )
        source = limit(hardware) if not context_plan.placed.placement.shares else "memory of the GPUs, and speed"
    return Choice(name="context", value=value, reason=why, source=source)


def _beside(settings: Settings, hardware: Hardware, model: Model, context_plan: ContextPlan) -> str:
    kv = kv_mib(model, context_plan.kv_type, context_plan.context, settings.ubatch or 512, slots(settings))
    words = f"{kv:,.0f} MiB of KV at {context_plan.kv_type} beside {weights_mib(model):,.0f} MiB of weights"
    shares = context_plan.placed.placement.shares
    if not shares:
        return words
    left = sum(share.gpu.free_mib - share.memory.total for share in shares)
    whole = sum(share.gpu.free_mib + share.gpu.held_back_mib for share in shares)
    host = context_plan.placed.host
    cached = f", and {host.kv:,.0f} of the KV," if host.kv else ""
    away = f", {host.weights:,.0f} of them{cached} in host memory," if host.weights else ""
    return f"{words}{away} leaves {left:,.0f} of {whole:,.0f} MiB of GPU memory, with {_held(shares):,.0f} held back"


def _held(shares: tuple[GpuAllocation, ...]) -> float:
    return sum(share.gpu.held_back_mib for share in shares)


def _more(context_plan: ContextPlan, model: Model) -> str:
    """What twice the context would need."""
    larger = min(2 * padded(context_plan.context), padded(model.native_context))
    if not context_plan.placed.placement.shares or larger <= context_plan.context:
        return ""
    enough = [kind for kind, tokens in context_plan.carried.items() if tokens >= larger]
    if enough and context_plan.kv_type not in enough:
        return f"; {larger:,} would need {enough[0]}"
    if not context_plan.larger:
        return f"; {2 * padded(context_plan.context):,} would not fit at all"
    kind, seconds = min(context_plan.larger.items(), key=lambda item: item[1])
    times = seconds / context_plan.placed.speed.job_s
    return (
        f"; {2 * padded(context_plan.context):,} at {kind} would push layers off the GPUs, and a job would take "
        f"{times:.1f} times as long"
    )


def kv_type(settings: Settings, context_plan: ContextPlan, kv_checks: Sequence[KvCheck], *, is_slow: bool) -> Choice:
    if settings.kv_type != "auto":
        slow = "; flash attention of this engine converts it for every token on a GPU, which is slow" if is_slow else ""
        return Choice(
            name="kv_type",
            value=context_plan.kv_type,
            reason=f"asked for{slow}",
            source=settings.sources["kv_type"],
            is_refusal=is_slow,
        )
    carried: Mapping[str, int] = context_plan.carried
    proof = next((v for v in kv_checks if v.kv_type == context_plan.kv_type), None)
    if proof is not None and "q8_0" in carried:
        why = f"q8_0 would carry only {carried['q8_0']:,} tokens, {proof.kv_type} carries {carried[proof.kv_type]:,}: "
        return Choice(name="kv_type", value=context_plan.kv_type, reason=why + proof.why, source="memory, and measured")
    if context_plan.kv_type == "q8_0" and "f16" in carried:
        why = f"f16 would carry only {carried['f16']:,} tokens, q8_0 carries {carried['q8_0']:,} at almost no loss"
    else:
        why = f"exact, and carries {max(context_plan.context, carried[context_plan.kv_type]):,} tokens here"
    return Choice(name="kv_type", value=context_plan.kv_type, reason=why, source="memory")


def placement(placed: Placed, resources: Resources, notes: tuple[str, ...], settings: Settings) -> Choice:
    found = placed.placement
    parts = [*_in_parallel(found), *(_holds(at, share) for at, share in enumerate(found.shares))]
    if found.cpu_layers:
        parts.append(f"the CPU holds {_first(found.cpu_layers)}")
    if found.cpu_expert_layers:
        parts.append(f"the experts of {_first(found.cpu_expert_layers)} stay in host memory")
    if not found.shares:
        parts.append("the CPU holds everything: no GPU has room for a part that pays")
    parts += _reordered(found, resources)
    used = {share.gpu.id for share in found.shares}
    for device in resources.devices:
        if device.id not in used:
            parts.append(f"{device.name} (GPU {device.index}) is left out: {_why_not(device, found)}")
        if device.note:
            parts.append(f"{device.name}: {device.note}")
    how = "measured" if resources.dram_is_measured else "assumed"
    dram = f"DRAM {resources.dram_gb_s:.0f} GB/s, {how}"
    parts.append(f"predicted: {placed.speed.describe()}, from bandwidths ({dram})")
    asked = [
        settings.sources[name]
        for name in ("gpu_layers", "n_cpu_moe", "devices")
        if settings.sources.get(name, "default") != "default"
    ]
    wants_cpu = settings.devices == "none" or settings.gpu_layers == 0
    source = ", ".join(asked) or "memory and bandwidths"
    return Choice(
        name="placement",
        value=found.summary(),
        reason="; ".join((*parts, *notes)),
        source=source,
        is_refusal=not found.shares and not wants_cpu,  # never the CPU in silence
    )


def _in_parallel(found: Placement) -> list[str]:
    if not found.parts:
        return []
    return [
        f"each matrix is split over {len(found.shares)} cards (--split-mode tensor, experimental in llama.cpp): they "
        "work at once, and exchange results twice a layer"
    ]


def _reordered(found: Placement, resources: Resources) -> list[str]:
    """Where another card comes first than the fastest, or than the first that was asked for."""
    used = {share.gpu.id for share in found.shares}
    in_order = [device for device in resources.devices if device.id in used]
    if not in_order or found.shares[0].gpu.id == in_order[0].id:
        return []
    first, second = found.shares[0].gpu, in_order[0]
    return [
        f"{first.name} (GPU {first.index}) comes before {second.name} (GPU {second.index}): what lies in host memory "
        f"is copied to the first, and its link takes {first.upload_gb_s:.0f} GB/s, not {second.upload_gb_s:.0f}"
    ]


def without_gpu(settings: Settings) -> tuple[Choice, ...]:
    """For numbers that were asked for and mean nothing where no GPU is used."""
    asked = {"gpu_layers": (settings.gpu_layers, 0), "n_cpu_moe": (settings.n_cpu_moe, "all")}
    return tuple(
        Choice(
            name=name,
            value=str(value),
            reason=f"{number} was asked for, and there is no GPU to use",
            source=settings.sources[name],
            is_refusal=True,
        )
        for name, (number, value) in asked.items()
        if number
    )


def _why_not(device: Device, found: Placement) -> str:
    if device.is_slice and found.shares:
        return "a program can use one slice of a GPU, and this is not the faster choice"
    if not found.shares:
        return "nothing fits on it that pays"
    slowest = min(share.gpu.bandwidth_gb_s for share in found.shares)
    if device.bandwidth_gb_s < slowest:
        return f"a job is faster without it: {device.bandwidth_gb_s:,.0f} GB/s, estimated, would slow each layer on it"
    return "a job is faster without it"


def _first(count: int) -> str:
    return "the first layer" if count == 1 else f"the first {count} layers"


def _holds(at: int, share: GpuAllocation) -> str:
    m = share.memory
    state = f", {m.state:,.0f} states" if m.state else ""
    card = f"{share.device} ({share.gpu.name}, {share.gpu.bandwidth_gb_s:,.0f} GB/s estimated)"
    return (
        f"{card} holds {share.layers} layers in "
        f"{m.total:,.0f} of {share.gpu.free_mib:,.0f} MiB: {m.weights:,.0f} weights, {m.kv:,.0f} KV cache{state}, "
        f"{m.compute:,.0f} buffers"
    )


def cache_asked(settings: Settings) -> Choice:
    why = "asked for; without a cache a side request costs the conversation a whole prefill"
    source = settings.sources["cache_ram_mib"]
    return Choice(name="cache_ram_mib", value=str(settings.cache_ram_mib), reason=why, source=source)


def cache(model: Model, kv_type: str, size: float, left: float, most: float) -> Choice:
    per_token = kv_bytes_per_token(model, kv_type)
    tokens = f": about {int(size * MIB / per_token):,} tokens" if per_token else ""
    why = f"half of the {max(left, 0):,.0f} MiB that are left, at most {most:,.0f}{tokens}"
    if not int(size):
        why = "off: the model would not fit beside it; another request costs a conversation what its slot then loses"
    return Choice(name="cache_ram_mib", value=f"{size:.0f}", reason=why, source="memory")


def checkpoints(count: int, each: float, most: int) -> Choice:
    why = (
        f"states and sliding windows cannot be rolled back, only restored: {count} of {each:,.1f} MiB for all slots, "
        f"a quarter of what is left, and at most {most}"
    )
    return Choice(name="checkpoints", value=str(count), reason=why, source="memory")


def threads_asked(settings: Settings, threads: int) -> Choice:
    held = f" ({settings.threads}), held at what this container may use" if threads < (settings.threads or 0) else ""
    return Choice(
        name="threads",
        value=str(threads),
        reason=f"asked for{held}",
        source=settings.sources["threads"],
        is_refusal=bool(held),
    )


def threads(cpu: Cpu, first: int) -> Choice:
    quota = f", quota {cpu.quota:g}" if cpu.quota is not None else ""
    seen = f"{cpu.physical or 'unknown'} physical, {cpu.logical} logical{quota}"
    why = f"physical cores that this container may use ({seen}); its neighbours are measured"
    return Choice(name="threads", value=str(first), reason=why, source="probe")


def ubatch(settings: Settings, size: int) -> Choice:
    if settings.ubatch:
        return Choice(name="ubatch", value=str(size), reason="asked for", source=settings.sources["ubatch"])
    why = "llama.cpp's default, a good start; its neighbours are measured"
    return Choice(name="ubatch", value=str(size), reason=why, source="default")


def fixed(no_flash: str | None = None) -> tuple[Choice, ...]:
    keeps = "no scores of context by ubatch are kept, and a quantized V cache needs it"
    lacks = f"{no_flash}: it would run on the CPU; so scores of context by ubatch are kept, and no quantized V cache"
    return (
        Choice(
            name="flash_attention",
            value="off" if no_flash else "on",
            reason=lacks if no_flash else keeps,
            source="model" if no_flash else "default",
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
