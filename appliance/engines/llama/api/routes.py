"""llama-server's routes that clients may use, and request headers that are dropped. Data."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

from appliance.engine_route import EngineRoute
from appliance.engines.routes import BARE, post

SLOTS_PATH = "/slots"
"""Used by the gateway only; clients have no route to it."""

METRICS_PATH = "/metrics"  # of llama-server, not of the gateway
_COUNTS = re.compile(rb"^llamacpp:((?:prompt_disk|moe)_\w+) ([0-9.e+-]+)$", re.MULTILINE)

CROWDED = b"Context size has been exceeded."
"""Text of the status 500 that ends all running requests when the context that slots share is full (server-context.cpp,
`llama_decode` returned 1 for a single token). A request that alone exceeds the context gets 400, or ends by length."""

_LM_STUDIO = ("", "/api/v0")  # other prefixes of the same route: none, and that of LM Studio's own API
_post = partial(post, crowded=CROWDED)

# llama-server's own /completions and /embeddings are older forms whose replies differ from OpenAI's, so every path
# without /v1 is forwarded to the one with /v1. The gateway answers the list of models itself.
ROUTES: tuple[EngineRoute, ...] = (
    *_post("/v1/chat/completions", also=_LM_STUDIO, can_stream=True),
    *_post("/v1/completions", also=_LM_STUDIO, can_stream=True),
    *_post("/v1/responses", also=BARE, can_stream=True),
    *_post("/v1/embeddings", also=_LM_STUDIO, not_for_rerankers=True),  # a reranker's vector is one number, its score
    *_post("/v1/messages", dialect="anthropic", can_stream=True),
    *_post("/v1/messages/count_tokens", dialect="anthropic", needs_model=False),
    *_post("/v1/chat/completions/input_tokens", also=BARE, needs_model=False),
    *_post("/v1/responses/input_tokens", also=BARE, needs_model=False),
    *_post("/v1/rerank", also=BARE),
    *_post("/v1/reranking", also=BARE),
    *_post("/v1/audio/transcriptions", also=BARE),
    *_post("/tokenize", needs_model=False),
    *_post("/detokenize", needs_model=False),
    *_post("/apply-template", needs_model=False),
    *_post("/infill", can_stream=True),
)

# With this header llama-server keeps generating after its client has disconnected (server-stream.cpp). The routes to
# resume such a stream are not offered, so a disconnect would occupy the slot to the end.
DROPPED_HEADERS = frozenset({b"x-conversation-id"})


def parse_kv_use(answer: bytes, context: int) -> float:
    """Return the used share of the KV cache, 0 to 1, from an answer of `/slots`. Raises ValueError if it is malformed.

    All slots share one KV cache. Only tokens of busy slots count: those of idle slots are given up when needed.
    """
    slots = json.loads(answer)
    try:
        tokens: int = sum(slot.get("n_prompt_tokens", 0) for slot in slots if slot["is_processing"])
    except (AttributeError, KeyError, TypeError) as error:
        message = f"{SLOTS_PATH} has an unexpected form: {answer[:100]!r}"
        raise ValueError(message) from error
    return min(float(tokens) / context, 1.0)


def parse_counts(answer: bytes) -> dict[str, float]:
    """Return the counts of prompts on disk and of slots of experts, by name; empty if the engine has neither.

    Raises ValueError if it is malformed.
    """
    return {name.decode(): float(value) for name, value in _COUNTS.findall(answer)}


def parse_work(answer: bytes) -> tuple[object, ...]:
    """Return each slot's task, and the numbers of tokens that it has read and made, from an answer of `/slots`.

    The form is that of server-context.cpp, `server_slot::to_json`. Raises ValueError if it is malformed.
    """
    try:
        return tuple(
            (slot.get("id_task"), slot.get("n_prompt_tokens_processed"), slot.get("n_prompt_tokens"), _made(slot))
            for slot in json.loads(answer)
        )
    except (AttributeError, LookupError, TypeError) as error:
        message = f"{SLOTS_PATH} has an unexpected form: {answer[:100]!r}"
        raise ValueError(message) from error


def _made(slot: dict[str, Any]) -> int | None:
    """Return the number of tokens that a slot has made; None before its first task."""
    said = slot.get("next_token")
    return said[0].get("n_decoded") if said else None
