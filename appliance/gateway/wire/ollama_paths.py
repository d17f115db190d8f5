"""Paths of Ollama's API. Data, imported at every start; everything else of that API is imported with its first
request."""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "0.12.11"
"""Release of Ollama whose API is answered: the one that introduced `logprobs`. Clients compare it with the release that
they need."""

CHAT, GENERATE, EMBED, EMBEDDINGS = "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"
TAGS, PS, SHOW, VERSION_PATH = "/api/tags", "/api/ps", "/api/show", "/api/version"
BLOBS = "/api/blobs/"

WORK = (CHAT, GENERATE, EMBED, EMBEDDINGS)
"""Paths that need the model."""

FREE = (TAGS, PS, SHOW, VERSION_PATH)
"""Paths that say what is served."""

METHODS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(WORK, ("POST",)),
    TAGS: ("GET",),
    PS: ("GET",),
    VERSION_PATH: ("GET",),
    SHOW: ("POST",),
    "/api/pull": ("POST",),
    "/api/push": ("POST",),
    "/api/create": ("POST",),
    "/api/copy": ("POST",),
    "/api/delete": ("DELETE",),
}


def is_ollama(path: str) -> bool:
    """True if the path is one of Ollama's API."""
    return path in METHODS or path.startswith(BLOBS)
