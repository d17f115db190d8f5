"""What layers cost, from bandwidths and arithmetic: on a GPU, the CPU, or a GPU with their experts on the CPU. Pure.

Decode reads every weight of a layer once a token, of routed experts those that are used, and the cache as deep as it is
filled. Prefill reads them once a batch, and multiplies every token of it with them; what a card or a core reaches of
both is by its class (rates.py). Weights in host memory are copied to a GPU for a batch of 32 tokens or more
(llama.cpp's op-offload), one copy after the other with the work, so the times add up.

The parts stay apart in `Costs`, since each is off by a factor of its own that measuring finds (tune/refit.py); `Cost`
adds them up for the chat job that placements are compared by.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Types whose products with many tokens the CPU backend has kernels for: ggml-cpu's repack.cpp and llamafile/sgemm.cpp
CPU_MANY = (*SIXTEEN_BITS, "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4")
FULL_BATCH = 512  # tokens that `tflops` of a card are told for
_STATE_FLOPS = 6  # for each element of a state (f32) and token: decay, read, correct, add, read out
CPU_FIXED_MS = 0.2  # a token's kernels on a CPU that start one after the other, and its sampling: chosen


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the chat job, picoseconds a token: whole numbers, whose sums are the same in whatever order they are taken."""

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
HOP = Cost(decode=round(HOP_MS * 1e9))  # from one device to the next


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What layers of one model are timed by. `upload` is the GPU that host weights are copied to for a batch.

    With `depth` the cache counts as filled so deep, and so much of it as a window holds; without, what grows with the
    cache is told apart, and a window counts as full.
    """

    model: Model
    kv_type: str
    ubatch: int
    dram_gb_s: float
    upload: Device | None = None
    depth: int | None = None
    cpu: CpuRates | None = None
    prompt: int = CHAT_TOKENS_IN  # tokens that are read in batches of `ubatch`
    rounded_depth: float = assumptions.ROUNDED_CACHE_GPU.value  # of a token's time for the cache at f16, on a GPU

    def job(self, costs: Costs) -> Cost:
        """Of costs at a depth."""
        prefill_ms = costs.gpu_prefill_ms + costs.cpu_prefill_ms + costs.copy_ms / self._batch
        decode_ms = costs.gpu_ms + costs.cpu_ms + costs.fixed_ms
        return Cost(decode=round(decode_ms * 1e9), prefill=round(prefill_ms * 1e9))

    def on_gpu(self, layer: Layer, device: Device) -> Costs:
        used = self._used(layer)
        experts = self._multiplied(device, used, is_bank=True) + self._streamed(device, self._touched(layer))
        return self._dense_on_gpu(layer, device, used) + Costs(gpu_prefill_ms=experts)

    def experts_on_cpu(self, layer: Layer, device: Device) -> Costs:
        """The layer on a GPU, its routed experts in host memory."""
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
        """Prefill by cores and instructions, where they are known."""
        if self.cpu is None:
            return costs
        flops = self._flops(layer.dense_bytes, is_bank=False) + self._flops(self._used(layer), is_bank=True)
        kernels = 1.0 if self._quantization(bool(layer.expert_bytes)) in CPU_MANY else assumptions.UNPACKED_SHARE.value
        multiplied = flops / (self.cpu.tflops(self.cpu.threads) * kernels * 1e9)
        attended = self._attention_flops(layer) / (self.cpu.attention_tflops(self.cpu.threads) * 1e9)
        attended *= _rounded(self.kv_type)
        return replace(
            costs,
            cpu_prefill_ms=multiplied + attended * self._held(layer),
            prefill_depth_us=1000 * attended if self._grows(layer) else 0.0,
        )

    def output_on_gpu(self, device: Device) -> Costs:
        """Logits are made for one token of a prompt: nothing to speak of in prefill."""
        return Costs(gpu_ms=self._weights_ms(self.model.output_bytes, device))

    def _weights_ms(self, size: float, device: Device, *, is_bank: bool = False) -> float:
        """Milliseconds of a token for so many bytes of weights: read, or unpacked where that takes longer."""
        read = _ms(size, device.bandwidth_gb_s)
        if device.weights_g_s is None or self._quantization(is_bank) in SIXTEEN_BITS:
            return read
        return max(read, size / self._weight_bytes[is_bank] / (device.weights_g_s * 1e6))

    def output_on_cpu(self) -> Costs:
        return Costs(cpu_ms=_ms(self.model.output_bytes, self.dram_gb_s), fixed_ms=CPU_FIXED_MS)

    @cached_property
    def _converted(self) -> frozenset[Layer]:
        """Layers whose cache is converted for every token."""
        return frozenset() if self.kv_type == "f16" else converted_layers(self.model)

    def _dense_on_gpu(self, layer: Layer, device: Device, used: float) -> Costs:
        gb_s = device.bandwidth_gb_s
        cache = self._cache_bytes(layer)
        # A state is read and written.
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
        """Bytes of an f16 cache that take a GPU as long to read as this one, for each token in it. A quantized cache is
        smaller, and no kernel was measured to be faster with it."""
        exact = cell_bytes(layer, "f16")
        if layer in self._converted:  # the f16 copy is written, and read
            return cell_bytes(layer, self.kv_type) + 2 * exact
        return cell_bytes(layer, self.kv_type) if self.kv_type in EXACT_TYPES else self.rounded_depth * exact

    def _copied(self, layer: Layer, dense_bytes: float) -> Costs:
        """Of host weights: experts, and `dense_bytes`. They are copied for a batch, and then worked with; so is the
        cache of a layer that lies there."""
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
        """Milliseconds of a token of a prompt with so many bytes of weights. Few tokens for a matrix keep a card's
        units waiting, and so do those of experts, which are gathered and scattered."""
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
        """Milliseconds of a token for weights that are read once a batch."""
        return _ms(size, device.bandwidth_gb_s) / self._batch

    def _attended_ms(self, layer: Layer, device: Device) -> float:
        """Of a token of a prompt, for each token of the cache: two products with as many rows as there are heads."""
        tflops = device.tflops_attention or _tflops(device, is_16_bit=True)
        return self._attention_flops(layer) / (tflops * assumptions.ATTENTION_SHARE.value * 1e9)

    def _attention_flops(self, layer: Layer) -> float:
        """Of one token, for each token of the cache."""
        kv_heads = max(self.model.kv_heads, default=0) or 1
        return 2 * (layer.k_elements + layer.v_elements) * self.model.heads / kv_heads

    def _flops(self, size: float, *, is_bank: bool) -> float:
        """A multiplication and an addition for each weight of a token."""
        return 2 * size / self._weight_bytes[is_bank]

    def _quantization(self, is_bank: bool) -> str:
        """The type that holds most of the weights."""
        sizes = {m.type_name: m.size_bytes for m in self.model.matrices if m.is_bank == is_bank}
        return max(sizes, key=lambda name: sizes[name], default=self.model.quantization)

    @cached_property
    def _weight_bytes(self) -> tuple[float, float]:
        """Mean bytes of a weight, outside of the experts and in them."""
        return _weight_bytes(self.model, is_bank=False), _weight_bytes(self.model, is_bank=True)

    def _held(self, layer: Layer) -> int:
        """Tokens of the cache that count as read."""
        if self.depth is None:
            return layer.window or 0
        return min(self.depth, layer.window or self.depth)

    def _grows(self, layer: Layer) -> bool:
        return self.depth is None and not layer.window

    @property
    def _batch(self) -> int:
        return min(self.ubatch, self.prompt)

    def _used(self, layer: Layer) -> float:
        """Bytes of its routed experts that one token uses."""
        return layer.expert_bytes * self.model.experts_used / self.model.experts if self.model.experts else 0.0

    def _touched(self, layer: Layer) -> float:
        """Bytes of every expert that one of a batch's tokens uses. Routers favour some: how often an expert is drawn
        varies as a gamma distribution, so how many stay unused is a negative binomial's share of zeros."""
        if not self.model.experts:
            return 0.0
        drawn = self.model.experts_used / self.model.experts
        skew = assumptions.ROUTER_SKEW.value
        used: float = 1 - (1 + self._batch * drawn / skew) ** -skew
        return layer.expert_bytes * max(drawn, used)


def costs_of(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Costs:
    """Of a plan, with as many threads as compute most: what others cost is `with_threads`. `devices` are by id, those
    of the placement among them; the roofline is without a depth."""
    costs = total(_parts(roofline, placement, devices), batch=roofline.ubatch)
    return replace(costs, overlap=_overlap(roofline, placement, devices))


def _overlap(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> float:
    """Share of a prompt's work that cards do at the same time: each has the next ubatch while the one behind it works
    on the last. llama.cpp does so with layers on several cards and nothing in host memory (llama-context.cpp,
    pipeline_parallel)."""
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
    # Most layers of a model are alike.
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
    """Of split mode tensor: every layer on all cards at once, and what they exchange."""
    cards = [devices[share.gpu.id] for share in placement.shares]
    card = as_one_card(roofline.model, cards, placement.parts)
    on_gpu = cache(replace(roofline, rounded_depth=ROUNDED_DEPTH.value).on_gpu)
    worked = (on_gpu(layer, card) for layer in layers_of(roofline.model) if not layer.is_draft)
    exchange = exchanged(roofline.model, cards, roofline.ubatch)
    rounded = Costs(fixed_ms=rounded_ms(roofline.model, roofline.kv_type))
    return total((roofline.output_on_gpu(card), *worked, exchange, rounded), batch=roofline.ubatch)


def with_threads(costs: Costs, threads: int, cores: int, cpu: CpuRates | None = None) -> Costs:
    """Of costs with as many threads as compute most. So many cores saturate the memory, half of them where nothing is
    known; arithmetic takes them all. More threads than cores bring nothing."""
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
    """Of layers whose prompts are read by the CPU as well: so many bytes of weights a token, and so many values of the
    cache for each token in it. `held` tokens of the cache are read always; it `grows` with each that is in it."""
    decode_bytes, prefill_bytes = cache_on_cpu(cache_values, kv_type)
    gain = assumptions.PREFILL_GAIN_CPU.value
    return Costs(
        cpu_ms=_ms(weights_bytes + held * decode_bytes, dram_gb_s),
        cpu_depth_us=1000 * _ms(decode_bytes, dram_gb_s) if grows else 0.0,
        cpu_prefill_ms=_ms(weights_bytes + held * prefill_bytes, dram_gb_s) / gain,
        prefill_depth_us=1000 * _ms(prefill_bytes, dram_gb_s) / gain if grows else 0.0,
    )


def cache_on_cpu(values: float, kv_type: str) -> tuple[float, float]:
    """Bytes for each token in the cache, as a decoded token and as one of a prompt spend time on them. A rounded cache
    is smaller than f16, and slower all the same."""
    least = min(KV_BYTES[kind] for kind in k_and_v(kv_type))
    if least >= KV_BYTES["f16"]:
        return values * least, values * least
    exact = values * KV_BYTES["f16"]
    return exact * assumptions.ROUNDED_CACHE_DECODE.value, exact * assumptions.ROUNDED_CACHE_PREFILL.value


def _rounded(kv_type: str) -> float:
    """How many times as long a prompt's attention takes on a CPU with this cache type as with f16."""
    is_exact = min(KV_BYTES[kind] for kind in k_and_v(kv_type)) >= KV_BYTES["f16"]
    return 1.0 if is_exact else assumptions.ROUNDED_CACHE_PREFILL.value


def _kernels(layer: Layer) -> float:
    """Kernels of a layer beside those of a plain one: of experts, and of a state that is updated."""
    experts = assumptions.MOE_LAYERS.value if layer.expert_bytes else 0.0
    return 1.0 + experts + (assumptions.RECURRENT_LAYERS.value if layer.state_bytes else 0.0)


def _updated_ms(layer: Layer, device: Device) -> float:
    """Of a token of a prompt: its state is decayed, multiplied and added to."""
    flops = _STATE_FLOPS * layer.state_bytes / 4
    return flops / (_tflops(device, is_16_bit=True) * assumptions.RECURRENT_SHARE.value * 1e9)


def _tflops(device: Device, *, is_16_bit: bool) -> float:
    known = device.tflops_16 if is_16_bit else device.tflops
    return known or device.bandwidth_gb_s * assumptions.GPU_GFLOPS_A_GB_S.value / 1000


def weight_bytes(model: Model) -> float:
    """Mean bytes of a weight in all matrices that are named; of a header that names none as of Q4_K."""
    known = [m for m in model.matrices if m.type_name in _TYPE_BYTES]
    weights = sum(m.size_bytes / _TYPE_BYTES[m.type_name] for m in known)
    return sum(m.size_bytes for m in known) / weights if weights else _TYPE_BYTES["Q4_K"]


def _weight_bytes(model: Model, *, is_bank: bool) -> float:
    of = [m for m in model.matrices if m.is_bank == is_bank and m.type_name in _TYPE_BYTES]
    weights = sum(m.size_bytes / _TYPE_BYTES[m.type_name] for m in of)
    return sum(m.size_bytes for m in of) / weights if weights else _TYPE_BYTES["Q4_K"]


def _ms(size: float, gb_s: float) -> float:
    return size / (gb_s * 1e6)
