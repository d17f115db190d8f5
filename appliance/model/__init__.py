"""Step 1: what model this is, from its header alone."""

from __future__ import annotations

from pathlib import Path

from appliance.model.digest import ModelDigest, digest
from appliance.model.facts import Layer, LayerKind, Model, parse_facts
from appliance.model.find import list_models, resolve_model
from appliance.model.parts import plain_name, read_whole

__all__ = [
    "Layer",
    "LayerKind",
    "Model",
    "ModelDigest",
    "digest",
    "list_models",
    "plain_name",
    "read_model",
    "resolve_model",
]


def read_model(path: Path) -> Model:
    """Raises ModelUnreadableError for whatever is not a whole GGUF file, or all parts of one, of a language model."""
    return parse_facts(read_whole(path))
