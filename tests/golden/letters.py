"""What an expert would object to in a plan: the letters of a hostile review, each as a function. Pure.

Each tells in words why the plan deserves its letter, or nothing. Speeds are the planner's own (`Space.costs`), so no
letter is an argument about its constants: a plan is compared with others of the same planner on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import KV_BYTES, MIB, cells, layers_of
from appliance.engines.llama.planning.space import Space
from appliance.model import Model
from appliance.plan import Costs, GpuAllocation, Plan

EMPTY = 640  # tokens in the cache of a chat that has begun
LONG_PROMPT = 8192  # of an agent
FASTER, AS_FAST = 1.05, 0.95  # measuring tells no smaller differences
PAYS, FOR = 0.12, 4 / 3  # K: more than that share of the speed, for less context than so many times
HOST_KV_MIB = 4e9 / MIB  # A
FAR_BELOW = 2.0  # P: so many times the speed is there for the asking
FAR_BELOW_WHOLE = 1.25  # where everything is on a GPU, it costs nothing but memory that is left
CUDA_CONTEXT_MIB = 550.0  # O: what a process holds of a GPU before the first buffer, 250 to 550 by driver and card
# LLAMA_SPLIT_MODE_TENSOR is not implemented for these: llm_arch_supports_sm_tensor of src/llama-arch.cpp at the pin.
NO_TENSOR_MODE = frozenset({
    "grok", "mpt", "plamo2", "minicpm3", "gemma3n", "mamba", "mamba2", "jamba", "falcon-h1", "olmo2", "olmoe",
    "deepseek2", "deepseek32", "hy_v4", "dots3note", "glm-dsa", "bitnet", "t5", "nemotron_h", "nemotron_h_moe",
    "granitehybrid", "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "kimi-linear", "bailingmoe3", "kimi-k3",
    "glm5-next", "qwen3tts", "qwen4exp",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One plan, and what else the same planner has for its machine and model.

    `rivals` are whole plans of it: the largest contexts that lie on the GPUs alone, one for each type of the cache, and
    the plan's own context with larger batches. `splits` are the split modes among all plans, looked at when asked for.
    """

    plan: Plan
    model: Model
    space: Space
    rivals: tuple[Plan, ...] = ()
    splits: Callable[[], frozenset[str]] = frozenset
    long_costs: Callable[[Plan], Costs] | None = None

    def decode(self, plan: Plan, depth: float = EMPTY) -> float:
        return decode_tokens_per_s(self.space.costs(plan), depth)

    def prefill(self, plan: Plan) -> float:
        return prefill_tokens_per_s((self.long_costs or self.space.costs)(plan), LONG_PROMPT)


def decode_tokens_per_s(costs: Costs, depth: float) -> float:
    deep_ms = (costs.gpu_depth_us + costs.cpu_depth_us) * depth / 1000
    return 1000 / (costs.gpu_ms + costs.cpu_ms + costs.fixed_ms + deep_ms)


def prefill_tokens_per_s(costs: Costs, tokens: int) -> float:
    """Return the speed of reading a prompt into an empty cache. Host weights are copied once a batch; the GPUs of a
    layer split overlap."""
    read_ms = tokens * (costs.gpu_prefill_ms + costs.cpu_prefill_ms) + costs.prefill_depth_us * tokens**2 / 2000
    return 1000 * tokens / (read_ms * costs.serial(tokens) + costs.copy_ms * -(-tokens // costs.batch))


def is_on_gpus(plan: Plan) -> bool:
    """True if every layer is on GPUs. The embedding does not count: it is always in host memory."""
    return plan.placement.is_whole


def beaten(judged: Judged) -> str | None:
    """D: another type of the cache has its context, or more, and is faster."""
    plan, half = judged.plan, judged.plan.context / 2
    for rival in judged.rivals:
        if rival.context < plan.context or rival.kv_type == plan.kv_type:
            continue
        is_faster = judged.decode(rival) >= FASTER * judged.decode(plan)
        deep = judged.decode(rival, half) >= judged.decode(plan, half)
        if is_faster and deep and judged.prefill(rival) >= AS_FAST * judged.prefill(plan):
            speeds = f"{judged.decode(rival):.0f} tok/s in place of {judged.decode(plan):.0f}"
            return f"{rival.kv_type} holds {rival.context:,} on the GPUs, at {speeds}"
    return None


def past_the_knee(judged: Judged) -> str | None:
    """K: the last tokens of context cost much of the speed."""
    plan = judged.plan
    for knee in judged.rivals:
        if knee.kv_type != plan.kv_type or not is_on_gpus(knee):
            continue
        kept = judged.decode(plan) / judged.decode(knee)
        if knee.context < plan.context < FOR * knee.context and kept < 1 - PAYS:
            more = plan.context / knee.context - 1
            return f"{more:.0%} more than {knee.context:,} tokens for {1 - kept:.0%} of decode"
    return None


def attention_away(judged: Judged) -> str | None:
    """A: beside a GPU, attention of a mixture of experts, or more than 4 GB of cache, are on the CPU."""
    plan = judged.plan
    if not plan.placement.shares:
        return None
    if judged.model.experts and plan.placement.cpu_layers:
        return f"attention of {plan.placement.cpu_layers} layers is on the CPU, which only experts should be"
    if plan.memory.kv > HOST_KV_MIB:
        return f"{plan.memory.kv:,.0f} MiB of the cache are in host memory"
    return None


def slow_prompts(judged: Judged) -> str | None:
    """P: weights in host memory are copied in batches that are too small, or from memory that is not pinned; or all is
    on one GPU, and experts get few tokens at once though memory is left. Several cards work on batches in turn, and of
    larger ones there are fewer."""
    plan = judged.plan
    if not plan.placement.shares or (is_on_gpus(plan) and len(plan.placement.shares) > 1):
        return None
    same = (r for r in judged.rivals if r.context >= plan.context and r.kv_type == plan.kv_type)
    cards = len(plan.placement.shares)
    alike = (r for r in same if is_on_gpus(r) == is_on_gpus(plan) and len(r.placement.shares) <= cards)
    best = max(alike, key=judged.prefill, default=plan)
    gain = judged.prefill(best) / judged.prefill(plan)
    least = FAR_BELOW_WHOLE if is_on_gpus(plan) else FAR_BELOW
    if gain < least or judged.decode(best) < (1 - PAYS) * judged.decode(plan):
        return None
    launch = launch_of(best)
    with_what = f"ubatch {launch.ubatch} and load mode {launch.load_mode}"
    return f"{with_what} read a prompt of {LONG_PROMPT:,} tokens {gain:.1f} times as fast"


def no_tensor_mode(judged: Judged) -> str | None:
    """T: all on several cards, of which one works at a time, and the mode in which all do is not even measured."""
    shares = judged.plan.placement.shares
    if len(shares) < 2 or not is_on_gpus(judged.plan) or judged.model.architecture in NO_TENSOR_MODE:
        return None
    is_tried = "tensor" in {judged.plan.placement.split_mode, *judged.splits()}
    return None if is_tried else f"{len(shares)} cards, one at work at a time"


def out_of_memory(judged: Judged) -> str | None:
    """O: buffers that the engine makes whatever the plan says, and the CUDA context, exceed what is free."""
    plan = judged.plan
    for at, share in enumerate(plan.placement.shares):
        memory, free = share.memory, share.gpu.free_mib + share.gpu.held_back_mib
        compute = max(memory.compute, copies_mib(judged, share, is_first=at == 0))
        need = memory.total - memory.compute + compute + CUDA_CONTEXT_MIB
        if not share.gpu.is_unified and need > free:
            return f"{share.device} needs {need:,.0f} of {free:,.0f} MiB"
    return None


def copies_mib(judged: Judged, share: GpuAllocation, *, is_first: bool) -> float:
    """Return the MiB of temporary copies of K and V. A cache that is not f16 has f16 copies of its widest layer
    (ggml-cuda's fattn.cu). The first GPU also holds K and V of one layer whose cache is in host memory
    (ggml_backend_sched_split_graph)."""
    plan = judged.plan
    each = [
        (layer.k_elements + layer.v_elements) * cells(layer, plan.context, launch_of(plan).ubatch, plan.parallel)
        for layer in layers_of(judged.model)
    ]
    flash = 0.0 if plan.kv_type == "f16" or not share.layers else 2.0 * max(each)
    away = each[: plan.placement.cpu_layers] if is_first else []
    return (flash + KV_BYTES[plan.kv_type] * max(away, default=0.0)) / MIB


LETTERS: Mapping[str, Callable[[Judged], str | None]] = {
    "D": beaten,
    "K": past_the_knee,
    "A": attention_away,
    "P": slow_prompts,
    "T": no_tensor_mode,
    "O": out_of_memory,
}


def objections(judged: Judged) -> dict[str, str]:
    """Return each objection in words, keyed by its letter."""
    return {letter: words for letter, judge in LETTERS.items() if (words := judge(judged))}
