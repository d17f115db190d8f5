"""How long a layer takes, from bandwidths: a chat job on the GPU, on the CPU, or with experts on the CPU.

Decode reads every weight of a layer once a token, of routed experts those that are used, and the cache as deep as it is
filled. Prefill reads them once a batch. Weights in host memory are copied to a GPU for a batch of 32 tokens or more
(llama.cpp's op-offload), one copy after the other with the work, so the times add up. Whole picoseconds, so that sums
are the same in whatever order they are taken.
"""

from __future__ import annotations

from appliance.engines.llama.planning import assumptions
from appliance.engines.llama.planning.devices import Device
from appliance.engines.llama.planning.memory import KV_BYTES
from appliance.model import Layer, Model
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Speed
from appliance.values import dataclass

DEPTH = CHAT_TOKENS_IN + CHAT_TOKENS_OUT // 2
PS = 10**12
HOP_PS = int(assumptions.HOP_US.value * 10**6)
LAYER = int(assumptions.LAYER_US.value * 10**6)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Picoseconds a token."""

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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What layers of one model are timed by. `upload` is the GPU that host weights are copied to for a batch."""

    model: Model
    kv_type: str
    ubatch: int
    dram_gb_s: float
    upload: Device | None

    def on_gpu(self, layer: Layer, device: Device) -> Cost:
        read = _ps(self._dense(layer) + self._used(layer), device.bandwidth_gb_s)
        return _batched(read, assumptions.PREFILL_GAIN_GPU.value) + Cost(decode=LAYER)

    def experts_on_cpu(self, layer: Layer, device: Device) -> Cost:
        """The layer on a GPU, its routed experts in host memory."""
        dense = _batched(_ps(self._dense(layer), device.bandwidth_gb_s), assumptions.PREFILL_GAIN_GPU.value)
        experts = _ps(self._used(layer), self.dram_gb_s)
        return dense + Cost(decode=experts + LAYER + HOP_PS, prefill=self._copied(self._touched(layer)))

    def on_cpu(self, layer: Layer) -> Cost:
        weights = layer.dense_bytes + 2 * layer.state_bytes + self._used(layer)
        depth = min(DEPTH, layer.window or DEPTH)
        cache = cache_on_cpu(layer.k_elements + layer.v_elements, self.kv_type)
        decode, prefill = (_ps(weights + depth * each, self.dram_gb_s) for each in cache)
        if self.upload is None:
            return Cost(decode=decode, prefill=round(prefill / assumptions.PREFILL_GAIN_CPU.value))
        return Cost(decode=decode, prefill=self._copied(layer.dense_bytes + self._touched(layer)))

    def output(self, gb_s: float) -> Cost:
        """Logits are made for one token of a prompt: nothing to speak of in prefill."""
        return Cost(decode=_ps(self.model.output_bytes, gb_s))

    def _dense(self, layer: Layer) -> float:
        kept = (layer.k_elements + layer.v_elements) * min(DEPTH, layer.window or DEPTH) * KV_BYTES[self.kv_type]
        return layer.dense_bytes + kept + 2 * layer.state_bytes  # a state is read and written

    def _used(self, layer: Layer) -> float:
        return used_bytes(self.model, layer)

    def _touched(self, layer: Layer) -> float:
        return touched_bytes(self.model, layer, min(self.ubatch, CHAT_TOKENS_IN))

    def _copied(self, size: float) -> int:
        if self.upload is None or not size:
            return 0
        batch = min(self.ubatch, CHAT_TOKENS_IN)
        worked = _ps(size / assumptions.PREFILL_GAIN_GPU.value, self.upload.bandwidth_gb_s)
        return _ps(size / batch, self.upload.upload_gb_s) + worked // batch


def used_bytes(model: Model, layer: Layer) -> float:
    """Of its routed experts, those that one token uses."""
    return layer.expert_bytes * model.experts_used / model.experts if model.experts else 0.0


def touched_bytes(model: Model, layer: Layer, batch: int) -> float:
    """Every expert that one of a batch's tokens uses, were they drawn evenly."""
    if not model.experts:
        return 0.0
    unused = (1 - model.experts_used / model.experts) ** batch
    return layer.expert_bytes * (1 - unused)


def cache_on_cpu(values: float, kv_type: str) -> tuple[float, float]:
    """Bytes for each token in the cache, as a decoded token and as one of a prompt spend time on them. A rounded cache
    is smaller than f16, and slower all the same."""
    if KV_BYTES[kv_type] >= KV_BYTES["f16"]:
        return values * KV_BYTES[kv_type], values * KV_BYTES[kv_type]
    exact = values * KV_BYTES["f16"]
    return exact * assumptions.ROUNDED_CACHE_DECODE.value, exact * assumptions.ROUNDED_CACHE_PREFILL.value


def _batched(read: int, gain: float) -> Cost:
    return Cost(decode=read, prefill=round(read / gain))


def _ps(size: float, gb_s: float) -> int:
    return round(size * 1000 / gb_s)
