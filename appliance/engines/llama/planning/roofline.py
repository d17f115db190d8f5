"""What layers cost, from bandwidths alone: on a GPU, on the CPU, or on a GPU with their experts on the CPU. Pure.

Decode reads every weight of a layer once a token, of routed experts those that are used, and the cache as deep as it is
filled. Prefill reads them once a batch. Weights in host memory are copied to a GPU for a batch of 32 tokens or more
(llama.cpp's op-offload), one copy after the other with the work, so the times add up.

The parts stay apart in `Costs`, since each is off by a factor of its own that measuring finds (tune/refit.py); `Cost`
adds them up for the chat job that placements are compared by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.llama.planning import assumptions
from appliance.engines.llama.planning.memory import KV_BYTES, layers_of
from appliance.engines.llama.planning.tensor_mode import TENSOR, as_one_card, exchanged
from appliance.model import Layer, Model
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Costs, Device, Placement, Speed
from appliance.values import dataclass

DEPTH = CHAT_TOKENS_IN + CHAT_TOKENS_OUT // 2
PS = 10**12
HOP_MS = assumptions.HOP_US.value / 1000
LAYER_MS = assumptions.LAYER_US.value / 1000
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

    def job(self, costs: Costs) -> Cost:
        """Of costs at a depth."""
        prefill_ms = costs.gpu_prefill_ms + costs.cpu_prefill_ms + costs.copy_ms / self._batch
        decode_ms = costs.gpu_ms + costs.cpu_ms + costs.fixed_ms
        return Cost(decode=round(decode_ms * 1e9), prefill=round(prefill_ms * 1e9))

    def on_gpu(self, layer: Layer, device: Device) -> Costs:
        return self._dense_on_gpu(layer, device, self._used(layer))

    def experts_on_cpu(self, layer: Layer, device: Device) -> Costs:
        """The layer on a GPU, its routed experts in host memory."""
        if not layer.expert_bytes:
            return self.on_gpu(layer, device)
        experts = Costs(cpu_ms=_ms(self._used(layer), self.dram_gb_s), fixed_ms=HOP_MS)
        return self._dense_on_gpu(layer, device, 0.0) + experts + self._copied(self._touched(layer))

    def on_cpu(self, layer: Layer) -> Costs:
        weights = layer.dense_bytes + 2 * layer.state_bytes + self._used(layer)
        values = layer.k_elements + layer.v_elements
        held = self._held(layer)
        costs = cpu_costs(weights, values, self.kv_type, self.dram_gb_s, held=held, grows=self._grows(layer))
        if self.upload is None:
            return costs
        copied = self._copied(layer.dense_bytes + self._touched(layer))
        return Costs(cpu_ms=costs.cpu_ms, cpu_depth_us=costs.cpu_depth_us) + copied

    def output_on_gpu(self, device: Device) -> Costs:
        """Logits are made for one token of a prompt: nothing to speak of in prefill."""
        return Costs(gpu_ms=_ms(self.model.output_bytes, device.bandwidth_gb_s))

    def output_on_cpu(self) -> Costs:
        return Costs(cpu_ms=_ms(self.model.output_bytes, self.dram_gb_s), fixed_ms=CPU_FIXED_MS)

    def _dense_on_gpu(self, layer: Layer, device: Device, used: float) -> Costs:
        gb_s, gain = device.bandwidth_gb_s, assumptions.PREFILL_GAIN_GPU.value
        cache = (layer.k_elements + layer.v_elements) * KV_BYTES[self.kv_type]
        # A state is read and written.
        read = _ms(layer.dense_bytes + 2 * layer.state_bytes + cache * self._held(layer) + used, gb_s)
        depth_us = 1000 * _ms(cache, gb_s) if self._grows(layer) else 0.0
        return Costs(
            gpu_ms=read,
            fixed_ms=LAYER_MS,
            gpu_depth_us=depth_us,
            gpu_prefill_ms=read / gain,
            prefill_depth_us=depth_us / gain,
        )

    def _copied(self, size: float) -> Costs:
        """Host weights are copied for a batch, and then worked with."""
        if self.upload is None or not size:
            return Costs()
        worked = _ms(size / assumptions.PREFILL_GAIN_GPU.value, self.upload.bandwidth_gb_s)
        return Costs(copy_ms=_ms(size, self.upload.upload_gb_s), gpu_prefill_ms=worked / self._batch)

    def _held(self, layer: Layer) -> int:
        """Tokens of the cache that count as read."""
        if self.depth is None:
            return layer.window or 0
        return min(self.depth, layer.window or self.depth)

    def _grows(self, layer: Layer) -> bool:
        return self.depth is None and not layer.window

    @property
    def _batch(self) -> int:
        return min(self.ubatch, CHAT_TOKENS_IN)

    def _used(self, layer: Layer) -> float:
        """Bytes of its routed experts that one token uses."""
        return layer.expert_bytes * self.model.experts_used / self.model.experts if self.model.experts else 0.0

    def _touched(self, layer: Layer) -> float:
        """Bytes of every expert that one of a batch's tokens uses, were they drawn evenly."""
        if not self.model.experts:
            return 0.0
        unused = (1 - self.model.experts_used / self.model.experts) ** self._batch
        return layer.expert_bytes * (1 - unused)


def costs_of(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Costs:
    """Of a plan, with every core at work: what fewer threads cost is `with_threads`. `devices` are by id, those of the
    placement among them; the roofline is without a depth."""
    return replace(sum(_parts(roofline, placement, devices), Costs()), batch=roofline.ubatch)


def _parts(roofline: Roofline, placement: Placement, devices: dict[str, Device]) -> Iterator[Costs]:
    if placement.split_mode == TENSOR:
        yield in_parallel(roofline, placement, devices)
        return
    layers = layers_of(roofline.model)
    at = placement.cpu_layers if placement.shares else len(layers)
    yield from (roofline.on_cpu(layer) for layer in layers[:at] if not layer.is_draft)
    for share in placement.shares:
        device, end = devices[share.gpu.id], min(at + share.layers, len(layers))
        for number in range(at, end):
            is_apart = number < placement.cpu_expert_layers
            if not layers[number].is_draft:
                on = roofline.experts_on_cpu if is_apart else roofline.on_gpu
                yield on(layers[number], device)
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
    layers = (layer for layer in layers_of(roofline.model) if not layer.is_draft)
    worked = sum((roofline.on_gpu(layer, card) for layer in layers), roofline.output_on_gpu(card))
    return worked + exchanged(roofline.model, cards, roofline.ubatch)


def with_threads(costs: Costs, threads: int, cores: int) -> Costs:
    """Half of the cores saturate the memory; arithmetic takes them all. More threads than cores bring nothing."""
    decode = min(1.0, threads / max(1.0, cores / 2))
    prefill = min(threads, cores) / cores
    return replace(
        costs,
        cpu_ms=costs.cpu_ms / decode,
        cpu_depth_us=costs.cpu_depth_us / decode,
        cpu_prefill_ms=costs.cpu_prefill_ms / prefill,
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
    if KV_BYTES[kv_type] >= KV_BYTES["f16"]:
        return values * KV_BYTES[kv_type], values * KV_BYTES[kv_type]
    exact = values * KV_BYTES["f16"]
    return exact * assumptions.ROUNDED_CACHE_DECODE.value, exact * assumptions.ROUNDED_CACHE_PREFILL.value


def _ms(size: float, gb_s: float) -> float:
    return size / (gb_s * 1e6)
