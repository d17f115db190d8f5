"""Which of vLLM's routes a client may use: data.

Not among them, though the engine announces them on every start: `/invocations` and `/ping` (inference that no key
guards), `/generative_scoring`, `/scale_elastic_ep`, `/inference/v1/*`, `*/render`, `*/derender`, `/load`,
`/kv_event_sources`, its documentation, and all of its development mode. The list of models is the gateway's own.
"""

from __future__ import annotations

import re
from functools import partial

from appliance.engine_route import EngineRoute
from appliance.engines.routes import BARE, post
from appliance.engines.vllm.api.bodies import fault

METRICS_PATH = "/metrics"  # of its own server; the gateway's is another one
_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)

_post = partial(post, fault=fault)  # not for uploads, which are no JSON

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
    """Of its metrics: the share of blocks that requests hold, of the fullest engine where there are several. Raises
    ValueError."""
    if not (found := _KV_USE.findall(answer)):
        message = f"{METRICS_PATH} tells of no KV cache: {answer[:100]!r}"
        raise ValueError(message)
    return min(max(map(float, found)), 1.0)
