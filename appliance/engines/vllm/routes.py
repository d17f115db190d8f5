"""Which of vLLM's routes a client may use: data.

Not among them, though the engine announces them on every start: `/invocations` and `/ping` (inference that no key
guards), `/generative_scoring`, `/scale_elastic_ep`, `/inference/v1/*`, `*/render`, `*/derender`, `/load`,
`/kv_event_sources`, its documentation, and all of its development mode. The list of models is the gateway's own.
"""

from __future__ import annotations

import re

from appliance.engine_route import Dialect, EngineRoute, LoadGauges

METRICS_PATH = "/metrics"  # of its own server; the gateway's is another one
# Under the names that it has in the engine's own: balancers that know vLLM look for these.
LOAD_GAUGES = LoadGauges(
    waiting="vllm:num_requests_waiting", running="vllm:num_requests_running", kv_use="vllm:kv_cache_usage_perc"
)
_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def _post(
    path: str,
    *,
    bare: bool = False,
    dialect: Dialect = "openai",
    can_stream: bool = False,
    only_for_embedders: bool = False,
) -> tuple[EngineRoute, ...]:
    """With `bare` also without /v1, for clients whose base URL lacks it."""
    spellings = (path, path.removeprefix("/v1")) if bare else (path,)
    return tuple(
        EngineRoute(
            path=spelling,
            upstream=path,
            dialect=dialect,
            can_stream=can_stream,
            only_for_embedders=only_for_embedders,
        )
        for spelling in spellings
    )


ROUTES: tuple[EngineRoute, ...] = (
    *_post("/v1/chat/completions", bare=True, can_stream=True),
    *_post("/v1/completions", bare=True, can_stream=True),
    *_post("/v1/responses", bare=True, can_stream=True),
    *_post("/v1/messages", dialect="anthropic", can_stream=True),
    *_post("/v1/messages/count_tokens", dialect="anthropic"),
    *_post("/v1/embeddings", bare=True, only_for_embedders=True),
    *_post("/v1/rerank", bare=True, only_for_embedders=True),
    *_post("/v1/score", bare=True, only_for_embedders=True),
    *_post("/v1/audio/transcriptions", bare=True, can_stream=True),
    *_post("/v1/audio/translations", bare=True, can_stream=True),
    *_post("/tokenize"),
    *_post("/detokenize"),
)


def parse_kv_use(answer: bytes) -> float:
    """Of its metrics: the share of blocks that requests hold, of the fullest engine where there are several. Raises
    ValueError."""
    if not (found := _KV_USE.findall(answer)):
        message = f"{METRICS_PATH} tells of no KV cache: {answer[:100]!r}"
        raise ValueError(message)
    return min(max(map(float, found)), 1.0)
