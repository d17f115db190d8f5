"""Costs of layers, from bandwidths and arithmetic: on a GPU, on the CPU, or on a GPU with experts on the CPU. Pure.

For each token, decode reads every weight of a layer once (of routed experts only those that are used), and the filled
part of the KV cache. Prefill reads the weights once a batch, and multiplies every token of the batch with them.
rates.py has the rates that cards and cores reach. Weights in host memory are copied to a GPU for a batch of 32 tokens
or more (llama.cpp's op-offload). Copies and work alternate, so their times add up.

`Costs` keeps the parts apart, because each is off by a factor of its own that measuring finds (tune/refit.py). `Cost`
adds them up for the chat job, by which placements are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property

from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.hardware.rates import CpuRates
from appliance.engines.llama.planning.memory.flash import EXACT_TYPES, converted_layers
from appliance.engines.llama.planning.memory.memory import KV_BYTES, cell_bytes, layers_of
from appliance.engines.llama.planning.placement.tensor_mode import (
    ROUNDED_DEPTH,
    TENSOR,
    as_one_card,
    exchanged,
    rounded_ms,
)
from appliance.model import Layer, Model
from appliance.model.formats.ggml_types import GGML_TYPES
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Costs, Device, Placement, Speed, k_and_v
from appliance.plan.parts.costs import total
from appliance.values import dataclass

DEPTH = CHAT_TOKENS_IN + CHAT_TOKENS_OUT // 2
PS = 10**12
HOP_MS = assumptions.HOP_US.value / 1000
EXPERTS_HOP_MS = assumptions.EXPERTS_HOP_US.value / 1000
CPU_LAYER_MS = assumptions.CPU_LAYER_US.value / 1000
SIXTEEN_BITS = ("F16", "BF16", "F32")
# Types that the CPU backend multiplies with many tokens at once, and an instruction that this takes: ggml-cpu's
# repack.cpp (ggml_repack_get_optimal_repack_type), llamafile/sgemm.cpp and amx/common.h of the pinned engine. All
# others, and these without the instruction, are multiplied token by token.
CPU_MANY: Mapping[str, tuple[str, ...]] = {
    "Q8_0": ("avx2", "asimddp"),
    "Q4_0": ("avx2", "asimddp"),
    "Q4_1": ("amx_int8",),
    "Q5_0": ("avx2",),
    "Q4_K": ("avx2", "asimddp"),
    "Q2_K": ("avx512f",),
    "Q5_K": ("asimddp", "amx_int8"),
    "Q6_K": ("asimddp", "amx_int8"),
    "IQ4_XS": ("amx_int8",),
    "IQ4_NL": ("avx2", "asimddp"),
    "MXFP4": ("avx2", "asimddp"),
}
FULL_BATCH = 512  # tokens in a batch for which a card's `tflops` hold
_STATE_FLOPS = 6  # for each element of a state (f32) and token: decay, read, correct, add, read out
CPU_FIXED_MS = 0.2  # start of a token's kernels on a CPU one after the other, and sampling: chosen, not measured


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of the chat job in picoseconds a token. Whole numbers, because their sum does not depend on the order."""

    decode: int = 0
    prefill: int = 0

    @property
    def job(self) -> int:
        return CHAT_TOKENS_OUT * self.decode + CHAT_TOKENS_IN * self.prefill

    def __add__(self, other: Cost) -> Cost:
        return Cost(decode=self.decode + other.decode, prefill=self.prefill + other.prefill)

    def speed(self) -> Speed:
        return Speed(
            decode_tokens_per_s=PS / max(1, self.decode),
            prefill_tokens_per_s=PS / max(1, self.prefill),
            job_s=self.job / PS,
        )


_TYPE_BYTES = {kind.name: kind.block_bytes / kind.block_size for kind in GGML_TYPES.values()}
HOP = Cost(decode=round(HOP_MS * 1e9))  # hand-over from one device to the next


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Computes the costs of one model's layers."""

    model: Model
    kv_type: str
    ubatch: int
    dram_gb_s: float
    upload: Device | None = None  # the GPU that host weights are copied to for a batch; None: the CPU reads prompts
    # Tokens in the KV cache, at most a layer's window. None: costs that grow with the cache are kept apart (`..._us`),
    # and windows count as full.
    depth: int | None = None
    cpu: CpuRates | None = None  # None: unknown, prefill is estimated from the bandwidth
    prompt: int = CHAT_TOKENS_IN  # tokens that are read in batches of `ubatch`
    # Time for reading a quantized cache on a GPU, relative to f16.
    rounded_depth: float = assumptions.ROUNDED_CACHE_GPU.value

    def job(self, costs: Costs) -> Cost:
        """Return the cost of the chat job from costs that were computed with a `depth`."""
        prefill_ms = costs.gpu_prefill_ms + costs.cpu_prefill_ms + costs.copy_ms / self._batch
        decode_ms = costs.gpu_ms + costs.cpu_ms + costs.fixed_ms
        return Cost(decode=round(decode_ms * 1e9), prefill=round(prefill_ms * 1e9))

    def on_gpu(self, layer: Layer, device: Device) -> Costs:
        used = self._used(layer)
        experts = self._multiplied(device, used, is_bank=True) + self._streamed(device, self._touched(layer))
        return self._dense_on_gpu(layer, device, used) + Costs(gpu_prefill_ms=experts)

    def experts_on_cpu(self, layer: Layer, device: Device) -> Costs:
        """Return the costs of a layer on a GPU with its routed experts in host memory."""
        if not layer.expert_bytes:
            return self.on_gpu(layer, device)
        experts = Costs(cpu_ms=_ms(self._used(layer), self.dram_gb_s), fixed_ms=EXPERTS_HOP_MS)
        return self._dense_on_gpu(layer, device, 0.0) + experts + self._copied(layer, 0.0)

    def on_cpu(self, layer: Layer) -> Costs:
        weights = layer.dense_bytes + 2 * layer.state_bytes + self._used(layer)
        values = layer.k_elements + layer.v_elements
        held = self._held(layer)
        costs = cpu_costs(weights, values, self.kv_type, self.dram_gb_s, held=held, grows=self._grows(layer))
        costs = replace(costs, fixed_ms=CPU_LAYER_MS)
        if self.upload is None:
            return self._computed_by_cores(costs, layer)
        return replace(costs, cpu_prefill_ms=0.0, prefill_depth_us=0.0) + self._copied(layer, layer.dense_bytes)

    def _computed_by_cores(self, costs: Costs, layer: Layer) -> Costs:
        """Return the costs with prefill by the CPU's cores and instructions; unchanged if `cpu` is None."""
        if self.cpu is None:
            return costs
        flops = self._flops(layer.dense_bytes, is_bank=False) + self._flops(self._used(layer), is_bank=True)
        by_token = flops / (self.cpu.dot_tflops(self.cpu.threads) * 1e9)
        has_many = _has_many(self._quantization(bool(layer.expert_bytes)), self.cpu.isa)
        multiplied = flops / (self.cpu.tflops(self.cpu.threads) * 1e9) if has_many else by_token
        attended = self._attention_flops(layer) / (self.cpu.attention_tflops(self.cpu.threads) * 1e9)
        attended *= _rounded(self.kv_type)
        return replace(
            costs,
            cpu_ms=costs.cpu_ms if has_many else max(costs.cpu_ms, by_token),
            cpu_prefill_ms=multiplied + attended * self._held(layer),
            prefill_depth_us=1000 * attended if self._grows(layer) else 0.0,
        )

    def output_on_gpu(self, device: Device) -> Costs:
        """Return the costs of the output. In prefill they are close to 0: only a prompt's last token has logits."""
        return Costs(gpu_ms=self._weights_ms(self.model.output_bytes, device))

    def _weights_ms(self, size: float, device: Device, *, is_bank: bool = False) -> float:
        """Return the milliseconds of a token for `size` bytes of weights: to read or to unpack, whichever is longer."""
        read = _ms(size, device.bandwidth_gb_s)
        if device.weights_g_s is None or self._quantization(is_bank) in SIXTEEN_BITS:
            return read
        return max(read, size / self._weight_bytes[is_bank] / (device.weights_g_s * 1e6))

    def output_on_cpu(self) -> Costs:
        return Costs(cpu_ms=_ms(self.model.output_bytes, self.dram_gb_s), fixed_ms=CPU_FIXED_MS)

    @cached_property
    def _converted(self) -> frozenset[Layer]:
        """Layers whose KV cache is converted to f16 for every token."""
        return frozenset() if self.kv_type == "f16" else converted_layers(self.model)

    def _dense_on_gpu(self, layer: Layer, device: Device, used: float) -> Costs:
        gb_s = device.bandwidth_gb_s
        cache = self._cache_bytes(layer)
        # 2 x: a state is read and written.
        read = _ms(2 * layer.state_bytes + cache * self._held(layer), gb_s)
        read += self._weights_ms(layer.dense_bytes, device) + self._weights_ms(used, device, is_bank=True)
        attended = self._attended_ms(layer, device)
        matrices = self._multiplied(device, layer.dense_bytes) + self._streamed(device, layer.dense_bytes)
        return Costs(
            gpu_ms=read,
            fixed_ms=device.layer_us / 1000 * _kernels(layer),
            gpu_depth_us=1000 * _ms(cache, gb_s) if self._grows(layer) else 0.0,
            gpu_prefill_ms=matrices + attended * self._held(layer) + _updated_ms(layer, device),
            prefill_depth_us=1000 * attended if self._grows(layer) else 0.0,
        )

    def _cache_bytes(self, layer: Layer) -> float:
        """Return the bytes of an f16 cache that a GPU reads in the same time, for each token in the KV cache.

        A quantized cache is smaller, but no published figure shows that a kernel reads it faster.
        """
        exact = cell_bytes(layer, "f16")
        if layer in self._converted:  # the f16 copy is written and read
            return cell_bytes(layer, self.kv_type) + 2 * exact
        return cell_bytes(layer, self.kv_type) if self.kv_type in EXACT_TYPES else self.rounded_depth * exact

    def _copied(self, layer: Layer, dense_bytes: float) -> Costs:
        """Return the prefill costs of weights in host memory: a layer's experts and `dense_bytes`.

        They are copied to the GPU for each batch and multiplied there. If the dense weights lie in host memory, so does
        the layer's KV cache, which is copied too.
        """
        device = self.upload
        touched = self._touched(layer)
        if device is None or not dense_bytes + touched:
            return Costs()
        worked = self._multiplied(device, self._used(layer), is_bank=True)
        if not dense_bytes:
            return Costs(copy_ms=_ms(touched, device.upload_gb_s), gpu_prefill_ms=worked)
        cache = cell_bytes(layer, self.kv_type)
        moved = _ms(cache, device.upload_gb_s) / self._batch + self._attended_ms(layer, device)
        return Costs(
            copy_ms=_ms(dense_bytes + touched, device.upload_gb_s),
            gpu_prefill_ms=worked + self._multiplied(device, dense_bytes) + moved * self._held(layer),
            prefill_depth_us=1000 * moved if self._grows(layer) else 0.0,
        )

    def _multiplied(self, device: Device, size: float, *, is_bank: bool = False) -> float:
        """Return the milliseconds that a GPU takes to multiply a prompt's token with `size` bytes of weights.

        A card is slower if a matrix has few tokens, and for experts, whose tokens are gathered and scattered.
        """
        tokens: float = self._batch
        scattered = 1.0
        if is_bank and self.model.experts:
            tokens = self._batch * self.model.experts_used / self.model.experts
            scattered = assumptions.MOE_PREFILL_SHARE.value
        half = assumptions.HALF_BATCH.value
        full = tokens / (tokens + half) * (FULL_BATCH + half) / FULL_BATCH
        tflops = _tflops(device, is_16_bit=self._quantization(is_bank) in SIXTEEN_BITS)
        return self._flops(size, is_bank=is_bank) / (tflops * full * scattered * 1e9)

    def _streamed(self, device: Device, size: float) -> float:
        """Return the milliseconds of a prompt's token for reading `size` bytes of weights once a batch."""
        return _ms(size, device.bandwidth_gb_s) / self._batch

    def _attended_ms(self, layer: Layer, device: Device) -> float:
        """Return the attention milliseconds of a prompt's token for each token in the KV cache."""
        tflops = device.tflops_attention or _tflops(device, is_16_bit=True)
        return self._attention_flops(layer) / (tflops * assumptions.ATTENTION_SHARE.value * 1e9)

    def _attention_flops(self, layer: Layer) -> float:
        """Return the attention operations of one token for each token in the KV cache: two products for every head."""
        kv_heads = max(self.model.kv_heads, default=0) or 1
        return 2 * (layer.k_elements + layer.v_elements) * self.model.heads / kv_heads

    def _flops(self, size: float, *, is_bank: bool) -> float:
        """Return the operations of one token: a multiplication and an addition for each weight."""
        return 2 * size / self._weight_bytes[is_bank]

    def _quantization(self, is_bank: bool) -> str:
        """Return the type that holds most of the weights, of the experts or of the rest."""
        sizes = {m.type_name: m.size_bytes for m in self.model.matrices if m.is_bank == is_bank}
        return max(sizes, key=lambda name: sizes[name], default=self.model.quantization)

    @cached_property
    def _weight_bytes(self) -> tuple[float, float]:
        """Mean bytes of a weight outside the experts, and in the experts."""
        return _weight_bytes(self.model, is_bank=False), _weight_bytes(self.model, is_bank=True)

    def _held(self, layer: Layer) -> int:
        """Return the tokens of the KV cache that count as read at `depth`; without depth, a window counts as full."""
        if self.depth is None:
            return layer.window or 0
        return min(self.depth, layer.window or self.depth)

    def _grows(self, layer: Layer) -> bool:
        return self.depth is None and not layer.window

    @property
    def _batch(self) -> int:
        return min(self.ubatch, self.prompt)

    def _used(self, layer: Layer) -> float:
        """Return the bytes of a layer's routed experts that one token uses."""
        return layer.expert_bytes * self.model.experts_used / self.model.experts if self.model.experts else 0.0

    def _touched(self, layer: Layer) -> float:
        """Return the bytes of all experts that at least one token of a batch uses.

        Routers favour some experts. How often an expert is drawn follows a gamma distribution, so the share of unused
        experts is the share of zeros of a negative binomial distribution.
        """
        if not self.model.experts:
            return 0.0
        drawn = self.model.experts_used / self.model.experts
        skew = assumptions.ROUTER_SKEW.value
        used: float = 1 - (1 + self._batch * drawn / skew) ** -skew
        return layer.expert_bytes * max(drawn, used)


def costs_of(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Costs:
    """Return the costs of a placement with as many threads as compute most; `with_threads` converts to other numbers.

    `devices` are by id and include those of the placement. The roofline must have no depth.
    """
    costs = total(_parts(roofline, placement, devices), batch=roofline.ubatch)
    return replace(costs, overlap=_overlap(roofline, placement, devices))


def _overlap(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> float:
    """Return the share of a prompt's work that cards do at the same time, 0 to 1.

    Each card works on the next ubatch while the card behind it works on the previous one. llama.cpp does so if layers
    lie on several cards and nothing lies in host memory (llama-context.cpp, pipeline_parallel).
    """
    if placement.split_mode != "layer" or len(placement.shares) < 2 or not placement.is_whole:
        return 0.0
    layers, at, stages = layers_of(roofline.model), 0, []
    on_gpu = cache(roofline.on_gpu)
    for share in placement.shares:
        mine = [layer for layer in layers[at : at + share.layers] if not layer.is_draft]
        stages.append(sum(on_gpu(layer, devices[share.gpu.id]).gpu_prefill_ms for layer in mine))
        at += share.layers
    return (1 - max(stages) / sum(stages)) * assumptions.PIPELINE_SHARE.value if sum(stages) else 0.0


def _parts(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Iterator[Costs]:
    if placement.split_mode == TENSOR:
        yield in_parallel(roofline, placement, devices)
        return
    layers = layers_of(roofline.model)
    # Cached, because most layers of a model are alike.
    on_cpu, on_gpu, apart = cache(roofline.on_cpu), cache(roofline.on_gpu), cache(roofline.experts_on_cpu)
    at = placement.cpu_layers if placement.shares else len(layers)
    yield from (on_cpu(layer) for layer in layers[:at] if not layer.is_draft)
    for share in placement.shares:
        device, end = devices[share.gpu.id], min(at + share.layers, len(layers))
        for number in range(at, end):
            is_apart = number < placement.cpu_expert_layers
            if not layers[number].is_draft:
                yield (apart if is_apart else on_gpu)(layers[number], device)
        if at:
            yield Costs(fixed_ms=HOP_MS)
        at += share.layers
    if placement.shares and at > len(layers):
        yield roofline.output_on_gpu(devices[placement.shares[-1].gpu.id])
    else:
        yield roofline.output_on_cpu()


def in_parallel(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Costs:
    """Return the costs in split mode tensor: every layer on all cards at once, and the exchanges between cards."""
    cards = [devices[share.gpu.id] for share in placement.shares]
    card = as_one_card(roofline.model, cards, placement.parts)
    on_gpu = cache(replace(roofline, rounded_depth=ROUNDED_DEPTH.value).on_gpu)
    worked = (on_gpu(layer, card) for layer in layers_of(roofline.model) if not layer.is_draft)
    exchange = exchanged(roofline.model, cards, roofline.ubatch)
    rounded = Costs(fixed_ms=rounded_ms(roofline.model, roofline.kv_type))
    return total((roofline.output_on_gpu(card), *worked, exchange, rounded), batch=roofline.ubatch)


def with_threads(costs: Costs, threads: int, cores: int, cpu: CpuRates | None = None) -> Costs:
    """Return the costs with `threads` threads, from costs with as many threads as compute most.

    If `cpu` is None, half of the cores saturate the memory and arithmetic uses all. Threads beyond the number of cores
    add nothing.
    """
    if cpu:
        most = cpu.threads
        decode, prefill = cpu.gb_s(threads) / cpu.gb_s(most), cpu.worth(threads) / cpu.worth(most)
    else:
        decode, prefill = min(1.0, threads / max(1.0, cores / 2)), min(threads, cores) / cores
    return replace(
        costs,
        cpu_ms=costs.cpu_ms / decode,
        cpu_depth_us=costs.cpu_depth_us / decode,
        cpu_prefill_ms=costs.cpu_prefill_ms / prefill,
        prefill_depth_us=costs.prefill_depth_us / (prefill if costs.cpu_prefill_ms and not costs.gpu_prefill_ms else 1),
    )


def cpu_costs(
    weights_bytes: float, cache_values: float, kv_type: str, dram_gb_s: float, *, held: int = 0, grows: bool = True
) -> Costs:
    """Return the costs of layers on a machine without a GPU, by the bandwidth of memory.

    A token reads `weights_bytes`, and `cache_values` for each token in the KV cache. `held` tokens of the cache are
    always read. `grows`: the cost increases with the depth of the cache.
    """
    decode_bytes, prefill_bytes = cache_on_cpu(cache_values, kv_type)
    gain = assumptions.PREFILL_GAIN_CPU.value
    return Costs(
        cpu_ms=_ms(weights_bytes + held * decode_bytes, dram_gb_s),
        cpu_depth_us=1000 * _ms(decode_bytes, dram_gb_s) if grows else 0.0,
        cpu_prefill_ms=_ms(weights_bytes + held * prefill_bytes, dram_gb_s) / gain,
        prefill_depth_us=1000 * _ms(prefill_bytes, dram_gb_s) / gain if grows else 0.0,
    )


def cache_on_cpu(values: float, kv_type: str) -> tuple[float, float]:
    """Return the bytes that stand for the time of one token in the KV cache: in decode, and in prefill.

    A quantized cache is smaller than f16 but slower on a CPU, so its figures are larger than its size.
    """
    least = min(KV_BYTES[kind] for kind in k_and_v(kv_type))
    if least >= KV_BYTES["f16"]:
        return values * least, values * least
    exact = values * KV_BYTES["f16"]
    return exact * assumptions.ROUNDED_CACHE_DECODE.value, exact * assumptions.ROUNDED_CACHE_PREFILL.value


def _has_many(type_name: str, isa: Collection[str]) -> bool:
    """Return True if a CPU with these instructions multiplies weights of a type with many tokens at once."""
    return type_name in SIXTEEN_BITS or any(name in isa for name in CPU_MANY.get(type_name, ()))


def _rounded(kv_type: str) -> float:
    """Return the time of a prompt's attention on a CPU with this KV cache type, relative to f16."""
    is_exact = min(KV_BYTES[kind] for kind in k_and_v(kv_type)) >= KV_BYTES["f16"]
    return 1.0 if is_exact else assumptions.ROUNDED_CACHE_PREFILL.value


def _kernels(layer: Layer) -> float:
    """Return the number of a layer's kernels relative to a plain layer: experts and recurrent states need more."""
    experts = assumptions.MOE_LAYERS.value if layer.expert_bytes else 0.0
    return 1.0 + experts + (assumptions.RECURRENT_LAYERS.value if layer.state_bytes else 0.0)


def _updated_ms(layer: Layer, device: Device) -> float:
    """Return the milliseconds of a prompt's token for updating a layer's recurrent state; 0 without one."""
    flops = _STATE_FLOPS * layer.state_bytes / 4
    return flops / (_tflops(device, is_16_bit=True) * assumptions.RECURRENT_SHARE.value * 1e9)


def _tflops(device: Device, *, is_16_bit: bool) -> float:
    known = device.tflops_16 if is_16_bit else device.tflops
    return known or device.bandwidth_gb_s * assumptions.GPU_GFLOPS_A_GB_S.value / 1000


def weight_bytes(model: Model) -> float:
    """Return the mean bytes of a weight over all matrices of known type; Q4_K's if the header names none."""
    known = [m for m in model.matrices if m.type_name in _TYPE_BYTES]
    weights = sum(m.size_bytes / _TYPE_BYTES[m.type_name] for m in known)
    return sum(m.size_bytes for m in known) / weights if weights else _TYPE_BYTES["Q4_K"]


def _weight_bytes(model: Model, *, is_bank: bool) -> float:
    of = [m for m in model.matrices if m.is_bank == is_bank and m.type_name in _TYPE_BYTES]
    weights = sum(m.size_bytes / _TYPE_BYTES[m.type_name] for m in of)
    return sum(m.size_bytes for m in of) / weights if weights else _TYPE_BYTES["Q4_K"]


def _ms(size: float, gb_s: float) -> float:
    return size / (gb_s * 1e6)
