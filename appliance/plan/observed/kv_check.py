"""Whether a KV cache type of few bits is harmless for one model: what a check of it found."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class KvCheck:
    """Whether a type of the cache is harmless for one model. Without figures it could not be measured: `why` says why.

    `difference` and `standard_error` are of nats for each token, against f16 over the same `tokens`; its exponential is
    the ratio of the perplexities.
    """

    kv_type: str
    is_accepted: bool
    why: str
    tokens: int = 0  # that were foretold, in each of the two runs
    chunks: int = 0
    difference: float | None = None
    standard_error: float | None = None
    seconds: float = 0.0
