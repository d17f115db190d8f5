"""Which routes of the engine a client may reach: an allowlist, as data.

A request is matched by its whole decoded path, and the engine is asked for `upstream`, a constant: nothing of a
client's path ever reaches the engine, so `//slots`, `%2e%2e/props` or a trailing slash can only be a 404 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dialect = Literal["openai", "anthropic"]
"""How an error inside a stream is written so that the SDK of that API sees it."""


@dataclass(frozen=True, kw_only=True)
class EngineRoute:
    path: str
    upstream: str
    methods: tuple[str, ...] = ("POST",)
    dialect: Dialect = "openai"
    can_stream: bool = False  # with `"stream": true` the engine answers with server-sent events
    is_work: bool = True  # False: it asks for a fact, which says nothing of somebody using the model


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
ENGINE_ROUTES: tuple[EngineRoute, ...] = (
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

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Answered without a key: a health check has none."""
