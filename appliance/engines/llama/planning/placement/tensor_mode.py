"""Split mode tensor: each matrix is cut over the cards, which work at once. Twice a layer, after attention and after
the feed-forward network, they add up their results. Pure.

Facts come from the pinned source: src/llama-arch.cpp (`llm_arch_supports_sm_tensor`), src/llama-model.cpp (how tensors
are cut), src/llama-context.cpp (it needs flash attention) and ggml/src/ggml-cuda/ggml-cuda.cu (`..._comm_init`). Images
are built without NCCL: two cards exchange through pinned host memory, more cards by a general copy in steps. NVLink is
used by neither. Of the quantized KV caches q8_0 and q4_0 work (llama.cpp#23792, merged before the pin).
docs/multi-gpu.md of the pin still denies it, but no source line does. iq4_nl, q4_1, q5_0 and q5_1 end in an assertion
(llama.cpp#27116, stew675/llama-cpp-rdna-boosts#21). Nobody reported a run with different types of K and V.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from appliance.engines.llama.planning.hardware.assumptions import Assumption
from appliance.engines.llama.planning.memory.flash import EXACT_TYPES, why_no_kernel
from appliance.model import Model
from appliance.plan import Costs, Device

TENSOR = "tensor"
UNSUPPORTED = frozenset({
    "grok", "mpt", "plamo2", "minicpm3", "gemma3n", "mamba", "mamba2", "jamba", "falcon-h1", "olmo2", "olmoe",
    "deepseek2", "deepseek32", "hy_v4", "dots3note", "glm-dsa", "bitnet", "t5", "nemotron_h", "nemotron_h_moe",
    "granitehybrid", "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "kimi-linear", "bailingmoe3", "kimi-k3",
    "glm5-next", "qwen3tts", "qwen4exp",
    "hrm_text",  # llama.cpp allows it, but then each card holds the whole model
})  # fmt: skip
# Architectures that ran in this mode on CUDA: llama.cpp#19378 and #22299; qwen35 on two RTX 3090 (b9455), two RTX 5080
# (unslothai/unsloth#8888) and two RTX 2080 Ti (TheTom/llama-cpp-turboquant#188). Others aborted or ran out of memory in
# some build (#21876, #22268, #22476, #24309, #24440), so they are measured and never predicted.
TRUSTED = frozenset({"llama", "gpt-oss", "qwen35"})
SPLIT_TYPES = (*EXACT_TYPES, "q8_0", "q4_0")  # KV cache types that work in this mode

REDUCTIONS = 2  # sums over all cards in a layer
ROWS = 256  # a feed-forward network is cut at multiples of this: lcm(128, values of a block)
SLOWEST_LINK_GB_S = 2.0  # with a slower link a prompt takes minutes, which is not worth measuring
GOOD_LINK_GB_S = 10.0  # slowest link for a prediction: PCIe 3.0 x16, or 4.0 x8
# The mode is predicted only if the chat job is this many times as fast: it is experimental, and its constants are
# fitted to three figures.
CLEARLY = 1.25
# Each constant fits a published time if each card reads half of the weights and a layer's kernels take 43 us.
REDUCE_US = Assumption(
    value=36.0,
    source="two cards, one sum of a token: Gemma 4 31B Q4_K_M, two RTX 4090, 43.8 to 59.5 tok/s (llama.cpp#19378)",
)
STEP_US = Assumption(
    value=63.0,
    source="one step of the general copy: GLM 4.5 Air, two RTX 4090, 120.6 to 84.2 and 92.6 tok/s (llama.cpp#19378)",
)
PASSES = Assumption(
    value=3.0, source="of a batch's sums in bf16 over the link: Gemma 4 31B, 2,846 tok/s of prefill there, 2,998 before"
)
# GLM 4.5 Air IQ4_XS on two cards with ROCm (llama.cpp#21788): from 2,048 to 32,768 tokens in the cache a token takes
# 20.5 to 34.9 ms at f16, and 25.2 to 58.9 at q8_0. No such pair is published for CUDA.
ROUNDED_DEPTH = Assumption(
    value=2.3, source="times the time of f16 for each token in a q8_0 cache: llama.cpp#21788, 1.12 and 0.48 us"
)
ROUNDED_LAYER_US = Assumption(
    value=74.0, source="of a layer with a q8_0 cache, beside that: the same, 3.4 ms of 46 layers"
)


def why_not(model: Model, split_modes: Sequence[str], kv_type: str = "f16") -> str | None:
    """Return why the engine cannot run this model in split mode tensor; None if it can."""
    if TENSOR not in split_modes:
        return "this engine has no such split mode"
    if model.architecture in UNSUPPORTED or model.is_embedding_model:
        return f"llama.cpp does not split {model.architecture} so"
    if model.projector is not None:
        return "a projector lies whole on one card, which has no room kept for it here"
    if kv_type not in SPLIT_TYPES:
        return f"it takes no cache of type {kv_type}"
    return why_no_kernel(model)


def teams(devices: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """Yield the first two usable cards, the first three, and so on.

    Slices are not usable, because a process sees one slice only; nor are cards with unified memory.
    """
    usable = _usable(devices)
    for count in range(2, len(usable) + 1):
        yield tuple(usable[:count])


def pairs(devices: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """Yield all pairs of cards with good links, one of each kind.

    All pairs, because a faster card with a slow link must not displace a pair that can be predicted.
    """
    alike: set[object] = set()
    for pair in itertools.combinations([d for d in _usable(devices) if d.pinned_gb_s >= GOOD_LINK_GB_S], 2):
        figures = tuple((d.free_mib, d.bandwidth_gb_s, d.pinned_gb_s, d.layer_us, d.tflops) for d in pair)
        if figures not in alike:
            alike.add(figures)
            yield pair


def _usable(devices: Sequence[Device]) -> list[Device]:
    return [d for d in devices if not d.is_slice and not d.is_unified and d.pinned_gb_s >= SLOWEST_LINK_GB_S]


def parts_of(devices: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    """Return the ways to cut each matrix: the same for each card, in proportion to bandwidth, or to free memory."""
    even = (1,) * len(devices)
    sizes = [[d.bandwidth_gb_s for d in devices], [d.free_mib for d in devices]]
    uneven = (tuple(max(1, round(100 * size / sum(each))) for size in each) for each in sizes if min(each) > 0)
    return tuple(dict.fromkeys((even, *(parts for parts in uneven if len(set(parts)) > 1))))


def shares_of(parts: Sequence[int]) -> tuple[float, ...]:
    return tuple(part / sum(parts) for part in parts)


def as_one_card(model: Model, devices: Sequence[Device], parts: Sequence[int]) -> Device:
    """Return one device that stands for all cards: it is as fast as the slowest card with its part.

    Parts are whole heads, and whole blocks of the feed-forward network.
    """
    rows = model.expert_length or model.feed_forward_length
    units = [size for size in (max(model.kv_heads, default=0), rows // ROWS) if size]

    def taken(share: float) -> float:
        return max((min(1.0, -(-share * size // 1) / size) for size in units), default=share)

    def together(rates: Sequence[float]) -> float:
        return min(rate / taken(share) for rate, share in zip(rates, shares_of(parts), strict=True))

    def multiplied(rates: Sequence[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        return together(known) if len(known) == len(rates) else None

    return replace(
        devices[0],
        bandwidth_gb_s=together([device.bandwidth_gb_s for device in devices]),
        weights_g_s=multiplied([device.weights_g_s for device in devices]),
        layer_us=max(device.layer_us for device in devices),
        tflops=multiplied([device.tflops for device in devices]),
        tflops_16=multiplied([device.tflops_16 for device in devices]),
        tflops_attention=multiplied([device.tflops_attention for device in devices]),
    )


def rounded_ms(model: Model, kv_type: str) -> float:
    """Return the fixed milliseconds of a token for a quantized KV cache in all layers; 0 for exact types."""
    attending = sum(not layer.is_draft and layer.k_elements > 0 for layer in model.stack) or model.layers
    return 0.0 if kv_type in EXACT_TYPES else attending * ROUNDED_LAYER_US.value / 1000


def exchanged(model: Model, devices: Sequence[Device], ubatch: int) -> Costs:
    """Return the costs of exchanging and adding up results in all layers."""
    count = REDUCTIONS * sum(not layer.is_draft for layer in model.stack) or REDUCTIONS * model.layers
    steps = (len(devices) - 1).bit_length()
    is_pair = len(devices) == 2
    each_us = REDUCE_US.value if is_pair else steps * STEP_US.value
    link = min(device.pinned_gb_s for device in devices) * 1e6  # bytes a millisecond
    passes = PASSES.value if is_pair else 2 * PASSES.value * steps  # the general copy moves f32
    wide = 2 * model.embedding_length
    return Costs(
        fixed_ms=count * (each_us / 1000 + 2 * passes * wide / link),
        gpu_prefill_ms=count * (each_us / 1000 / ubatch + passes * wide / link),
    )
