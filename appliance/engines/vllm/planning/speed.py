"""Predicted time of an option, from bandwidths and arithmetic. It serves to compare options. Pure."""

from __future__ import annotations

from appliance.engines.vllm.planning.arguments.launch import EAGER
from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.memory import assumptions as assumed
from appliance.engines.vllm.planning.memory.kv import KvRequest, token_bytes
from appliance.engines.vllm.planning.memory.parallel import are_linked
from appliance.engines.vllm.planning.model.shape import Shape, dtype_bytes
from appliance.engines.vllm.planning.stages import Option
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Costs, Speed
from appliance.probe import Gpu

GB = 1e9
_EXCHANGES = 2  # all-reduces of a layer: after attention, after the feed-forward


def costs_of(estimate: Estimate) -> Costs:
    return _on_gpus(estimate) if estimate.option.cards else _on_cpu(estimate)


def speed_of(costs: Costs) -> Speed:
    """Return the predicted speed for the chat job."""
    depth = CHAT_TOKENS_IN + CHAT_TOKENS_OUT / 2
    decode_ms, prefill_ms = costs.decode_ms(depth), costs.prefill_ms(CHAT_TOKENS_IN, CHAT_TOKENS_IN / 2)
    speed = Speed(
        decode_tokens_per_s=1000 / decode_ms,
        prefill_tokens_per_s=1000 * CHAT_TOKENS_IN / prefill_ms,
        job_s=(prefill_ms + CHAT_TOKENS_OUT * decode_ms) / 1000,
    )
    return speed.within(assumed.SPREAD_DECODE.value, assumed.SPREAD_PREFILL.value)


def bytes_a_token(shape: Shape, dtype: str) -> float:
    """Return the bytes of weights that are read for one token."""
    used = shape.experts_used / shape.experts if shape.experts else 1.0
    whole = shape.weights_bytes(dtype)
    looked_up = 0 if shape.tied_bytes else shape.vocabulary * shape.width * dtype_bytes(dtype)
    return max(1.0, whole - shape.loaded(shape.expert_bytes, dtype) * (1 - used) - min(looked_up, whole // 4))


def flops_a_token(shape: Shape, dtype: str) -> float:
    """Return the floating-point operations of one token: two for each weight used."""
    bits = shape.quantization.bits or (8 if shape.quantization.name else 8 * dtype_bytes(dtype))
    return 2 * bytes_a_token(shape, dtype) * 8 / bits


def _on_gpus(estimate: Estimate) -> Costs:
    option, shape, dtype = estimate.option, estimate.facts.shape, estimate.facts.dtype
    layout = option.layout
    gb_s = _gb_s_of_layers(option) * assumed.BANDWIDTH_SHARE.value
    # Stages of a pipeline work one after the other on one request: only ranks of one layer add up.
    decode_ms = bytes_a_token(shape, dtype) / layout.tensor / gb_s / GB * 1000
    tflops = gb_s * assumed.TFLOPS_A_GB_S.value * layout.tensor
    return Costs(
        gpu_ms=decode_ms,
        fixed_ms=assumed.STEP_MS.value + _layers_ms(estimate) + _exchange_ms(estimate),
        gpu_depth_us=_depth_bytes(estimate) / gb_s / GB * 1e6,
        gpu_prefill_ms=flops_a_token(shape, dtype) / (tflops * 1e12) * 1000 + _sent_ms(estimate),
        prefill_depth_us=_attention_flops(shape) / (tflops * 1e12) * 1e6,
        batch=option.tokens,
    )


def _gb_s_of_layers(option: Option) -> float:
    """Return the mean bandwidth over all layers, GB/s. Each stage runs at the speed of its slowest GPU."""
    layers = option.layout.layers or (1,)
    slowest = [min(map(_gb_s, option.cards_of(stage))) for stage in range(len(layers))]
    return sum(layers) / sum(count / gb_s for count, gb_s in zip(layers, slowest, strict=True))


def _layers_ms(estimate: Estimate) -> float:
    is_eager = estimate.option.graph_mode in (EAGER, "NONE")
    each = assumed.LAYER_US_EAGER if is_eager else assumed.LAYER_US_GRAPH
    return estimate.facts.shape.layers * each.value / 1000


def _exchange_ms(estimate: Estimate) -> float:
    layout = estimate.option.layout
    hops_us = (layout.pipeline - layout.nodes) * assumed.HOP_US.value + (layout.nodes - 1) * assumed.HOST_HOP_US.value
    hops = hops_us / 1000
    if layout.tensor == 1:
        return hops
    linked = are_linked(estimate.option.own_cards)
    each = assumed.ALLREDUCE_US_NVLINK if linked else assumed.ALLREDUCE_US_PCIE
    return hops + _EXCHANGES * estimate.facts.shape.layers * each.value / 1000


def _sent_ms(estimate: Estimate) -> float:
    """Return the transfer time of one prompt token between ranks, ms: its hidden state crosses the links twice a
    layer."""
    layout, shape = estimate.option.layout, estimate.facts.shape
    if layout.tensor == 1:
        return 0.0
    factor = 2 * (layout.tensor - 1) / layout.tensor
    sent = _EXCHANGES * shape.layers * shape.width * dtype_bytes(estimate.facts.dtype) * factor
    return sent / _link_gb_s(estimate.option.cards) / GB * 1000


def _link_gb_s(cards: tuple[Gpu, ...]) -> float:
    if are_linked(cards):
        return 40.0  # one NVLink bridge between Turing or Ampere cards; servers have more
    return assumed.LINK_GB_S.value


def _gb_s(card: Gpu) -> float:
    return card.bandwidth_gb_s or assumed.GPU_GB_S.value


def _depth_bytes(estimate: Estimate) -> float:
    """Return the bytes of cache that each token in the context adds to a step of one rank."""
    facts, layout = estimate.facts, estimate.option.layout
    request = KvRequest(
        shape=facts.shape,
        dtype=facts.dtype,
        kv_type=estimate.option.kv_type,
        block_size=1,
        tensor_parallel=layout.tensor,
    )
    growing = facts.shape.count("full") + facts.shape.count("mla")
    return token_bytes(request) * growing


def _attention_flops(shape: Shape) -> float:
    growing = shape.count("full") + shape.count("mla")
    return 4 * shape.heads * shape.key_length * growing


def _on_cpu(estimate: Estimate) -> Costs:
    facts, option = estimate.facts, estimate.option
    hardware, shape = facts.hardware, facts.shape
    measured = hardware.speeds.dram_gb_s if hardware.speeds else None
    gb_s = (measured or min(assumed.DRAM_GB_S.value, facts.given.dram_gb_s_max)) * assumed.DRAM_SHARE.value
    flops = hardware.cpu.cores * assumed.CPU_GFLOPS_CORE.value * GB
    return Costs(
        cpu_ms=bytes_a_token(shape, facts.dtype) / gb_s / GB * 1000,
        fixed_ms=assumed.STEP_MS_CPU.value + shape.layers * assumed.LAYER_US_CPU.value / 1000,
        cpu_depth_us=_depth_bytes(estimate) * option.layout.tensor / gb_s / GB * 1e6,
        cpu_prefill_ms=flops_a_token(shape, facts.dtype) / flops * 1000,
        prefill_depth_us=_attention_flops(shape) / flops * 1e6,
        batch=option.tokens,
    )
