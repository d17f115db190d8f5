"""Models in the words of Ollama's API. Fields without a known value are left out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import ListedModel

Document = dict[str, Any]


def tag(model: ListedModel) -> Document:
    """Return a model's entry in /api/tags."""
    return _known({
        "name": model.id,
        "model": model.id,
        "modified_at": _date(model.created_s),
        "size": model.size_bytes,
        "digest": digest(model),
        "details": details(model),
    })  # fmt: skip


def running(model: ListedModel) -> Document:
    """Return a model's entry in /api/ps. `size_vram` is left out, since the gateway does not know it; so is
    `expires_at`, since the model stays."""
    return _known({
        "name": model.id,
        "model": model.id,
        "size": model.size_bytes,
        "digest": digest(model),
        "details": details(model),
        "context_length": model.context,
    })  # fmt: skip


def shown(model: ListedModel) -> Document:
    """Return the answer of /api/show."""
    architecture = model.architecture or "unknown"
    # Clients take `context_length` for what a request may use, so it is not the native one.
    context = model.context or model.native_context
    return _known({
        "modified_at": _date(model.created_s),
        "parameters": f"num_ctx {model.context}" if model.context else "",
        "details": details(model),
        "capabilities": capabilities(model),
    }) | {"model_info": _known({
        "general.architecture": architecture,
        "general.parameter_count": model.parameters,
        f"{architecture}.context_length": context,
        f"{architecture}.embedding_length": model.embedding_length,
    })}  # fmt: skip


def details(model: ListedModel) -> Document:
    """Return the facts of the model's file."""
    billions = f"{model.parameters / 1e9:.1f}B" if model.parameters else ""
    return {
        "parent_model": "",
        "format": model.format,
        "family": model.architecture,
        "families": [model.architecture] if model.architecture else [],
        "parameter_size": billions,
        "quantization_level": model.quantization,
    }


def capabilities(model: ListedModel) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    if model.is_embedding:
        return ["rerank" if model.is_reranker else "embedding"]
    others = (
        ("tools", model.calls_tools),
        ("thinking", model.reasons),
        ("vision", "image" in model.input_modalities),
    )
    return ["completion", *(name for name, is_there in others if is_there)]


def digest(model: ListedModel) -> str:
    """Return 64 hexadecimal digits that tell this model from others: of its facts, not of its file, whose hash would
    take minutes. Ollama's own command line needs at least 12 digits."""
    facts = (model.id, model.format, model.architecture, model.quantization, model.size_bytes, model.parameters)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _date(seconds: int) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z") if seconds else None


def _known(fields: Mapping[str, Any]) -> Document:
    return {name: value for name, value in fields.items() if value is not None and value != ""}
