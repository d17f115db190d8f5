"""What work the server has done, by its metrics: whether the kind that takes most memory of a GPU, and whether any."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.engines.vllm.cache_config import ask_metrics
from appliance.engines.vllm.planning.arguments.launch import launch_of
from appliance.plan import Plan

# One prompt filled a step, and requests came in number, so that what is allocated at the first of a kind was.
REQUESTS_MIN = 20
MOST_OF_A_STEP = 0.9
# Histogram over requests: tokens of the prompt that were computed, in buckets of 1, 2, 5, 10, … (v1/metrics/loggers.py)
_NUMBER = rb"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_BUCKET = re.compile(
    rb'^vllm:request_prefill_kv_computed_tokens_bucket\{[^}]*le="(\+Inf|%b)"[^}]*\} (%b)$' % (_NUMBER, _NUMBER), re.M
)


# What any step changes: blocks that requests hold, tokens of prompts that were read, tokens that were made
# (v1/metrics/loggers.py).
_WORK = re.compile(rb"^vllm:(?:kv_cache_usage_perc|prompt_tokens_total|generation_tokens_total)\{.*$", re.M)


async def query_work(socket_path: Path) -> tuple[bytes, ...] | None:
    """Return what differs once it has worked on requests; None if it does not tell."""
    return parse_work(await ask_metrics(socket_path)) or None


def parse_work(answer: bytes) -> tuple[bytes, ...]:
    """Return the figures that any step changes; empty if the metrics have none."""
    return tuple(_WORK.findall(answer))


def has_filled_a_step(answer: bytes, plan: Plan) -> bool:
    """After REQUESTS_MIN answers, one of which was to a prompt that needed MOST_OF_A_STEP of the tokens of a step. Of a
    plan that reads images never: nothing tells whether one came. `answer` is that of the metrics."""
    if launch_of(plan).sees:
        return False
    below: dict[float, float] = {}  # by the largest number of tokens that a bucket counts; engines are added up
    for edge, count in _BUCKET.findall(answer):
        below[float(edge)] = below.get(float(edge), 0.0) + float(count)
    requests = max(below.values(), default=0.0)
    wanted = MOST_OF_A_STEP * launch_of(plan).max_num_batched_tokens
    longer = min((edge for edge in below if edge >= wanted), default=None)
    return requests >= REQUESTS_MIN and longer is not None and below[longer] < requests
