"""Work that the server has done, read from its metrics: any work at all, and the work that takes most GPU memory."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.engines.vllm.cache_config import ask_metrics
from appliance.engines.vllm.planning.arguments.launch import launch_of
from appliance.plan import Plan

# Peak memory needs two things: one prompt that filled a step, and enough requests that buffers which are allocated at
# the first request of a kind exist.
REQUESTS_MIN = 20
MOST_OF_A_STEP = 0.9
# Histogram over requests: tokens of the prompt that were computed, in buckets of 1, 2, 5, 10, … (v1/metrics/loggers.py)
_NUMBER = rb"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_BUCKET = re.compile(
    rb'^vllm:request_prefill_kv_computed_tokens_bucket\{[^}]*le="(\+Inf|%b)"[^}]*\} (%b)$' % (_NUMBER, _NUMBER), re.M
)


# Figures that change with every step: KV blocks in use, prompt tokens, generated tokens (v1/metrics/loggers.py).
_WORK = re.compile(rb"^vllm:(?:kv_cache_usage_perc|prompt_tokens_total|generation_tokens_total)\{.*$", re.M)


async def query_work(socket_path: Path) -> tuple[bytes, ...] | None:
    """Return figures that differ once the server has worked on a request; None if its metrics have none."""
    return parse_work(await ask_metrics(socket_path)) or None


def parse_work(answer: bytes) -> tuple[bytes, ...]:
    """Return the figures that change with every step; empty if the metrics have none."""
    return tuple(_WORK.findall(answer))


def has_filled_a_step(answer: bytes, plan: Plan) -> bool:
    """True after REQUESTS_MIN requests including one prompt that filled MOST_OF_A_STEP of a step's tokens. Always False
    for plans that read images, since the metrics do not count images. `answer` is the text of `/metrics`."""
    if launch_of(plan).sees:
        return False
    below: dict[float, float] = {}  # requests by the bucket's upper bound in tokens, added up over engines
    for edge, count in _BUCKET.findall(answer):
        below[float(edge)] = below.get(float(edge), 0.0) + float(count)
    requests = max(below.values(), default=0.0)
    wanted = MOST_OF_A_STEP * launch_of(plan).max_num_batched_tokens
    longer = min((edge for edge in below if edge >= wanted), default=None)
    return requests >= REQUESTS_MIN and longer is not None and below[longer] < requests
