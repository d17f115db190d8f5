"""What a plan is predicted to cost, by the part of the machine that spends it: pure, from bandwidths alone.

The same roofline as speed.py, which adds it up for one chat job; here the parts stay apart, since each is off by a
factor of its own that measuring finds (tune/refit.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.engines.llama.planning import assumptions
from appliance.engines.llama.planning.devices import Device
from appliance.engines.llama.planning.memory import KV_BYTES, layers_of
from appliance.engines.llama.planning.placement import Machine
from appliance.engines.llama.planning.speed import cache_on_cpu, touched_bytes, used_bytes
from appliance.model import Layer, Model
from appliance.plan import CHAT_TOKENS_IN, Costs, Placement
from appliance.values import dataclass

CPU_FIXED_MS = 0.2  # a token's kernels on a CPU that start one after the other, and its sampling: chosen


def costs_of(model: Model, placement: Placement, machine: Machine, kv_type: str, ubatch: int) -> Costs:
    """With every core at work: what fewer threads cost is `with_threads`."""
    parts = _Parts(model=model, machine=machine, kv_type=kv_type, batch=min(ubatch, CHAT_TOKENS_IN))
    total = sum(parts.of(placement), Costs())
    growing = [layer for layer in layers_of(model) if layer.k_elements and layer.window is None and not layer.is_draft]
    windows = [layer.window for layer in layers_of(model) if layer.window]
    return replace(total, window=None if growing or not windows else max(windows))


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
    weights_bytes: float, cache_values: float, kv_type: str, dram_gb_s: float, *, window: int | None = None
) -> Costs:
    """Of layers whose prompts are read by the CPU as well: so many bytes of weights a token, and so many values of the
    cache for each token in it."""
    decode_bytes, prefill_bytes = cache_on_cpu(cache_values, kv_type)
    gain = assumptions.PREFILL_GAIN_CPU.value
    held = window or 0
    return Costs(
        cpu_ms=_ms(weights_bytes + held * decode_bytes, dram_gb_s),
        cpu_depth_us=0.0 if window else 1000 * _ms(decode_bytes, dram_gb_s),
        cpu_prefill_ms=_ms(weights_bytes + held * prefill_bytes, dram_gb_s) / gain,
        prefill_depth_us=0.0 if window else 1000 * _ms(prefill_bytes, dram_gb_s) / gain,
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    model: Model
    machine: Machine
    kv_type: str
    batch: int

    def of(self, placement: Placement) -> Iterator[Costs]:
        layers = layers_of(self.model)
        devices = {device.id: device for device in self.machine.devices}
        used = [devices[share.id] for share in placement.shares]
        upload = used[0] if used else None
        on_cpu = placement.cpu_layers if used else len(layers)
        for layer in layers[:on_cpu]:
            if not layer.is_draft:
                yield self._on_cpu(layer, upload)
        at = on_cpu
        for device, share in zip(used, placement.shares, strict=True):
            for number in range(at, min(at + share.layers, len(layers))):
                if not layers[number].is_draft:
                    yield self._on_gpu(layers[number], device, used[0], number < placement.cpu_expert_layers)
            if at:
                yield Costs(fixed_ms=assumptions.HOP_US.value / 1000)
            at += share.layers
        if used and at > len(layers):
            yield Costs(gpu_ms=_ms(self.model.output_bytes, used[-1].bandwidth_gb_s))
        else:
            yield Costs(cpu_ms=_ms(self.model.output_bytes, self.machine.dram_gb_s), fixed_ms=CPU_FIXED_MS)

    def _on_cpu(self, layer: Layer, upload: Device | None) -> Costs:
        weights = layer.dense_bytes + 2 * layer.state_bytes + self._used(layer)
        values = layer.k_elements + layer.v_elements
        costs = cpu_costs(weights, values, self.kv_type, self.machine.dram_gb_s, window=layer.window)
        if upload is None:
            return costs
        copied = self._copied(layer.dense_bytes + self._touched(layer), upload)
        return Costs(cpu_ms=costs.cpu_ms, cpu_depth_us=costs.cpu_depth_us) + copied

    def _on_gpu(self, layer: Layer, device: Device, upload: Device, experts_on_cpu: bool) -> Costs:
        gb_s, gain = device.bandwidth_gb_s, assumptions.PREFILL_GAIN_GPU.value
        is_apart = experts_on_cpu and layer.expert_bytes
        read = _ms(self._read(layer) + (0.0 if is_apart else self._used(layer)), gb_s)
        depth_us = self._depth_us(layer, gb_s)
        costs = Costs(
            gpu_ms=read,
            fixed_ms=assumptions.LAYER_US.value / 1000,
            gpu_depth_us=depth_us,
            gpu_prefill_ms=read / gain,
            prefill_depth_us=depth_us / gain,
        )
        if not is_apart:
            return costs
        hop = assumptions.HOP_US.value / 1000
        experts = Costs(cpu_ms=_ms(self._used(layer), self.machine.dram_gb_s), fixed_ms=hop)
        return costs + experts + self._copied(self._touched(layer), upload)

    def _copied(self, size: float, upload: Device) -> Costs:
        """Host weights are copied for a batch, and then worked with."""
        worked = _ms(size / assumptions.PREFILL_GAIN_GPU.value, upload.bandwidth_gb_s)
        return Costs(copy_ms=_ms(size, upload.upload_gb_s), gpu_prefill_ms=worked / self.batch)

    def _read(self, layer: Layer) -> float:
        """Of the layer itself, its state read and written, and of a sliding window all that it can hold."""
        kept = self._cache_bytes(layer) * layer.window if layer.window else 0.0
        return layer.dense_bytes + 2 * layer.state_bytes + kept

    def _depth_us(self, layer: Layer, gb_s: float) -> float:
        return 0.0 if layer.window else 1000 * _ms(self._cache_bytes(layer), gb_s)

    def _cache_bytes(self, layer: Layer) -> float:
        return (layer.k_elements + layer.v_elements) * KV_BYTES[self.kv_type]

    def _used(self, layer: Layer) -> float:
        return used_bytes(self.model, layer)

    def _touched(self, layer: Layer) -> float:
        return touched_bytes(self.model, layer, self.batch)


def _ms(size: float, gb_s: float) -> float:
    return size / (gb_s * 1e6)
