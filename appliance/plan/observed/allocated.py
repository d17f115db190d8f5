"""What an engine really allocated, to hold a plan's prediction against."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """What the engine says that it allocated, in MiB: the sum over its buffers of each kind."""

    model: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    output: float = 0.0
    recurrent: float = 0.0  # states
    repacked: float = 0.0  # of `model`, what the CPU backend copied
    kv_tokens: int = 0  # that all requests together may have in the cache, exactly; 0: it does not tell
    devices: tuple[tuple[str, float], ...] = ()  # the engine's name of each GPU, and the sum over its buffers

    @property
    def total(self) -> float:
        return self.model + self.kv + self.compute + self.output + self.recurrent
