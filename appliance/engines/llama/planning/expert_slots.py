"""Slots on the GPU for experts that lie in host memory (images/patches/llama-moe-split.patch). Pure.

Says how many fit, and whether they are worth measuring by the model of appliance/moe.
No GPU ever ran such a plan, so it is not predicted: it is measured beside the prediction, or served on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.llama.planning.arguments.launch import ExpertSlots
from appliance.engines.llama.planning.experts.asked import SLOTS_FLAG
from appliance.engines.llama.planning.experts.replays import load_replays
from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.inputs import PlanInputs
from appliance.engines.llama.planning.memory.memory import MIB, layers_of, padded
from appliance.engines.llama.planning.placement.context import ContextPlan
from appliance.engines.llama.planning.placement.placement import Placed, place
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.model import Model
from appliance.moe.cost import Cost, Rates
from appliance.moe.outlook import Outlook, Replay, cached, static_layers
from appliance.plan import Choice, Costs, Device, Placement
from appliance.values import dataclass

NAME = "moe_slots"  # of the setting, the choice and the knob
WORTH = 1.10  # modelled gain over the prediction from which on slots are measured
GPU_EXPERT_MS = 0.005  # start of a kernel: chosen, not measured
# Each rate may be this many times too high or too low: rates are computed, not measured with CPU and PCIe busy at once.
OFF = 1.25
# llama4 weights the input of its experts; the engine refuses it (llama-moe-split.cpp, find_layers).
REFUSED = frozenset({"llama4"})


@dataclass(frozen=True, kw_only=True)
class SlotsOffer:
    """The decision on slots for one prediction."""

    placed: Placed | None = None  # all experts in host memory, with the slots' memory; None: no slots
    slots: ExpertSlots | None = None
    choice: Choice | None = None  # None: the model or the prediction gives no reason to mention slots
    is_served: bool = False  # True if the user asked for this number: it is served before it was measured


_NOTHING = SlotsOffer()


def offer_slots(inputs: PlanInputs, found: ContextPlan) -> SlotsOffer:
    """Return the slots that are measured beside the prediction, or served if `--moe-slots N` asks for them.

    Raises ModelDoesNotFitError if the number that was asked for does not fit, ConfigError if rates cannot be used.
    """
    asked, placement = inputs.settings.moe_slots, found.placed.placement
    is_number, source = isinstance(asked, int), inputs.settings.sources[NAME]
    if asked == "off" and not _with_experts(inputs.model, placement.cpu_expert_layers):
        return _NOTHING
    if why := _why_none(inputs, placement):
        is_told = is_number or placement.cpu_expert_layers > 0
        choice = Choice(name=NAME, value="off", reason=why, source=source, is_refusal=is_number)
        return SlotsOffer(choice=choice) if is_told else _NOTHING
    return _asked(inputs, found, asked) if isinstance(asked, int) else _measured(inputs, found)


def _why_none(inputs: PlanInputs, placement: Placement) -> str | None:
    """Return why this model and machine get no slots, whatever their number; None if they may."""
    model = inputs.model
    reasons: tuple[tuple[bool, str], ...] = (
        (inputs.settings.moe_slots == "off", "asked for: experts in host memory are computed on the CPU"),
        (not model.experts, "this model has no experts"),
        (not placement.shares, "there is no GPU to hold them"),
        (SLOTS_FLAG not in inputs.engine.flags, f"the engine of this image has no {SLOTS_FLAG}"),
        (placement.split_mode == TENSOR, "the engine gives none in split mode tensor"),
        (model.architecture in REFUSED, f"the engine gives none to {model.architecture}"),
        (bool(model.adapters), "the engine does not use them with an adapter (--lora)"),
        (any(share.gpu.is_unified for share in placement.shares), "GPU and host share one memory"),
        (not placement.cpu_expert_layers, "all experts lie on the GPUs"),
    )
    return next((why for is_true, why in reasons if is_true), None)


def _why_not_measured(inputs: PlanInputs, placement: Placement) -> str | None:
    """Return why slots that nobody asked for are not measured; None if they may be."""
    settings = inputs.settings
    fixed = next((name for name in ("n_cpu_moe", "gpu_layers") if settings.is_set(name)), None)
    reasons: tuple[tuple[bool, str], ...] = (
        (fixed is not None, f"{fixed} decides what lies on the GPU ({settings.sources.get(fixed or '', '')})"),
        (len(placement.shares) > 1, "their gain is modelled for one GPU only"),
        (settings.speculation in ("draft", "mtp"), f"they would take the memory of {settings.speculation} drafts"),
        (_replay_of(inputs.model) is None, f"no routing of a {inputs.model.architecture} model was recorded"),
    )
    return next((why for is_true, why in reasons if is_true), None)


def _measured(inputs: PlanInputs, found: ContextPlan) -> SlotsOffer:
    """Return the largest number of slots in the memory that is left with all experts in host memory, if it pays."""
    placement, replay = found.placed.placement, _replay_of(inputs.model)
    if (why := _why_not_measured(inputs, placement)) or replay is None:
        return _no(why or "")
    placed = _all_in_host_memory(inputs, found)
    if placed is None or len(placed.placement.shares) != 1 or placed.placement.cpu_layers:
        return _no("with all experts in host memory the model does not fit there")
    count = min(_most(inputs.model, placed), inputs.model.experts)
    if count < inputs.model.experts_used:
        return _no(f"room for {max(count, 0)} a layer, fewer than the {inputs.model.experts_used} experts of a token")
    device = next(each for each in inputs.resources.devices if each.id == placed.placement.shares[0].gpu.id)
    try:
        rates, how = rates_of(inputs, device)
    except ValueError as error:
        return _no(f"the rates of this machine cannot be used: {error}")
    cost, fixed_ms = Cost(rates, _expert_mb(inputs.model)), inputs.model.output_bytes / (device.bandwidth_gb_s * 1e6)
    of_layers = len(_with_experts(inputs.model, placement.cpu_expert_layers))
    static = static_layers(replay, cost, of_layers, fixed_ms=fixed_ms, off=OFF)
    without = static_layers(replay, cost, replay.layers, fixed_ms=fixed_ms, off=OFF)
    with_slots = cached(replay, cost, count, fixed_ms=fixed_ms, off=OFF)
    if with_slots is None:
        return _no(f"no replay has as few as {count} a layer")
    gain = with_slots.tokens_per_s / static.tokens_per_s
    figures = f"{_in_words(count, with_slots, static, of_layers, replay, inputs.model)}; {how}"
    if gain < WORTH:
        return _no(f"modelled {gain:.2f} times as fast, and {WORTH:g} is asked before it is measured", figures)
    slots = ExpertSlots(
        count=count,
        mib=_mib(inputs.model, placed, count),
        rates=rates,
        speedup=with_slots.tokens_per_s / without.tokens_per_s,
    )
    why = f"{count} a layer are measured beside it: modelled {gain:.2f} times as fast; no GPU has run them yet"
    choice = Choice(name=NAME, value="off", reason=why, source=_SOURCE, detail=figures)
    return SlotsOffer(placed=grown(placed, slots), slots=slots, choice=choice)


_SOURCE = "memory and bandwidths"


def _no(why: str, figures: str = "") -> SlotsOffer:
    return SlotsOffer(choice=Choice(name=NAME, value="off", reason=why, source=_SOURCE, detail=figures))


def _asked(inputs: PlanInputs, found: ContextPlan, count: int) -> SlotsOffer:
    """Return the number of slots that was asked for. Raises ModelDoesNotFitError if it does not fit."""
    model, source = inputs.model, inputs.settings.sources[NAME]
    placed = _all_in_host_memory(inputs, found)
    where = f"{count} ({source}) with a context of {found.context:,} tokens"
    if placed is None:
        message = f"setting {NAME} needs the experts in host memory, and they do not fit there: {where}"
        raise ModelDoesNotFitError(message, hint="use --moe-slots off, a smaller quantization or a smaller --ctx-size")
    most = _most(model, placed)
    if most < min(count, model.experts):  # check_experts has refused fewer than a token's
        message = f"setting {NAME} does not fit: {where}, and there is room for {max(most, 0)} a layer"
        raise ModelDoesNotFitError(message, hint="use --moe-slots off, fewer slots or a smaller --ctx-size")
    first = placed.placement.shares[0].gpu.id
    try:
        rates, how = rates_of(inputs, next(each for each in inputs.resources.devices if each.id == first))
    except ValueError as error:
        message = f"setting {NAME} needs rates of this machine: {where}: {error}"
        raise ConfigError(
            message, hint="measure again with `appliance probe --measure`, or use --moe-slots off"
        ) from error
    slots = ExpertSlots(
        count=count,
        mib=_mib(model, placed, count),
        rates=rates,
        speedup=1.0,
    )
    why = "asked for, and served although nothing was measured; speeds here are those without slots"
    choice = Choice(name=NAME, value=str(count), reason=why, source=source, detail=how)
    return SlotsOffer(placed=grown(placed, slots), slots=slots, choice=choice, is_served=True)


def grown(placed: Placed, slots: ExpertSlots) -> Placed | None:
    """Return the placement with the slots' memory on its GPUs; None if it does not fit."""
    shares = tuple(
        replace(share, memory=replace(share.memory, weights=share.memory.weights + mib))
        for share, mib in zip(placed.placement.shares, slots.mib, strict=True)
    )
    if any(share.memory.total > share.gpu.free_mib for share in shares):
        return None
    return replace(placed, placement=replace(placed.placement, shares=shares))


def with_slots(costs: Costs, slots: ExpertSlots | None) -> Costs:
    """Return the costs of a placement with slots: the modelled gain shortens the time of the CPU in decode."""
    if slots is None:
        return costs
    left = (costs.gpu_ms + costs.cpu_ms + costs.fixed_ms) / slots.speedup - costs.gpu_ms - costs.fixed_ms
    return replace(costs, cpu_ms=min(costs.cpu_ms, max(0.0, left)))


def _all_in_host_memory(inputs: PlanInputs, found: ContextPlan) -> Placed | None:
    """Return the placement with the experts of all layers, or of those of --n-cpu-moe, in host memory."""
    layers = inputs.settings.n_cpu_moe
    job = replace(
        inputs.job,
        context=padded(found.context),
        kv_type=found.kv_type,
        ubatch=min(found.ubatch, padded(found.context)),
        cpu_expert_layers=len(layers_of(inputs.model)) if layers is None else layers,
    )
    placed = place(job, inputs.resources)
    return placed if placed and placed.placement.shares else None


def _with_experts(model: Model, first: int) -> list[int]:
    """Return the positions of those of the first layers that have experts and are loaded."""
    layers = layers_of(model)[:first]
    return [at for at, layer in enumerate(layers) if layer.expert_bytes and not layer.is_draft]


def _slot_mib(model: Model, placed: Placed) -> Iterator[float]:
    """Yield for each GPU the MiB of one slot in each of its layers with experts in host memory."""
    placement, layers = placed.placement, layers_of(model)
    begin = placement.cpu_layers
    for share in placement.shares:
        at = [at for at in _with_experts(model, placement.cpu_expert_layers) if begin <= at < begin + share.layers]
        yield sum(layers[each].expert_bytes for each in at) / model.experts / MIB
        begin += share.layers


def _mib(model: Model, placed: Placed, count: int) -> tuple[float, ...]:
    """Return the MiB of the slots on each GPU. The engine adds one slot a layer, which stays zero."""
    return tuple(one * (min(count, model.experts) + 1) for one in _slot_mib(model, placed))


def _most(model: Model, placed: Placed) -> int:
    """Return the largest number of slots a layer that fits; below 0 if not even the added slot does."""
    rooms = zip(placed.placement.shares, _slot_mib(model, placed), strict=True)
    counts = (int((share.gpu.free_mib - share.memory.total) / one) - 1 for share, one in rooms if one)
    return min(counts, default=-1)


def _expert_mb(model: Model) -> float:
    with_experts = [layers_of(model)[at] for at in _with_experts(model, len(layers_of(model)))]
    return sum(layer.expert_bytes for layer in with_experts) / len(with_experts) / model.experts / 1e6


def _replay_of(model: Model) -> Replay | None:
    """Return the replay of a model of this architecture, stretched to this one's layers; None if there is none."""
    same = (r for r in load_replays() if (r.architecture, r.experts) == (model.architecture, model.experts))
    found = next(same, None)
    return found and replace(found, layers=len(_with_experts(model, len(layers_of(model)))))


def rates_of(inputs: PlanInputs, device: Device) -> tuple[Rates, str]:
    """Return the rates that the model and the engine decide by, and how they are known, in words.

    PCIe and DRAM as measured while both worked at once, else from their bandwidths. CPU kernels reach `DRAM_SHARE` of
    DRAM. Raises ValueError for a rate that is not positive and finite.
    """
    model, dram_gb_s = inputs.model, inputs.resources.dram_gb_s
    dense = sum(layer.dense_bytes for layer in layers_of(model)) / len(layers_of(model)) / 1e6
    rates = Rates(
        cpu_gb_s=dram_gb_s,
        pcie_gb_s=device.pinned_gb_s,
        dram_gb_s=dram_gb_s / assumptions.DRAM_SHARE.value,
        other_ms=dense / device.bandwidth_gb_s + device.layer_us / 1000,
        cpu_fixed_ms=assumptions.EXPERTS_HOP_US.value / 1000,
        gpu_expert_ms=_expert_mb(model) / device.bandwidth_gb_s + GPU_EXPERT_MS,
    )
    speeds = inputs.hardware.speeds.gpus if inputs.hardware.speeds else ()
    measured = next((each for each in speeds if each.uuid == device.id), None)
    pcie, cpu = (measured.overlapped_pinned_gb_s, measured.overlapped_dram_gb_s) if measured else (None, None)
    if pcie is None or cpu is None:
        return rates, "rates of CPU and PCIe are those of each alone"
    try:
        return replace(rates, pcie_gb_s=pcie, dram_gb_s=pcie + cpu), "rates measured with CPU and PCIe at work at once"
    except ValueError as error:
        return rates, f"the measured rates are ignored: {error}"


def _in_words(count: int, found: Outlook, static: Outlook, of_layers: int, replay: Replay, model: Model) -> str:
    return (
        f"modelled: {count} slots a layer in the same memory, {found.hit_rate:.0%} hits, {found.copied_mb:.1f} MB "
        f"copied for a layer and token: {_speed(found)}; --n-cpu-moe {of_layers} by the same formula {_speed(static)}; "
        f"replayed from one prompt of {replay.name}, {replay.tokens} tokens, {replay.top_k} of the model's "
        f"{model.experts_used} experts a token in both: short and optimistic"
    )


def _speed(found: Outlook) -> str:
    return f"{found.tokens_per_s:.0f} tok/s ({found.low:.0f} to {found.high:.0f} with rates {OFF:g} times off)"
