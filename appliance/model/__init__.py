"""Step 1: what model this is, from its header alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.errors import ModelUnreadableError
from appliance.model.digest import ModelDigest, digest
from appliance.model.draft import read_draft
from appliance.model.facts import Format, Matrices, Model, RopeScaling, parse_facts
from appliance.model.find import find_model, find_projector, is_folder_model, list_models, only_model, resolve_model
from appliance.model.folder import read_folder
from appliance.model.gguf import read_gguf
from appliance.model.parts import plain_name, read_whole
from appliance.model.stack import Layer, LayerKind

__all__ = [
    "Format",
    "Layer",
    "LayerKind",
    "Matrices",
    "Model",
    "ModelDigest",
    "RopeScaling",
    "digest",
    "find_model",
    "list_models",
    "only_model",
    "plain_name",
    "read_draft",
    "read_model",
    "resolve_model",
]


def read_model(path: Path, *, serves: Format = "gguf") -> Model:
    """Raises ModelUnreadableError for whatever is not a whole language model of the format that this image `serves`."""
    if not is_folder_model(path):
        return _with_projector(parse_facts(read_whole(path)))
    model = read_folder(path)
    if serves != "safetensors":
        message = f"model is of another format than this image serves: {path}: safetensors ({model.quantization})"
        hint = "give the model as a GGUF file; folders of safetensors are served by the images whose name begins vllm-"
        raise ModelUnreadableError(message, hint=hint)
    return model


def _with_projector(model: Model) -> Model:
    """A projector is named, not loaded; one that cannot be read is as none, since the model can do without."""
    path = find_projector(model.path)
    if path is None:
        return model
    try:
        gguf = read_gguf(path)
    except ModelUnreadableError:
        return model
    if gguf.metadata.get("general.architecture") != "clip":
        return model
    return replace(model, projector=path)
