"""Result of a quality check: whether a small KV cache type is harmless for one model."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class KvCheck:
    """Result of the quality check of a KV cache type for one model. If the check failed, the figures are None."""

    kv_type: str
    is_accepted: bool
    why: str
    tokens: int = 0  # scored tokens in each of the two runs
    chunks: int = 0
    # Mean nats of a token, less those with f16 over the same tokens; e^difference is the ratio of the perplexities.
    difference: float | None = None
    standard_error: float | None = None  # of the difference
    seconds: float = 0.0
