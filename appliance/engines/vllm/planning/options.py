"""Configurations that may be served: layouts over GPUs, tokens of a step, CUDA graphs, KV cache types. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.vllm.planning.arguments.launch import EAGER
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.host_layouts import placed_over_hosts
from appliance.engines.vllm.planning.hosts import shm_needed_of_host_mib
from appliance.engines.vllm.planning.inputs import Facts, total_mib
from appliance.engines.vllm.planning.memory.memory import MIB, Batch, Layout, activation_mib, ends_mib
from appliance.engines.vllm.planning.memory.parallel import (
    choose_cards,
    layouts,
    shm_of_workers_mib,
    tensor_sizes,
    why_not_tensor,
)
from appliance.engines.vllm.planning.speed import costs_of, speed_of
from appliance.engines.vllm.planning.stages import Option, room_on
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.plan import CHAT_TOKENS_OUT, CONTEXT_STEP, SMALLEST_CONTEXT, SPEED_KEPT, long_prompt
from appliance.probe import Gpu

# vLLM's own defaults for tokens of a step, by a GPU's total memory (engine/arg_utils.py `get_batch_defaults`).
_LARGE_GIB, _LARGE_TOKENS, _TOKENS = 70, 8192, 2048
_TOKENS_AROUND = (1024, 2048, 4096, 8192)
SEQS = (8, 16, 32, 64, 128, 256)  # powers of two: what is compiled depends on it. The engine's own default is the last
CONTEXT_KEPT = 0.98  # of the context, with more requests in one step
_GRAPHS_AROUND = ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY")
_SMALL_COMPUTE = ("a100", "gb10")


def choose(facts: Facts) -> Estimate:
    """Return the best estimate. Raises ModelDoesNotFitError (31), ConfigError (10) for an impossible layout."""
    found = [Estimate(facts=facts, option=option) for option in base_options(facts)]
    fitting = [each for each in found if each.fits]
    if not fitting:
        raise _refusal_of_bytes(facts) or _refusal(facts, found)
    best = _best(facts, fitting)
    seqs = _sequences(best) if facts.seqs is None else best.option.seqs
    return best if seqs == best.option.seqs else choose(replace(facts, seqs=seqs))


def _sequences(best: Estimate) -> int:
    """Return the number of requests in one step: as many as the cache holds at the workload's prompt length.

    Fewer if their CUDA graphs would leave less of the context than CONTEXT_KEPT. Memory seen in service is ignored: it
    belongs to one number of requests, and the number would change at every start.
    """
    facts, option = replace(best.facts, ignores_peaks=True), best.option
    if facts.settings.is_set("parallel") or not option.cards or facts.given.model.is_embedding_model:
        return option.seqs
    usual, found = Estimate(facts=facts, option=option), option.seqs
    for seqs in (size for size in SEQS if size > option.seqs):
        tokens = max(option.tokens, seqs * (1 + option.drafted))
        more = Estimate(facts=facts, option=replace(option, seqs=seqs, tokens=tokens))
        is_held = more.fits and more.requests_of(long_prompt(facts.settings) + CHAT_TOKENS_OUT) >= seqs
        if not is_held or more.context < CONTEXT_KEPT * usual.context:
            break
        found = seqs
    return found


def _best(facts: Facts, fitting: list[Estimate]) -> Estimate:
    """Return the best estimate for the mode: of those that are fast enough the one with the longest context; of equals
    the fastest, then the one with fewest GPUs."""
    jobs = {id(each): speed_of(costs_of(each)).job_s for each in fitting}
    least = min(facts.wanted, SMALLEST_CONTEXT)
    usable = [each for each in fitting if each.context >= least] or fitting
    fastest = min(jobs[id(each)] for each in usable)
    kept = {"speed": 1.0, "balanced": SPEED_KEPT, "context": 0.0}[facts.settings.mode]
    near = [each for each in usable if kept == 0 or jobs[id(each)] <= fastest / kept]
    longest = max(each.context for each in near)
    return min(
        (each for each in near if each.context == longest), key=lambda each: (jobs[id(each)], each.option.layout.ranks)
    )


def base_options(facts: Facts) -> list[Option]:
    """Return one option for each layout, with the predicted value of everything else."""
    return [_option(facts, layout, cards) for layout, cards in _placed(facts)]


def around(facts: Facts, best: Estimate) -> Iterator[Option]:
    """Yield the options worth measuring: each layout with neighbouring tokens of a step, graph modes and KV cache
    types, and other block sizes of the best.

    The number of sequences is not varied, since it does not change the speed for one client. For several users it is
    measured separately with concurrent requests (tune/figures/slots.py).
    """
    for base in (best.option, *(each for each in base_options(facts) if each.layout != best.option.layout)):
        for tokens in _tokens_around(facts, base):
            for mode in _modes_around(facts, base):
                for kv_type in facts.kv_types:
                    yield replace(base, tokens=tokens, graph_mode=mode, kv_type=kv_type)
    for block_size in _blocks_around(facts):
        yield replace(best.option, block_size=block_size)


def _blocks_around(facts: Facts) -> tuple[int, ...]:
    """Return half and twice the engine's block size, if they are multiples of 16 and at most 128.

    Only for plain attention, whose backends take all multiples of 16. Latent attention (MLA) has the sizes of its
    kernels, and linear attention raises the size.
    """
    own, attends = facts.chip.block_size, set(facts.shape.kinds) <= {"full", "sliding"}
    if facts.pins.block_size or not attends:
        return ()
    return tuple(size for size in (own // 2, 2 * own) if size % 16 == 0 and size <= 128)


def _tokens_around(facts: Facts, base: Option) -> tuple[int, ...]:
    if facts.settings.ubatch or facts.given.model.is_embedding_model:
        return (base.tokens,)
    near = [tokens for tokens in _TOKENS_AROUND if base.tokens // 2 <= tokens <= 2 * base.tokens]
    return tuple(dict.fromkeys((base.tokens, *near)))


def _modes_around(facts: Facts, base: Option) -> tuple[str, ...]:
    if facts.pins.graph_mode:
        return (base.graph_mode,)
    if not base.cards:
        return (base.graph_mode, "NONE")  # NONE is compiled, which takes three minutes at a first start
    return tuple(dict.fromkeys((base.graph_mode, *_GRAPHS_AROUND)))


def _option(facts: Facts, layout: Layout, cards: tuple[Gpu, ...]) -> Option:
    seqs, drafting = facts.seqs or facts.settings.slots, facts.drafting
    drafted = drafting.tokens if drafting else 0
    return Option(
        layout=layout,
        cards=cards,
        kv_type=facts.kv_type,
        tokens=max(usual_tokens(facts, cards), seqs * (1 + drafted)),
        seqs=seqs,
        graph_mode=facts.pins.graph_mode or (_GRAPHS_AROUND[0] if cards else EAGER),
        block_size=facts.pins.block_size,
        drafted=drafted,
        has_draft_layers=drafting is not None and drafting.kind == "mtp",
    )


def usual_tokens(facts: Facts, cards: tuple[Gpu, ...]) -> int:
    """Return the tokens of one step. An embedding model reads each text in one step."""
    if facts.settings.ubatch:
        return facts.settings.ubatch
    if facts.given.model.is_embedding_model:
        return max(_TOKENS, facts.wanted)
    if cards and all(_is_large(card, facts) for card in cards):
        return _LARGE_TOKENS
    return _TOKENS


def _is_large(card: Gpu, facts: Facts) -> bool:
    name = (card.name or "").lower()
    return total_mib(card, facts.hardware) >= _LARGE_GIB * 1024 and not any(word in name for word in _SMALL_COMPUTE)


def _placed(facts: Facts) -> list[tuple[Layout, tuple[Gpu, ...]]]:
    """Return candidate layouts with their GPUs. Raises ConfigError (10) for an impossible number of ranks."""
    pins, shape = facts.pins, facts.shape
    _check_asked(facts)
    if facts.settings.nodes > 1:
        return _with_shared_memory(facts, placed_over_hosts(facts))
    if not facts.cards:
        return [(_on_cpu(facts, Layout(tensor=pins.tensor or 1)), ())]
    rooms = _rooms(facts)
    by_room = sorted(facts.cards, key=lambda card: -rooms[card])
    ends = ends_mib(shape, facts.dtype)
    sorted_rooms = [rooms[card] for card in by_room]
    found = list(layouts(shape, sorted_rooms, ends, tensor=pins.tensor, pipeline=pins.pipeline))
    return _with_shared_memory(facts, [(layout, _cards_of(layout, by_room)) for layout in found])


def _rooms(facts: Facts) -> dict[Gpu, float]:
    """Return the MiB on each GPU for layers and their cache."""
    batch = Batch(tokens=usual_tokens(facts, facts.cards), seqs=facts.settings.slots)
    passing = activation_mib(facts.shape, facts.dtype, batch)
    return {card: room_on(facts, card, len(facts.cards)) - passing for card in facts.cards}


def _with_shared_memory(
    facts: Facts, placed: list[tuple[Layout, tuple[Gpu, ...]]]
) -> list[tuple[Layout, tuple[Gpu, ...]]]:
    """Return the layouts whose ranks fit into /dev/shm. Raises ConfigError (10) if none does."""
    found = [(layout, cards) for layout, cards in placed if has_shared_memory(facts, layout.local_ranks)]
    if placed and not found:
        _refuse_shared_memory(facts, min(layout.local_ranks for layout, _ in placed))
    return found


def _on_cpu(facts: Facts, layout: Layout) -> Layout:
    """Return the layout for the CPU. Raises ConfigError (10) if /dev/shm is too small for vLLM's processes; vLLM itself
    takes 20 s to find that out."""
    there, needed = facts.hardware.memory.shm_mib, shm_of_workers_mib(layout.ranks)
    if there is None or there >= needed:
        return layout
    message = f"shared memory is too small for vLLM's processes: {there} MiB in /dev/shm, {needed} are needed"
    raise ConfigError(message, hint="start the container with --shm-size 1g or --ipc=host")


def _cards_of(layout: Layout, by_room: list[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs of a layout. Pipeline stages keep the order of `by_room`, for which their layers were
    computed."""
    return tuple(by_room[: layout.ranks]) if layout.pipeline > 1 else choose_cards(by_room, layout.ranks)


def has_shared_memory(facts: Facts, ranks: int) -> bool:
    """True if /dev/shm suffices for so many ranks on one host, or if its size is unknown."""
    return facts.shm_mib is None or facts.shm_mib >= shm_needed_of_host_mib(ranks, facts.settings.nodes)


def _check_asked(facts: Facts) -> None:
    pins, cards = facts.pins, len(facts.all_cards)
    ranks = (pins.tensor or 1) * (pins.pipeline or 1)
    if pins.tensor and (why := why_not_tensor(facts.shape, pins.tensor)):
        there = ", ".join(map(str, tensor_sizes(facts.shape, 16)))
        message = f"setting engine_arg asks for tensor parallel {pins.tensor} ({pins.source}): {why}"
        raise ConfigError(message, hint=f"this model allows {there}")
    if pins.pipeline and pins.pipeline > facts.shape.layers:
        message = f"setting engine_arg asks for {pins.pipeline} stages of {facts.shape.layers} layers ({pins.source})"
        raise ConfigError(message, hint="use fewer stages")
    if not facts.cards and (of_gpus := _of_gpus(facts)):
        message = f"setting engine_arg asks for what needs a GPU ({pins.source}): {', '.join(of_gpus)}"
        raise ConfigError(message, hint="leave it out: the plan is for the CPU")
    if facts.cards and ranks > cards:
        message = f"setting engine_arg asks for {ranks} ranks ({pins.source}), and {cards} GPUs can be used"
        raise ConfigError(message, hint="use fewer ranks, or give the container more GPUs")


def _of_gpus(facts: Facts) -> list[str]:
    """Return the engine arguments of the user that need a GPU. vLLM's CPU build accepts them silently and then ignores
    them or fails."""
    pins = facts.pins
    asked = {
        "--pipeline-parallel-size": (pins.pipeline or 1) > 1,
        "--gpu-memory-utilization": pins.utilization is not None,
        "--attention-backend": pins.attention_backend is not None,
        "--compilation-config with graphs": pins.graph_mode not in (None, EAGER, "NONE") or bool(pins.graph_sizes),
    }
    return [flag for flag, is_explicit in asked.items() if is_explicit]


def _refuse_shared_memory(facts: Facts, ranks: int) -> None:
    needed = shm_needed_of_host_mib(ranks, facts.settings.nodes)
    where = " of each host" if facts.settings.nodes > 1 else ""
    message = (
        f"shared memory is too small for {ranks} ranks{where}: {facts.shm_mib} MiB in /dev/shm, {needed} are needed"
    )
    raise ConfigError(message, hint="start the container with --ipc=host or --shm-size 4g")


def _refusal_of_bytes(facts: Facts) -> ConfigError | None:
    """Return the error if only the cache size that the user set prevents a plan; else None."""
    pins = facts.pins
    free = replace(facts, pins=replace(pins, kv_bytes=None))
    fitting = [each for option in base_options(free) if (each := Estimate(facts=free, option=option)).fits]
    if pins.kv_bytes is None or not fitting:
        return None
    best = _best(free, fitting)
    tokens = facts.settings.ctx_size or min(facts.wanted, CONTEXT_STEP)
    message = f"setting engine_arg holds a KV cache that no plan can have: {pins.kv_bytes:,} bytes ({pins.source})"
    least = f"{best.kv.bytes_for(tokens):,} bytes are needed for {tokens:,} tokens"
    return ConfigError(message, hint=f"{least}, and {best.kv_bytes:,} may be used on each rank; or leave it out")


def _refusal(facts: Facts, found: list[Estimate]) -> ModelDoesNotFitError:
    """Return the error with figures of the option that lacks least memory."""
    nearest = min(found, key=lambda each: each.missing_mib)
    stage, option = nearest.tightest, nearest.option
    memory = stage.memory
    least = facts.settings.ctx_size or min(facts.wanted, CONTEXT_STEP)
    kv_mib = stage.kv.bytes_for(least) / MIB
    parts = [f"{memory.weights:,.0f} weights", f"{memory.activation + memory.vision:,.0f} activations"]
    parts += [f"{memory.graphs:,.0f} CUDA graphs"] if option.cards else []
    needed, missing = memory.counted + kv_mib, max(1.0, nearest.missing_mib)
    where = f"each of {option.layout.ranks} ranks" if option.layout.ranks > 1 else "one rank"
    message = (
        f"model does not fit: {facts.shape.title} needs {needed:,.0f} MiB on {where} ({', '.join(parts)}, "
        f"{kv_mib:,.0f} KV cache for {least:,} tokens), and {needed - missing:,.0f} MiB may be used on "
        f"{_place(facts, nearest)}; missing are {missing:,.0f} MiB"
    )
    longest = max((each.context for each in found), default=0)
    smaller = f"--ctx-size {longest}, " if facts.settings.ctx_size and longest >= CONTEXT_STEP else ""
    more = "more GPUs" if option.cards else "a higher limit of the container's memory"
    checkpoint = "a quantized model"
    if facts.shape.quantization.name is None:
        half = "FP8 (half of the size), " if option.cards else ""
        checkpoint = f"a checkpoint of it in {half}AWQ or GPTQ (a quarter of the size)"
    return ModelDoesNotFitError(message, hint=f"use {smaller}a smaller --ubatch, {checkpoint}, or {more}")


def _place(facts: Facts, nearest: Estimate) -> str:
    cards, pins = nearest.tightest.cards, facts.pins
    name = (cards[0].name or "the GPU") if cards else "the host"
    return name if pins.utilization is None else f"{name} by a utilization of {pins.utilization:g} ({pins.source})"
