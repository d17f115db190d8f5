"""Memory that an engine allocated, to compare with a plan's prediction."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """Memory that the engine says it allocated, MiB: the sum over its buffers of each kind."""

    model: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    output: float = 0.0
    recurrent: float = 0.0  # recurrent states
    repacked: float = 0.0  # the part of `model` that the CPU backend copied
    kv_tokens: int = 0  # tokens that the KV cache holds for all requests together; 0: the engine does not tell
    devices: tuple[tuple[str, float], ...] = ()  # the engine's name of each GPU, and the sum over its buffers

    @property
    def total(self) -> float:
        return self.model + self.kv + self.compute + self.output + self.recurrent
