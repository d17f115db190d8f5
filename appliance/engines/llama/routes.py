"""Which of llama-server's routes and request headers a client may use: data."""

from __future__ import annotations

from appliance.engine_route import Dialect, EngineRoute


def _post(
    path: str, *, bare: bool = False, dialect: Dialect = "openai", can_stream: bool = False
) -> tuple[EngineRoute, ...]:
    """`path`, and with `bare` also the same without /v1 for clients whose base URL lacks it."""
    spellings = (path, path.removeprefix("/v1")) if bare else (path,)
    return tuple(
        EngineRoute(path=spelling, upstream=path, dialect=dialect, can_stream=can_stream) for spelling in spellings
    )


# llama-server's own /completions and /embeddings are older forms with other replies than OpenAI's, so every bare path
# is asked for under /v1. There is no /v1/models/{id}: the engine has none.
ROUTES: tuple[EngineRoute, ...] = (
    *_post("/v1/chat/completions", bare=True, can_stream=True),
    *_post("/v1/completions", bare=True, can_stream=True),
    *_post("/v1/responses", bare=True, can_stream=True),
    *_post("/v1/embeddings", bare=True),
    EngineRoute(path="/v1/models", upstream="/v1/models", methods=("GET",), is_work=False),
    EngineRoute(path="/models", upstream="/v1/models", methods=("GET",), is_work=False),
    *_post("/v1/messages", dialect="anthropic", can_stream=True),
    *_post("/v1/messages/count_tokens", dialect="anthropic"),
    *_post("/v1/chat/completions/input_tokens", bare=True),
    *_post("/v1/responses/input_tokens", bare=True),
    *_post("/v1/rerank", bare=True),
    *_post("/v1/reranking", bare=True),
    *_post("/v1/audio/transcriptions", bare=True),
    *_post("/tokenize"),
    *_post("/detokenize"),
    *_post("/apply-template"),
    *_post("/infill", can_stream=True),
)

# llama-server keeps generating for such a conversation after its client has left (server-stream.cpp), and the routes to
# come back to it are not among the above: a disconnect would hold the slot to the end.
DROPPED_HEADERS = frozenset({b"x-conversation-id"})
