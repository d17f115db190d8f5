"""Reasons of a plan: one line for each choice, with the figures that it was computed from. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.engines.thinking import thinking_choice
from appliance.engines.vllm.planning.arguments.launch import EAGER
from appliance.engines.vllm.planning.arguments.variables import variable_choices
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.hosts import shm_needed_of_host_mib
from appliance.engines.vllm.planning.inputs import Facts, free_mib, total_mib
from appliance.engines.vllm.planning.memory.kv import NULL_BLOCKS, kv_heads_of_rank
from appliance.engines.vllm.planning.memory.memory import MIB
from appliance.engines.vllm.planning.memory.parallel import (
    RANKS_MAX,
    are_linked,
    are_uneven,
    shm_needed_mib,
    tensor_sizes,
    why_not_tensor,
)
from appliance.engines.vllm.planning.model.rope import rope_words
from appliance.engines.vllm.planning.model.shape import Shape
from appliance.engines.vllm.planning.observed_memory import is_decided
from appliance.engines.vllm.planning.options import has_shared_memory
from appliance.engines.vllm.planning.speculation import gain_words, offers_of
from appliance.plan import CHAT_TOKENS_OUT, long_prompt
from appliance.plan.parts.choice import Choice

GIB = 2**30


def choices_of(estimate: Estimate, compile_key: str) -> tuple[Choice, ...]:
    facts = estimate.facts
    return (
        *facts.choices,
        *_layout(estimate),
        memory(estimate),
        *_reserve(estimate),
        blocks(estimate),
        context(estimate),
        parallel(estimate),
        tokens(estimate),
        graphs(estimate),
        *_speculation(estimate),
        *_prefix_cache(facts),
        *_text_only(facts),
        *_foreign_code(facts),
        *_no_template(facts),
        *facts.parsers.choices,
        *thinking_choice(facts.settings, facts.given.model),
        *variable_choices(facts.settings, facts.given.image.build_id),
        *_engine_args(facts),
        Choice(
            name="compile_key",
            value=compile_key,
            reason="plans with the same key share what torch.compile kept; another costs a cold compilation",
            source="plan",
        ),
    )


def _no_template(facts: Facts) -> Iterator[Choice]:
    """Yield a refusal if the model has no chat template. vLLM would report it only at the first chat, and it has no
    default template."""
    model, passed = facts.given.model, facts.pins.passed
    is_given = facts.settings.chat_template_file or any(word.startswith("--chat-template") for word in passed)
    if model.has_chat_template or model.is_embedding_model or is_given:
        return
    why = "the model's folder has none: chats are refused (400), and /v1/completions answers; --chat-template-file FILE"
    yield Choice(name="chat_template", value="none", reason=why, source="model", is_refusal=True)


def context(estimate: Estimate) -> Choice:
    facts, kv = estimate.facts, estimate.kv
    settings, found = facts.settings, estimate.context
    if facts.hf_overrides:
        why = rope_words(settings, facts.given.model)
        return Choice(name="context", value=f"{found:,}", reason=why, source=settings.sources["rope_scaling"])
    needed = kv.blocks_for(found)
    room = f"{needed:,} of {estimate.blocks - NULL_BLOCKS:,} blocks of {kv.block_size} tokens"
    if estimate.sure_blocks < estimate.blocks and found < facts.wanted:
        room += f", {estimate.blocks - estimate.sure_blocks:,} left for what vLLM may measure above the estimate"
    if settings.ctx_size:
        return Choice(
            name="context", value=f"{found:,}", reason=f"asked for: {room}", source=settings.sources["ctx_size"]
        )
    if found == facts.wanted:
        return Choice(name="context", value=f"{found:,}", reason=f"the model's native length: {room}", source="model")
    more = f"; each further GiB {'a card' if estimate.option.cards else 'a rank'}: {_of_a_gib(estimate):,} tokens more"
    why = f"what the cache holds of the model's {facts.wanted:,}: {room}{more}"
    return Choice(name="context", value=f"{found:,}", reason=why, source="memory")


def _of_a_gib(estimate: Estimate) -> int:
    """Return the tokens of context that another GiB for the cache of each rank would hold, up to the wanted length."""
    kv, blocks = estimate.kv, estimate.sure_blocks
    more = kv.longest(blocks + GIB // kv.bytes_per_block, estimate.facts.wanted)
    return more - kv.longest(blocks, estimate.facts.wanted)


def _layout(estimate: Estimate) -> Iterator[Choice]:
    facts, layout = estimate.facts, estimate.option.layout
    if layout.nodes > 1:
        yield from _over_hosts(estimate)
        return
    if not facts.cards:
        return
    names = ", ".join(f"{card.index} ({card.name or 'unnamed'})" for card in estimate.option.cards)
    value = f"tensor parallel {layout.tensor}" + (f", {layout.pipeline} stages" if layout.pipeline > 1 else "")
    asked = facts.pins.tensor or facts.pins.pipeline
    why = "asked for" if asked else _why_layout(estimate)
    yield Choice(
        name="placement", value=f"{value} on GPU {names}", reason=why, source=facts.pins.source if asked else "probe"
    )
    if (words := _replicated(facts.shape, layout.tensor)) is not None:
        yield Choice(
            name="kv_heads",
            value=str(kv_heads_of_rank(facts.shape.kv_heads, layout.tensor)),
            reason=words,
            source="model",
        )
    if layout.ranks > 1:
        yield _links(estimate)
        yield _shared_memory(facts, layout.ranks)
        yield from _uneven(estimate)
    elif len(facts.cards) > 1 and not has_shared_memory(facts, 2):
        there, needed = facts.hardware.memory.shm_mib, shm_needed_mib(2)
        why = f"one rank: two need {needed} MiB in /dev/shm, and it has {there}; start with --ipc=host or --shm-size 4g"
        yield Choice(name="shm", value=f"{there} MiB", reason=why, source="probe", is_refusal=True)
    if layout.pipeline > 1:
        yield _stages(estimate)


def _links(estimate: Estimate) -> Choice:
    if are_linked(estimate.option.own_cards):
        return Choice(name="links", value="NVLink", reason="each GPU is linked with another of them", source="probe")
    why = (
        "no NVLink from each to another: what ranks exchange goes over PCIe, from GPU to GPU where the driver lets it "
        "(P2P), else through the host's memory"
    )
    return Choice(name="links", value="PCIe", reason=why, source="probe")


def _stages(estimate: Estimate) -> Choice:
    split = ", ".join(map(str, estimate.option.layout.layers))
    why = f"layers by the memory of each stage's smallest card, {estimate.facts.shape.layers} in all"
    return Choice(name="stages", value=split, reason=why, source="memory")


def _over_hosts(estimate: Estimate) -> Iterator[Choice]:
    facts, layout = estimate.facts, estimate.option.layout
    settings = facts.settings
    why = "each has as many ranks; what they send each other is open and not encrypted: keep it on a network of its own"
    if not facts.given.hosts:
        why = f"those that have not joined yet are taken to be as this one; {why}"
    yield Choice(name="nodes", value=str(layout.nodes), reason=why, source=settings.sources["nodes"])
    if not facts.cards:
        why = "vLLM's CPU build was seen to die of its first request in stages of a pipeline (0.32.0)"
        yield Choice(name="placement", value=f"{layout.pipeline} stages on CPUs", reason=why, source="nodes",
                     is_refusal=True)  # fmt: skip
        return
    pins, name = facts.pins, estimate.option.cards[0].name or "unnamed"
    value = f"tensor parallel {layout.tensor}, {layout.pipeline} stages on {layout.local_ranks} GPUs ({name}) a host"
    asked = pins.tensor or pins.pipeline
    sizes = ", ".join(map(str, tensor_sizes(facts.shape, min(map(len, facts.hosts)))))
    why = "asked for" if asked else f"tensor parallel within a host, where the model allows {sizes}; stages across"
    yield Choice(name="placement", value=value, reason=why, source=pins.source if asked else "probe")
    yield _shared_memory(facts, layout.local_ranks)
    yield from _uneven(estimate)
    yield _stages(estimate)


def _why_layout(estimate: Estimate) -> str:
    facts, layout = estimate.facts, estimate.option.layout
    cards = len(facts.cards)
    if cards == 1:
        return "one GPU"
    allowed = ", ".join(map(str, tensor_sizes(facts.shape, min(cards, RANKS_MAX))))
    why = f"the model allows {allowed} of {cards} cards"
    refused = why_not_tensor(facts.shape, cards)
    if layout.pipeline > 1:
        rooms = estimate.room_mib
        if are_uneven(rooms, layout.tensor):
            refused = f"ranks of one layer reach no more than {min(rooms):,.0f} MiB of each of these cards"
        return f"{why}; stages, since {refused or 'ranks of one layer are not enough'}"
    if layout.tensor < cards and refused:
        return f"{why}: {refused}; best of them by predicted context and speed"
    return f"{why}; best of them by predicted context and speed"


def _replicated(shape: Shape, tensor: int) -> str | None:
    if not shape.value_length and tensor > 1:
        return f"MLA keeps one latent row a token, on each of {tensor} ranks: more cards buy no context"
    if tensor <= shape.kv_heads:
        return None
    return (
        f"the model has {shape.kv_heads} KV heads and {tensor} ranks: each head is kept on "
        f"{tensor // shape.kv_heads} of them, so cards beyond {shape.kv_heads} buy no context"
    )


def _shared_memory(facts: Facts, ranks: int) -> Choice:
    there, needed = facts.shm_mib, shm_needed_of_host_mib(ranks, facts.settings.nodes)
    if there is None:
        why = f"nobody looked; {ranks} ranks need {needed} MiB: --ipc=host or --shm-size 4g where Docker gives 64"
        return Choice(name="shm", value="unknown", reason=why, source="probe")
    why = f"{ranks} ranks need {needed} MiB of queues"
    return Choice(name="shm", value=f"{there:,} MiB", reason=why, source="probe")


def _uneven(estimate: Estimate) -> Iterator[Choice]:
    cards = estimate.option.cards
    if len({(card.name, card.vram_total_mib) for card in cards}) < 2:
        return
    hardware = estimate.facts.hardware
    rooms = ", ".join(f"{card.index}: {free_mib(card, hardware):,.0f} MiB free" for card in cards)
    why = f"every rank goes at the pace and by the memory of the smallest card ({rooms})"
    if estimate.option.layout.pipeline > 1:
        why = f"each stage has layers by its card's memory, and goes at its card's pace ({rooms})"
    yield Choice(name="uneven", value=f"{len(cards)} different cards", reason=why, source="probe", is_refusal=True)


def memory(estimate: Estimate) -> Choice:
    facts, found = estimate.facts, estimate.memory
    kv_mib = estimate.kv_bytes / MIB
    parts = f"{found.weights:,.0f} weights, {found.activation:,.0f} activations at {estimate.option.tokens:,} tokens"
    parts += f", {found.vision:,.0f} for images" if found.vision else ""
    parts += f", {found.graphs:,.0f} CUDA graphs" if facts.cards else ""
    if not facts.cards:
        why = (
            f"{estimate.host_usable_mib:,.0f} MiB usable less {estimate.host_overhead_mib:,.0f} of processes, {parts}; "
            f"at most {estimate.option.seqs} full contexts"
        )
        source = facts.pins.source if facts.pins.kv_bytes else "memory"
        return Choice(name="kv_cache", value=f"{kv_mib:,.0f} MiB", reason=why, source=source)
    card = estimate.largest.cards[0]
    free, total = free_mib(card, facts.hardware), total_mib(card, facts.hardware)
    if estimate.share is None:
        source = facts.pins.source if facts.pins.kv_bytes else "profile"
        why = f"{parts}; what an earlier start was left with" if source == "profile" else f"asked for; {parts}"
        if estimate.seen_mib is not None:
            reserve = estimate.reserves[estimate.option.cards.index(card)].mib
            held = f"{found.context:,.0f} of CUDA, PyTorch and NCCL and {reserve:,.0f} of reserve"
            source, why = "measured", f"{free:,.0f} of {total:,.0f} MiB are free, less {held}; less {parts}; in bytes"
        elif estimate.kv_asked is None and estimate.fills_uneven:
            source, why = "probe", f"{parts}; in bytes, since one share of unlike cards would leave the larger unused"
        return Choice(name="kv_cache", value=f"{kv_mib:,.0f} MiB a rank", reason=why, source=source)
    held = f"{found.context:,.0f} of CUDA, PyTorch and NCCL"
    why = (
        f"{estimate.share:g} of {total:,.0f} MiB: {free:,.0f} are free, less {held} and "
        f"{estimate.reserves[estimate.option.cards.index(card)].mib:,.0f} of reserve; less {parts}"
    )
    source = facts.pins.source if facts.pins.utilization else "probe"
    return Choice(name="kv_cache", value=f"{kv_mib:,.0f} MiB a rank, predicted", reason=why, source=source)


def _reserve(estimate: Estimate) -> Iterator[Choice]:
    """Yield the reserve of each GPU; one line for all if they are alike."""
    settings, seen_mib = estimate.facts.settings, estimate.seen_beyond_mib
    source = settings.sources["reserve_mib"] if settings.is_set("reserve_mib") else "default"
    source = source if estimate.seen_mib is None else "measured"
    unused = ""
    if seen_mib is not None and is_decided(estimate.facts):
        unused = f"; {max(0.0, *seen_mib):,.0f} beyond the estimate were seen in service and are not used"
        unused += ": nothing would fit" if estimate.facts.ignores_peaks else ""
    are_alike = len(set(estimate.reserves)) == 1
    for card, reserve in zip(estimate.option.cards, estimate.reserves, strict=True):
        name = "reserve" if are_alike else f"reserve of GPU {card.index}"
        each = " each" if are_alike and len(estimate.option.cards) > 1 else ""
        yield Choice(
            name=name,
            value=f"{reserve.mib:,.0f} MiB{each}",
            reason=reserve.describe() + unused,
            source=source,
            is_refusal=estimate.facts.ignores_peaks,
        )
        if are_alike:
            return


def blocks(estimate: Estimate) -> Choice:
    kv, facts = estimate.kv, estimate.facts
    groups = {group.kind: 0 for group in kv.groups}
    for group in kv.groups:
        groups[group.kind] += 1
    kinds = " and ".join(f"{count} of {kind}" for kind, count in groups.items())
    why = (
        f"{estimate.blocks:,} blocks of {kv.bytes_per_block:,} bytes a rank: {kv.groups[0].layers} layers of "
        f"{kv.page_bytes:,}"
    )
    if len(kv.groups) > 1:
        why += f", groups of layers: {kinds}"
    if facts.shape.is_hybrid:
        why += "; pages as large as a layer's state"
    if not facts.shape.is_exact:
        why += f"; from above, since {facts.given.model.cache_reason}: the first start tells"
    asked = facts.pins.block_size is not None
    return Choice(
        name="block_size", value=str(kv.block_size), reason=why, source=facts.pins.source if asked else "default"
    )


def parallel(estimate: Estimate) -> Choice:
    settings = estimate.facts.settings
    whom = f" of {settings.users} users" if settings.users > 1 else ""
    full = f"full contexts in the cache: {estimate.concurrency:g}, the rest wait"
    if estimate.option.seqs > settings.slots:
        typical = long_prompt(settings) + CHAT_TOKENS_OUT
        held = f"the cache holds {estimate.requests_of(typical):,} of {typical:,} tokens (workload {settings.workload})"
        why, source = f"requests{whom} in one step: {held}; {full}", "memory"
    else:
        why, source = f"requests{whom} in one step; {full}", settings.slots_source
    return Choice(name="parallel", value=str(estimate.option.seqs), reason=why, source=source)


def tokens(estimate: Estimate) -> Choice:
    settings = estimate.facts.settings
    why = "tokens of one step: a longer prompt is read in chunks between steps of other requests (chunked prefill)"
    if estimate.facts.given.model.is_embedding_model:
        why = "a text is read in one step"
    source = settings.sources.get("ubatch", "default")
    return Choice(name="max_num_batched_tokens", value=str(estimate.option.tokens), reason=why, source=source)


def graphs(estimate: Estimate) -> Choice:
    facts, mode = estimate.facts, estimate.option.graph_mode
    source = facts.pins.source if facts.pins.graph_mode else "default"
    if not facts.cards:
        why = "serves at once; a compiled model takes minutes to start and is measured beside it"
        why = why if mode == EAGER else "compiled without CUDA graphs"
        return Choice(name="graph_mode", value=mode, reason=why, source=source)
    sizes = estimate.graph_sizes
    why = f"{len(sizes)} sizes up to {sizes[-1]} tokens" if sizes else "no graphs are captured"
    return Choice(name="graph_mode", value=mode, reason=why, source=source)


def _speculation(estimate: Estimate) -> Iterator[Choice]:
    """Yield the choice "off" if speculative decoding is possible but not measured. A plan that speculates replaces
    it."""
    facts = estimate.facts
    if offers := offers_of(facts):
        gains = {offer.kind: gain_words(estimate, offer.kind) for offer in offers}
        words = (f"{each.kind} ({'; '.join(filter(None, (each.reason, gains[each.kind])))})" for each in offers)
        why = f"until it is measured: {', '.join(words)}"
        yield Choice(name="speculation", value="off", reason=why, source=facts.settings.sources["speculation"])


def _prefix_cache(facts: Facts) -> Iterator[Choice]:
    if facts.given.model.is_embedding_model:
        return
    asked = facts.pins.has_prefix_cache is not None
    why = "a conversation's beginning is not read again"
    if facts.shape.is_hybrid:
        why += "; states are kept at block boundaries, two more blocks a request and group"
    value = "on" if facts.has_prefix_cache else "off"
    yield Choice(name="prefix_cache", value=value, reason=why, source=facts.pins.source if asked else "default")


def _text_only(facts: Facts) -> Iterator[Choice]:
    if facts.shape.has_vision:
        value = "text" if facts.is_text_only else "text and images"
        why = "its towers are not loaded" if facts.is_text_only else "its towers are loaded; --mmproj off leaves them"
        yield Choice(name="reads", value=value, reason=why, source=facts.settings.sources.get("mmproj", "model"))


def _foreign_code(facts: Facts) -> Iterator[Choice]:
    runs = facts.pins.runs_foreign_code
    if not (runs or facts.given.model.config.get("auto_map")):
        return
    why = (
        "asked for: Python files of the model's folder are executed"
        if runs
        else "the folder names code of its own, which is never run unless asked"
    )
    source = facts.pins.source if runs else "default"
    yield Choice(name="remote_code", value="run" if runs else "not run", reason=why, source=source, is_refusal=True)


def _engine_args(facts: Facts) -> Iterator[Choice]:
    if facts.pins.passed:
        why = "passed to the engine as it is; the figures here know nothing of it"
        yield Choice(name="engine_arg", value=" ".join(facts.pins.passed), reason=why, source=facts.pins.source)
