"""Which of llama-server's routes and request headers a client may use: data."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from appliance.engine_route import EngineRoute
from appliance.engines.routes import BARE, post

SLOTS_PATH = "/slots"
"""The gateway's own: clients do not reach it."""

CROWDED = b"Context size has been exceeded."
"""All that run are ended with it, status 500, where slots share one context and it is full (server-context.cpp,
`llama_decode` returned 1 for a single token). A request too long for itself is a 400, or ends by length."""

_LM_STUDIO = ("", "/api/v0")  # and for those of LM Studio's own API
_post = partial(post, crowded=CROWDED)

# llama-server's own /completions and /embeddings are older forms with other replies than OpenAI's, so every bare path
# is asked for under /v1. The list of models is the gateway's own.
ROUTES: tuple[EngineRoute, ...] = (
    *_post("/v1/chat/completions", also=_LM_STUDIO, can_stream=True),
    *_post("/v1/completions", also=_LM_STUDIO, can_stream=True),
    *_post("/v1/responses", also=BARE, can_stream=True),
    *_post("/v1/embeddings", also=_LM_STUDIO, not_for_rerankers=True),  # the score as a vector of one number
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

# llama-server keeps generating for such a conversation after its client has left (server-stream.cpp), and the routes to
# come back to it are not among the above: a disconnect would hold the slot to the end.
DROPPED_HEADERS = frozenset({b"x-conversation-id"})


def parse_kv_use(answer: bytes, context: int) -> float:
    """Of `/slots`: tokens in the slots that work, as a share of the one KV cache that all slots have. What idle slots
    keep is given up for whoever needs the room. Raises ValueError."""
    slots = json.loads(answer)
    try:
        tokens: int = sum(slot.get("n_prompt_tokens", 0) for slot in slots if slot["is_processing"])
    except (AttributeError, KeyError, TypeError) as error:
        message = f"{SLOTS_PATH} tells of no slots: {answer[:100]!r}"
        raise ValueError(message) from error
    return min(float(tokens) / context, 1.0)


def parse_work(answer: bytes) -> tuple[object, ...]:
    """Return each slot's task, and how many tokens it has read and made, by an answer of `/slots` (server-context.cpp,
    `server_slot::to_json`). Raises ValueError."""
    try:
        return tuple(
            (slot.get("id_task"), slot.get("n_prompt_tokens_processed"), slot.get("n_prompt_tokens"), _made(slot))
            for slot in json.loads(answer)
        )
    except (AttributeError, LookupError, TypeError) as error:
        message = f"{SLOTS_PATH} tells of no slots: {answer[:100]!r}"
        raise ValueError(message) from error


def _made(slot: dict[str, Any]) -> int | None:
    """Return the number of tokens that it has made; None before its first task."""
    said = slot.get("next_token")
    return said[0].get("n_decoded") if said else None
