"""Routes of vLLM that clients may use. Data only.

The engine announces more routes, which are not forwarded: `/invocations` and `/ping` (inference without a check of the
API key), `/generative_scoring`, `/scale_elastic_ep`, `/inference/v1/*`, `*/render`, `*/derender`, `/load`,
`/kv_event_sources`, its documentation, and its development mode. The gateway itself answers the list of models.
"""

from __future__ import annotations

import re
from functools import partial

from appliance.engine_route import EngineRoute
from appliance.engines.routes import BARE, post
from appliance.engines.vllm.api.bodies import fault

METRICS_PATH = "/metrics"  # of vLLM's server, not of the gateway
_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)

_post = partial(post, fault=fault)  # not for uploads: their bodies are not JSON

ROUTES: tuple[EngineRoute, ...] = (
    *_post("/v1/chat/completions", also=BARE, can_stream=True),
    *_post("/v1/completions", also=BARE, can_stream=True),
    *_post("/v1/responses", also=BARE, can_stream=True),
    *_post("/v1/messages", dialect="anthropic", can_stream=True),
    *_post("/v1/messages/count_tokens", dialect="anthropic", needs_model=False),
    *_post("/v1/embeddings", also=BARE, only_for_embedders=True),
    *_post("/v1/rerank", also=BARE, only_for_embedders=True),
    *_post("/v1/score", also=BARE, only_for_embedders=True),
    *post("/v1/audio/transcriptions", also=BARE, can_stream=True),
    *post("/v1/audio/translations", also=BARE, can_stream=True),
    *_post("/tokenize", needs_model=False),
    *_post("/detokenize", needs_model=False),
)


def parse_kv_use(answer: bytes) -> float:
    """Return the share of KV blocks in use, 0 to 1, from the metrics; of several engines, the fullest one's. Raises
    ValueError if the metrics lack it."""
    if not (found := _KV_USE.findall(answer)):
        message = f"{METRICS_PATH} tells of no KV cache: {answer[:100]!r}"
        raise ValueError(message)
    return min(max(map(float, found)), 1.0)
