"""Reasons for the choices of a plan, as text: the figures that decided, and the price of a larger value."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from appliance.engines.llama.planning.memory.flash import EXACT_TYPES
from appliance.engines.llama.planning.memory.memory import MIB, UBATCH, kv_bytes_per_token, kv_mib, weights_mib
from appliance.engines.llama.planning.memory.rope import in_words, rope_for
from appliance.engines.llama.planning.placement.context import (
    AS_WHOLE,
    GOOD_CONTEXT,
    HALF_FULL,
    NO_FIT,
    NOTICED,
    TOO_LONG,
    ContextPlan,
)
from appliance.engines.llama.planning.placement.placement import Placed, Resources
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR
from appliance.errors import printable
from appliance.model import Model
from appliance.plan import READABLE_TOKENS_PER_S, Device, GpuAllocation, KvCheck, Memory, Placement, Speed
from appliance.plan.parts.choice import Choice
from appliance.plan.parts.speeds import duration, rate
from appliance.plan.plan import percent
from appliance.probe import Cpu, Hardware
from appliance.settings import Settings

# Predictions for a CPU above this are often too high: all layers take less than 10 ms, and threads wait for one another
# several times in each layer.
HASTY_TOKENS_PER_S = 100
_SPLIT_SOURCE = "memory, bandwidths and links"


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
    detail = _beside(settings, hardware, model, context_plan)
    value = f"{context_plan.context:,}"
    native = f", of the model's native {model.native_context:,}"
    placement = context_plan.placed.placement
    if settings.ctx_size:
        rope = rope_for(settings, model, context_plan.context)
        beyond = f"; {in_words(rope)}" if rope else ""
        why, source = f"asked for{beyond}{_price(context_plan)}", settings.sources["ctx_size"]
    elif settings.allow_disk and weights_mib(model) > hardware.memory.usable_mib and not placement.shares:
        why, source = "weights exceed memory and --allow-disk is on", "allow_disk"
    elif context_plan.context >= model.native_context:
        why, source = f"the model's native length{_price(context_plan)}", "model"
    elif context_plan.bound == TOO_LONG:
        why, source = _read_in_time(settings, context_plan, native), settings.sources["fill_minutes"]
    elif not placement.shares:
        why, source = f"what memory carries{native}", limit(hardware)
    else:
        why = f"{_bound(context_plan, native)}{_price(context_plan)}{_more(context_plan)}"
        source = "memory of the GPUs, and speed"
    why += _when_full(context_plan)
    return Choice(name="context", value=value, reason=why, source=source, detail=detail)


def _read_in_time(settings: Settings, context_plan: ContextPlan, native: str) -> str:
    limit_s, more = 60.0 * settings.fill_minutes, context_plan.unhurried
    words = f"the most that is read in {settings.fill_minutes} min{native}"
    if context_plan.fill_s > limit_s:
        words = f"the least that clients work with{native}: it is read in {duration(context_plan.fill_s)}"
    if more is None or more.context <= context_plan.context:
        return words
    larger = f"--fill-minutes 0 would give {more.context:,}, read in {duration(more.fill_s)}"
    return f"{words}; {larger} and then decoding {rate(more.full)} tok/s, this {rate(context_plan.full)}"


def _when_full(context_plan: ContextPlan) -> str:
    """Return words on the speed when the context is full; "" if the mode does not ask for a readable one."""
    if not context_plan.minds_full:
        return ""
    words = f"; full it decodes {rate(context_plan.full)} tok/s"
    if context_plan.full >= READABLE_TOKENS_PER_S:
        return words
    wanted = f"{READABLE_TOKENS_PER_S:g}"
    if context_plan.reads_along:
        return f"{words}, not {wanted}, and mode balanced has it all the same"
    return f"{words}: no usable context reaches {wanted} when full"


def _bound(context_plan: ContextPlan, native: str) -> str:
    """Return words on the limit of the context length."""
    gpus = f"GPU{'s' * (len(context_plan.placed.placement.shares) > 1)}"
    where = {"leave the GPUs": f"everything on the {gpus}", "take attention off the GPUs": f"attention on the {gpus}"}
    if context_plan.bound in where:
        ubatch = f" and a ubatch of {context_plan.ubatch}" if context_plan.usual else ""
        return f"the most at {context_plan.kv_type} with {where[context_plan.bound]}{ubatch}{native}"
    if context_plan.bound == AS_WHOLE:
        return f"as many as whole layers are given{native}"
    if context_plan.bound == NO_FIT:
        return f"the most at {context_plan.kv_type} that fits{native}"
    ended = f"; more would {context_plan.bound}" if context_plan.bound else ""
    if HALF_FULL in context_plan.bound and context_plan.context <= GOOD_CONTEXT:
        ended = f"; beyond {GOOD_CONTEXT:,} a context is judged half full too: more would {context_plan.bound}"
    return f"the most at {context_plan.kv_type} that is worth its price{native}{ended}"


def _price(context_plan: ContextPlan) -> str:
    """Return words on the speed that the context costs, compared with a smaller one; "" if it costs none."""
    before, placed = context_plan.before, context_plan.placed
    if before is None or _tokens(before.placed) == _tokens(placed):
        return ""
    return (
        f"; {before.context:,} at {before.kv_type} {_where(before.placed)} would decode "
        f"{_tokens(before.placed)} tok/s, this {_tokens(placed)}"
    )


def _more(context_plan: ContextPlan) -> str:
    """Return words on the speed that the next larger context would cost; "" if there is none."""
    if not context_plan.next_tokens:
        return ""
    if context_plan.larger is None:
        return f"; {context_plan.next_tokens:,} would not fit"
    larger = context_plan.larger
    speeds = f"decode {_tokens(context_plan.placed)} -> {_tokens(larger.placed)} tok/s"
    half_full = f", half full {rate(context_plan.half_full)} -> {rate(larger.half_full)}"
    now, then = context_plan.placed.speed.prefill_tokens_per_s, larger.placed.speed.prefill_tokens_per_s
    prefill = f", prefill {rate(now)} -> {rate(then)}" if then < NOTICED * now else ""
    return f"; {larger.context:,} {_where(larger.placed)}: {speeds}{half_full}{prefill}"


def _where(placed: Placed) -> str:
    found = placed.placement
    if found.cpu_layers:
        return f"with {found.cpu_layers} of {found.cpu_layers + found.gpu_layers} layers on the CPU"
    if found.cpu_expert_layers:
        return f"with the experts of {found.cpu_expert_layers} layers in host memory"
    return f"with everything on the GPU{'s' * (len(found.shares) > 1)}" if found.shares else "on the CPU"


def _tokens(placed: Placed) -> str:
    return rate(placed.speed.decode_tokens_per_s)


def _beside(settings: Settings, hardware: Hardware, model: Model, context_plan: ContextPlan) -> str:
    kv = kv_mib(model, context_plan.kv_type, context_plan.context, context_plan.ubatch, settings.slots)
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


def kv_type(
    settings: Settings,
    context_plan: ContextPlan,
    kv_checks: Sequence[KvCheck],
    *,
    is_slow: bool,
    is_converted: bool = False,
) -> Choice:
    """Return the choice of the KV cache type.

    `is_slow`: flash attention of this engine converts the type on a GPU. `is_converted`: heads of this model have no
    kernel for the type, which the figures count.
    """
    found = _kv_type(settings, context_plan, kv_checks, is_slow=is_slow)
    if not is_converted or is_slow:
        return found
    words = "heads of this size have no kernel for it: it is converted to f16 for every token, as counted here"
    return replace(found, reason=f"{found.reason}; {words}")


def _kv_type(settings: Settings, context_plan: ContextPlan, kv_checks: Sequence[KvCheck], *, is_slow: bool) -> Choice:
    kind = context_plan.kv_type
    if settings.kv_type != "auto":
        slow = "; flash attention of this engine converts it for every token on a GPU, which is slow" if is_slow else ""
        return Choice(
            name="kv_type",
            value=kind,
            reason=f"asked for{slow}",
            source=settings.sources["kv_type"],
            is_refusal=is_slow,
        )
    if context_plan.placed.placement.split_mode == TENSOR:
        why = "exact" if kind in EXACT_TYPES else f"f16 would not fit in split mode {TENSOR}; rounded at almost no loss"
        return Choice(name="kv_type", value=kind, reason=why, source="memory")
    carried: Mapping[str, int] = context_plan.carried
    proof = next((v for v in kv_checks if v.kv_type == kind), None)
    if proof is not None and "q8_0" in carried:
        why = f"q8_0 would carry only {_with(context_plan, 'q8_0')}, {kind} carries {carried[kind]:,}: {proof.why}"
        return Choice(name="kv_type", value=kind, reason=why, source="memory, and measured")
    if kind != "f16" and "f16" in carried:
        return Choice(name="kv_type", value=kind, reason=_why_rounded(context_plan), source="memory")
    others = [other for other in carried if other != kind and carried[other] > context_plan.context]
    less = f"; {others[0]} would carry {_with(context_plan, others[0])}" if others else ""
    return Choice(name="kv_type", value=kind, reason=f"exact{less}", source="memory")


def _why_rounded(context_plan: ContextPlan) -> str:
    carried = context_plan.carried
    if carried["f16"] < context_plan.context and not context_plan.is_explicit:
        return f"f16 would carry only {_with(context_plan, 'f16')}; rounded at almost no loss"
    exact = context_plan.others.get("f16")
    if exact is None:
        return "f16 would not fit; rounded at almost no loss"
    slower = f"decode {_tokens(exact.placed)} tok/s, not {_tokens(context_plan.placed)}"
    if rate(exact.half_full) != rate(context_plan.half_full):
        slower += f", half full {rate(exact.half_full)}, not {rate(context_plan.half_full)}"
    return f"f16 would carry as much {_where(exact.placed)}: {slower}; rounded at almost no loss"


def _with(context_plan: ContextPlan, kind: str) -> str:
    """Return words on the tokens that another type carries, and how many with everything on GPUs if that is fewer."""
    most, knee = context_plan.carried[kind], context_plan.knees.get(kind, 0)
    return f"{most:,} tokens" + (f" ({knee:,} with everything on the GPUs)" if 0 < knee < most else "")


def placement(found: Placement, speed: Speed, resources: Resources, settings: Settings) -> Choice:
    parts = [
        *(_in_parallel(found) or _held_where(found)),
        *_reordered(found, resources),
        *_left_out(found, resources),
        *(f"{_named(device, resources)}: {device.note}" for device in resources.devices if device.note),
        f"predicted: {speed.describe()}, from bandwidths ({_dram(resources)})",
        *_how_wide(found, speed, resources),
    ]
    has_effect = found.cpu_expert_layers or settings.n_cpu_moe == 0  # not on a model without experts
    names = ("gpu_layers", *(("n_cpu_moe",) if has_effect else ()), "devices")
    asked = [settings.sources[name] for name in names if settings.is_set(name)]
    wants_cpu = settings.devices == "none" or settings.gpu_layers == 0
    return Choice(
        name="placement",
        value=found.summary(),
        reason="; ".join(parts),
        detail="; ".join(_holds(found, at) for at in range(len(found.shares))),
        source=", ".join(asked) or "memory and bandwidths",
        is_refusal=not found.shares and not wants_cpu,  # a start says so if it uses the CPU although there is a GPU
    )


def speed(found: Speed, placement: Placement, resources: Resources) -> Choice:
    """Return the choice of the speed, for machines without a GPU, where no choice of the placement is shown."""
    why = f"predicted from the bandwidth of memory ({_dram(resources)}) and the instructions of the cores"
    wide = _how_wide(placement, found, resources)
    return Choice(name="speed", value=found.describe(), reason="; ".join((why, *wide)), source="memory and CPU")


def _dram(resources: Resources) -> str:
    how = "measured" if resources.dram_is_measured else "assumed"
    return f"DRAM {resources.memory_gb_s:.0f} GB/s {how}, of which kernels reach {resources.dram_gb_s:.0f}"


def _how_wide(found: Placement, speed: Speed, resources: Resources) -> Iterator[str]:
    """Yield warnings for kinds of CPU plans with published results more than 50 % off the prediction
    (docs/figures.md)."""
    if found.shares:
        return
    if speed.decode_tokens_per_s > HASTY_TOKENS_PER_S:
        yield "of small models on a CPU such predictions were up to 1.9 times too high: some types are computed slowly"
    if resources.cpu and resources.cpu.core.may_differ and not resources.cpu.capacities:
        yield "cores are taken as equal: small ones among them made a prompt up to 4.6 times as long"


def _in_parallel(found: Placement) -> list[str]:
    if not found.parts:
        return []
    return [
        f"each matrix is split over {len(found.shares)} cards (--split-mode tensor, experimental in llama.cpp): they "
        "work at once, and exchange results twice a layer"
    ]


def split(taken: ContextPlan, layers: ContextPlan) -> Choice:
    """Return the choice of split mode tensor, with the speeds of whole layers beside its own."""
    why = f"{_by_tensors(taken, layers)}; whole layers, one after the other, are measured beside it"
    return Choice(name="split", value=TENSOR, reason=why, source=_SPLIT_SOURCE)


def whole_layers(found: ContextPlan, tensor: ContextPlan | None, why: str) -> Choice:
    """Return the choice against split mode tensor, for the reason `why`.

    `tensor` is such a split with the most exact cache, whose predicted speeds are named; None if there is none.
    """
    mode = found.placed.placement.split_mode
    words = f"{_by_tensors(tensor, found)}; {why}; measuring decides" if tensor else f"not {TENSOR}: {why}"
    return Choice(name="split", value=mode, reason=words, source=_SPLIT_SOURCE)


def _by_tensors(tensor: ContextPlan, layers: ContextPlan) -> str:
    here, there = tensor.placed.speed, layers.placed.speed
    count = len(tensor.placed.placement.shares)
    return (
        f"split mode {TENSOR} over {count} cards is predicted to make a chat job "
        f"{layers.placed.cost / tensor.placed.cost:.2f} times as fast at {tensor.kv_type}: decode "
        f"{rate(here.decode_tokens_per_s)} tok/s, else {rate(there.decode_tokens_per_s)}, prefill "
        f"{rate(here.prefill_tokens_per_s)}, else {rate(there.prefill_tokens_per_s)}"
    )


def slow_links(cards: Sequence[Device], least_gb_s: float, unknown: Collection[str]) -> str:
    """Return words on cards whose links are slower than split mode tensor needs."""
    slowest = min(cards, key=lambda card: card.pinned_gb_s)
    how = "the link is unknown and taken as" if slowest.id in unknown else "the link takes"
    return (
        f"cards exchange results twice a layer over links of {least_gb_s:g} GB/s or more, and of "
        f"{slowest.name} (GPU {slowest.index}) {how} {slowest.pinned_gb_s:.1f}"
    )


def no_room(found: ContextPlan, missing_mib: float) -> str:
    """Return words on the memory that a card lacks for split mode tensor; 0 MiB if it is the host that lacks some."""
    where = f"a card lacks {missing_mib:,.0f} MiB" if missing_mib else "the host lacks memory"
    return f"all weights and {found.context:,} tokens have to lie on the cards, and {where} for them"


def slower_half_full(tensor: ContextPlan, found: ContextPlan) -> str:
    return f"half full it would decode {rate(tensor.half_full)} tok/s, whole layers {rate(found.half_full)}"


def left_out(notes: tuple[str, ...]) -> tuple[Choice, ...]:
    """Return the choice for GPUs that cannot be used. It is a line of its own, so that nobody overlooks a lost card."""
    if not notes:
        return ()
    return (Choice(name="left_out", value=str(len(notes)), reason="; ".join(notes), source="probe"),)


def _held_where(found: Placement) -> Iterator[str]:
    """Yield words on the placement: layers of each GPU, layers on the CPU, and experts in host memory."""
    held = (
        f"{share.device} ({share.gpu.name}) {share.layers} layer{'s' * (share.layers != 1)}" for share in found.shares
    )
    yield ", ".join(held) if found.shares else "the CPU holds everything: no faster part fits on a GPU"
    if _are_linked(found):
        yield "linked by NVLink"
    if found.cpu_layers:
        yield f"the CPU holds {_first(found.cpu_layers)}"
    if found.cpu_expert_layers:
        yield f"the experts of {_first(found.cpu_expert_layers)} stay in host memory"


def _named(device: Device, resources: Resources) -> str:
    """Return the device's name, with its index if several devices have that name."""
    is_one = sum(other.name == device.name for other in resources.devices) == 1
    return device.name if is_one else f"{device.name} (GPU {device.index})"


def _are_linked(found: Placement) -> bool:
    used = [share.gpu for share in found.shares]
    return len(used) > 1 and all(other.index in one.peers for one in used for other in used if other is not one)


def _left_out(found: Placement, resources: Resources) -> Iterator[str]:
    """Yield a sentence for each usable card that the plan leaves out; equal slices share one."""
    used = {share.gpu.id for share in found.shares}
    unused = [device for device in resources.devices if device.id not in used]
    for (name, index), group in itertools.groupby(unused, key=lambda each: (each.name, each.index)):
        first, *more = group
        what = f"{len(more) + 1} of {name} (GPU {index}) are" if more else f"{name} (GPU {index}) is"
        yield f"{what} left out: {_why_not(first, found)}"


def _reordered(found: Placement, resources: Resources) -> list[str]:
    """Return a sentence if the plan's first card is not the fastest one, or not the first of --devices; else none."""
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
    """Return refusals of --gpu-layers and --n-cpu-moe, which have no effect without a GPU."""
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


def without_experts(settings: Settings, model: Model) -> tuple[Choice, ...]:
    """Return a refusal of --n-cpu-moe if the model has no experts; else nothing."""
    if model.experts or not settings.n_cpu_moe:
        return ()
    why = f"{settings.n_cpu_moe} was asked for, and this model has no experts"
    source = settings.sources["n_cpu_moe"]
    return (Choice(name="n_cpu_moe", value="0", reason=why, source=source, is_refusal=True),)


def _why_not(device: Device, found: Placement) -> str:
    if device.is_slice and found.shares:
        return "a program can use one slice of a GPU, and this is not the faster choice"
    if not found.shares:
        return "no part that would make a job faster fits on it"
    slowest = min(share.gpu.bandwidth_gb_s for share in found.shares)
    if device.bandwidth_gb_s < slowest:
        return f"a job is faster without it: {device.bandwidth_gb_s:,.0f} GB/s, estimated, would slow each layer on it"
    return "a job is faster without it"


def _first(count: int) -> str:
    return "the first layer" if count == 1 else f"the first {count} layers"


def _holds(found: Placement, at: int) -> str:
    share = found.shares[at]
    m = share.memory
    held = f"{percent(found.part_shares[at])} of every layer" if found.parts else f"{share.layers} layers"
    state = f", {m.state:,.0f} states" if m.state else ""
    card = f"{share.device} ({share.gpu.name}, {share.gpu.bandwidth_gb_s:,.0f} GB/s estimated)"
    return (
        f"{card} holds {held} in "
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
        why = "off: the model would not fit with it; another request makes a conversation lose the tokens of its slot"
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
    which = "the fastest of the physical cores" if first < cpu.cores else "physical cores"
    equal = f"; they count as equal, since {printable(cpu.groups_problem)}" if cpu.groups_problem else ""
    why = f"{which} that this container may use ({seen}){equal}; its neighbours are measured"
    return Choice(name="threads", value=str(first), reason=why, source="probe")


def unequal_threads(cpu: Cpu, threads: int, other: int, here: str, there: str) -> str:
    """Return the reason for a number of threads on unequal cores.

    `here` is the speed with `threads` threads ("prefill 81.0"), `there` the speed with `other` threads ("64.2").
    """
    cores = cpu.cores
    if threads < cores:
        slow = f"{threads} of {cores} cores: the next has {cpu.capacities[threads]:.0%} of the fastest's speed"
        why = f"{slow}, and the others would wait for it: {here} tok/s, with all {there}"
    else:
        slow = ", ".join(f"{group.cores} with {group.capacity:.0%}" for group in cpu.groups[1:])
        why = (
            f"all {cores} cores, of which {slow} of the fastest's speed take fewer parts of each matrix: {here} tok/s, "
        )
        why += f"with the {other} fastest {there}"
    return f"{why}; its neighbours are measured"


def ubatch(settings: Settings, size: int, words: str) -> Choice:
    if settings.ubatch:
        return Choice(name="ubatch", value=str(size), reason="asked for", source=settings.sources["ubatch"])
    if words:
        return Choice(name="ubatch", value=str(size), reason=words, source="default")
    why = "llama.cpp's default, a good start; its neighbours are measured"
    return Choice(name="ubatch", value=str(size), reason=why, source="default")


def batch_price(context_plan: ContextPlan) -> str:
    """Return words on what the default ubatch would hold and decode; "" if it is taken or makes no difference."""
    usual = context_plan.usual
    if usual is None:
        return ""
    here = (context_plan.context, context_plan.kv_type, _tokens(context_plan.placed))
    there = (usual.context, usual.kv_type, _tokens(usual.placed))
    if here == there:
        return ""
    return f"; {UBATCH} would hold {there[0]:,} at {there[1]} and decode {there[2]} tok/s, this {here[2]}"


def whole_ubatch(size: int) -> Choice:
    why = "this model computes a text in one batch, and takes none that is longer"
    return Choice(name="ubatch", value=str(size), reason=why, source="model")


def fixed(no_flash: str | None = None) -> tuple[Choice, ...]:
    keeps = "it needs no memory for scores of context x ubatch, and a quantized V cache requires it"
    lacks = (
        f"{no_flash}: it would run on the CPU; without it scores of context x ubatch are kept, and V is not quantized"
    )
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
            reason="the plan sets every value; the engine's own fit ignores cgroup limits",
            source="default",
        ),
    )
