"""Speculative decoding: the kinds that a model and an engine support, and the memory of each. Pure.

Only measuring tells which kind is faster and how many tokens to draft: tune/speculate.py.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from appliance.engines.draft_tokens import check_draft_tokens
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import (
    MIB,
    Copies,
    can_keep,
    compute_mib,
    copies,
    drafts_mib,
    kv_mib,
    layer_kv_bytes,
    layers_of,
    mask_bytes,
    output_mib,
    state_mib,
    weights_mib,
)
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.plan import (
    KINDS,
    NOTHING,
    SPECULATION_GOALS,
    UNMEASURED,
    Kind,
    Memory,
    Offer,
    Speculation,
    StepCost,
    expected_gain,
    with_choice,
    with_launch,
)
from appliance.plan.parts.choice import Choice
from appliance.settings import Settings

if TYPE_CHECKING:
    from appliance.plan import Plan

CACHE_LEFT_MIB = 128.0  # the prompt cache shrinks down to this to make room, unless the user set its size
NGRAM_TABLE_MIB = 16.0  # common_ngram_mod of 4 Mi entries
# Time of a step that drafts with the model's own layers: llama.cpp#22673, experts in host memory: 0.53 reproduces four
# speeds within 2.2 %. Weights on a GPU are read once for all tokens of a step: 0.1, chosen.
_DEAR, _COST, _CHEAP = StepCost(a=0.0, b=0.53), StepCost(a=0.0, b=0.3), StepCost(a=0.0, b=0.1)
_FLAGS: dict[Kind, tuple[str, ...]] = {
    "draft": ("--spec-type", "--model-draft", "--spec-draft-n-max"),
    "mtp": ("--spec-type", "--spec-draft-n-max"),
    "ngram": ("--spec-type", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-min"),
}


def kinds(settings: Settings, model: Model, engine: EngineFacts, draft: Model | None = None) -> tuple[Offer, ...]:
    """Return every kind of speculative decoding, the most promising first. Raises as `check_speculation` does."""
    check_speculation(settings, engine, model)
    return tuple(_offer(kind, settings, model, engine, draft) for kind in KINDS)


def _offer(kind: Kind, settings: Settings, model: Model, engine: EngineFacts, draft: Model | None) -> Offer:
    if settings.speculation not in (*SPECULATION_GOALS, kind):
        other = f"speculation is {settings.speculation} ({settings.sources['speculation']})"
        return Offer(kind=kind, is_tried=False, reason=other)
    lacking = _lacking(kind, engine, model)
    if lacking is None and kind == "draft" and draft is None:
        lacking = "no draft model is given"
    if lacking is not None:
        return Offer(kind=kind, is_tried=False, reason=lacking)
    gain = expected_gain(settings.draft_tokens or UNMEASURED["mtp"], cost=_COST, cheap=_CHEAP, dear=_DEAR)
    found = Offer(
        kind=kind, is_tried=True, reason="", tokens=settings.draft_tokens, gain=gain if kind == "mtp" else None
    )
    if settings.speculation == kind:
        return replace(found, reason=f"asked for ({settings.sources['speculation']})")
    words = {
        "draft": "a draft model is given",
        "mtp": "the model has layers for it",
        "ngram": "it costs no memory to speak of, and no time where nothing repeats",
    }
    return replace(found, reason=words[kind])


def check_speculation(settings: Settings, engine: EngineFacts, model: Model) -> None:
    """Raise ConfigError if the kind that was asked for is impossible here, with the reason."""
    check_draft_tokens(settings)
    asked = settings.speculation
    if settings.draft_model is not None and asked in ("mtp", "ngram"):
        message = (
            f"setting draft_model is given and speculation does not use it: '{settings.draft_model}' "
            f"({settings.sources['draft_model']}), speculation '{asked}' ({settings.sources['speculation']})"
        )
        raise ConfigError(message, hint="take one of them out, or use --speculation draft")
    kind = next((kind for kind in KINDS if kind == asked), None)
    if kind is None:
        return
    lacking = _lacking(kind, engine, model)
    hint = "use --speculation auto, which measures the possible kinds"
    if lacking is None and kind == "draft" and settings.draft_model is None:
        lacking, hint = "no draft model is given", "name a small model of the same family with --draft-model"
    if lacking is not None:
        message = f"setting speculation is not possible: '{asked}' ({settings.sources['speculation']}): {lacking}"
        raise ConfigError(message, hint=hint)


def _lacking(kind: Kind, engine: EngineFacts, model: Model) -> str | None:
    """Return why model or engine do not support this kind; None if they do. Settings do not matter here."""
    if model.is_embedding_model:
        return f"{model.title} gives {model.gives} and no text"
    if missing := [flag for flag in _FLAGS[kind] if flag not in engine.flags]:
        return f"this engine (build {engine.build}) has no flag {missing[0]}"
    if kind == "mtp" and not any(layer.is_draft for layer in layers_of(model)):
        return f"{model.title} has no layers that draft (no key {model.architecture}.nextn_predict_layers)"
    return None


def estimate(
    plan: Plan, kind: Kind, tokens: int, *, model: Model, draft: Model | None = None, isa: tuple[str, ...] = ()
) -> Speculation:
    """Return what this kind of speculative decoding adds to the plan.

    `isa` are the instructions that the serving kernels are compiled for: they decide which weights the CPU copies.
    """
    on_gpus = bool(plan.placement.shares)
    keeper, path = model, None
    adds = replace(NOTHING, overhead=NGRAM_TABLE_MIB)
    if kind == "draft":
        if draft is None:
            message = "speculation of kind draft needs a draft model"
            raise ValueError(message)
        keeper, path = draft, str(draft.path)
        adds = _draft_adds(plan, draft, isa, on_gpus=on_gpus)
    elif kind == "mtp":
        adds = _mtp_adds(plan, model, tokens, isa, on_gpus=on_gpus)
    adds = _with_checks(plan, adds, model, tokens)
    return Speculation(
        kind=kind,
        tokens=tokens,
        draft_path=path,
        draft_kv_type=draft_kv_type(plan, keeper),
        device=_device(plan, kind, adds),
        adds=adds,
    )


def applied(plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
    """Return the plan with `speculation`, which was computed for a plan of the same context.

    The prompt cache shrinks to make room, unless the user set its size. Raises ModelDoesNotFitError if that is not
    enough.
    """
    adds = speculation.adds
    if speculation.device is not None:
        at, on_host = speculation.device, replace(NOTHING, output=adds.output, overhead=adds.overhead)
        share = plan.placement.shares[at]
        grown = replace(share, memory=_sum(share.memory, replace(adds, output=0.0, overhead=0.0)))
        if grown.memory.total > share.gpu.free_mib:
            raise _refusal(speculation, grown.memory.total - share.gpu.free_mib, f"{share.device} ({share.gpu.name})")
        shares = (*plan.placement.shares[:at], grown, *plan.placement.shares[at + 1 :])
        plan = replace(plan, placement=replace(plan.placement, shares=shares))
        adds = on_host
    memory = _sum(plan.memory, adds)
    over = memory.total - max(plan.usable_mib, plan.memory.total)
    if over > 0:
        gives = 0.0 if _is_cache_asked(plan) else float(int(max(0.0, memory.cache - CACHE_LEFT_MIB)))
        if over > gives:
            raise _refusal(speculation, over - gives, "the host")
        memory = replace(memory, cache=float(int(memory.cache - over)))
    plan = with_launch(replace(plan, speculation=speculation, memory=memory), cache_ram_mib=int(memory.cache))
    return with_choice(plan, choice)


def as_asked(
    plan: Plan,
    settings: Settings,
    *,
    model: Model,
    draft: Model | None = None,
    isa: tuple[str, ...] = (),
) -> Plan:
    """Return the predicted plan with the kind that was asked for, which is served even if it was not measured.

    The plan is returned as it is if no kind was named. Raises ModelDoesNotFitError if there is no room.
    """
    kind = next((kind for kind in KINDS if kind == settings.speculation), None)
    if kind is None:
        return plan
    tokens = settings.draft_tokens or UNMEASURED[kind]
    found = estimate(plan, kind, tokens, model=model, draft=draft, isa=isa)
    why = "asked for; what it gains was not measured"
    source = settings.sources["speculation"]
    return applied(plan, found, Choice(name="speculation", value=found.describe(), reason=why, source=source))


def still_applied(plan: Plan, measured: Plan, *, draft_path: str | None = None) -> Plan:
    """Return the plan with the speculation of a measured plan; with a refusal if that has no room or another context.

    `draft_path` is today's path of the draft model, which may have moved since.
    """
    speculation = measured.speculation
    if speculation is None:
        return plan
    if speculation.draft_path is not None and draft_path is not None:
        speculation = replace(speculation, draft_path=draft_path)
    words = [choice for choice in measured.choices if choice.name == "speculation"]
    if _place_of(plan) != _place_of(measured):
        return with_choice(plan, _refused(f"{speculation.describe()} was measured for another context or placement"))
    try:
        return applied(plan, speculation, words[0] if words else None)
    except ModelDoesNotFitError as error:
        return with_choice(plan, _refused(error.message))


def _place_of(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that the memory of speculation depends on."""
    where = (plan.placement.summary(), launch_of(plan).load_mode) if plan.placement.shares else ()
    return (plan.context, plan.kv_type, plan.parallel, *where)


def _refused(why: str) -> Choice:
    return Choice(name="speculation", value="off", reason=why, source="memory", is_refusal=True)


def _refusal(speculation: Speculation, over_mib: float, where: str) -> ModelDoesNotFitError:
    message = (
        f"speculation does not fit: {speculation.describe()} needs {speculation.adds.total:,.0f} MiB beside the model, "
        f"{over_mib:,.0f} more than there are on {where}"
    )
    return ModelDoesNotFitError(message, hint="use a smaller --ctx-size, a smaller draft model, or --speculation off")


def _is_cache_asked(plan: Plan) -> bool:
    return any(choice.name == "cache_ram_mib" and choice.source != "memory" for choice in plan.choices)


def draft_kv_type(plan: Plan, keeper: Model) -> str:
    """Return the KV cache type of the drafting model: the plan's, or f16 if its heads do not suit that type."""
    return plan.kv_type if can_keep(keeper, plan.kv_type) else "f16"


def _draft_adds(plan: Plan, draft: Model, isa: tuple[str, ...], *, on_gpus: bool) -> Memory:
    """Return the memory of a draft model: its context is as long as the plan's, and it lies in one place."""
    copied, launch = Copies() if on_gpus else copies(draft, isa), launch_of(plan)
    return replace(
        NOTHING,
        weights=weights_mib(draft) + copied.more,
        kv=kv_mib(draft, draft_kv_type(plan, draft), plan.context, launch.ubatch, plan.parallel),
        compute=compute_mib(draft, launch.ubatch, plan.context, plan.parallel, has_flash=launch.flash_attention),
        output=output_mib(draft, plan.parallel),
        state=state_mib(draft, plan.parallel),
        repacked=copied.made,
        mapped_twice=copied.originals + drafts_mib(draft) if "mmap" in launch.load_mode and not on_gpus else 0.0,
    )


def _mtp_adds(plan: Plan, model: Model, tokens: int, isa: tuple[str, ...], *, on_gpus: bool) -> Memory:
    """Return the memory of MTP: the model's draft layers with a KV cache and a compute buffer of their own.

    Recurrent states are kept for every token that may be rolled back. The compute buffer holds one layer's states for
    each of them.
    """
    kept = [layer for layer in layers_of(model) if layer.is_draft]
    ubatch, has_flash = launch_of(plan).ubatch, launch_of(plan).flash_attention
    kv_type = draft_kv_type(plan, model)
    held = sum(layer_kv_bytes(layer, kv_type, plan.context, ubatch, plan.parallel) for layer in kept)
    one_state = max((layer.state_bytes for layer in layers_of(model)), default=0) * plan.parallel / MIB
    loaded = drafts_mib(model)
    all_copied = Copies() if on_gpus else copies(model, isa)
    copied = replace(all_copied, made=all_copied.made - all_copied.tied, tied=0.0)
    copied = copied.of_share(loaded / max(1.0, weights_mib(model)))
    return replace(
        NOTHING,
        weights=loaded + copied.more,
        kv=held / MIB,
        compute=compute_mib(model, ubatch, plan.context, plan.parallel, has_flash=has_flash) + tokens * one_state,
        output=output_mib(model, plan.parallel),
        state=state_mib(model, plan.parallel) * tokens,
        repacked=copied.made,
        # The whole file is mapped, so the plan's `mapped_twice` already counts these layers.
        mapped_twice=copied.originals - loaded if "mmap" in launch_of(plan).load_mode and not on_gpus else 0.0,
    )


def _with_checks(plan: Plan, adds: Memory, model: Model, tokens: int) -> Memory:
    """Return `adds` with the memory for checking draft tokens: each has logits of its own.

    They take memory in the graph, and in an output buffer that grows at the first check. The engine's log counts only
    the graph.
    """
    launch = launch_of(plan)
    outputs = min(launch.batch, plan.parallel * (1 + tokens))
    at_once = min(outputs, launch.ubatch)
    # Seen: 14.2 MiB for 68 outputs and 51.3 for 256, of a vocabulary of 49,152 and a width of 576.
    graph = 4 * at_once * (model.vocabulary + 5 * model.embedding_length)
    of_batch, has_flash = (launch.ubatch, plan.context, plan.parallel), launch.flash_attention
    graph += int(mask_bytes(model, *of_batch, has_flash=has_flash))
    before = compute_mib(model, *of_batch, has_flash=has_flash)
    logits = 4 * model.vocabulary * outputs / MIB - output_mib(model, plan.parallel)
    return replace(
        adds,
        compute=adds.compute + max(0.0, graph / MIB - before),
        overhead=adds.overhead + max(0.0, logits),
    )


def _device(plan: Plan, kind: Kind, adds: Memory) -> int | None:
    """Return the GPU that holds the additions, as an index of the plan's shares; None on the CPU.

    A draft model goes to the first GPU with room. Draft layers and checks go to the last GPU, with the last layers and
    the output.
    """
    shares = plan.placement.shares
    if not shares:
        return None
    need = adds.total - adds.output - adds.overhead
    roomy = [at for at, share in enumerate(shares) if share.memory.total + need <= share.gpu.free_mib]
    return roomy[0] if kind == "draft" and roomy else len(shares) - 1


def _sum(one: Memory, other: Memory) -> Memory:
    return Memory(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(Memory)})
