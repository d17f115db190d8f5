"""Step 1: which model this is, read from its header alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.errors import ModelUnreadableError, printable
from appliance.model.architecture.attached import Adapter, Projector
from appliance.model.architecture.facts import Format, Matrices, Model, RopeScaling, parse_facts
from appliance.model.architecture.folder import read_folder
from appliance.model.architecture.stack import Layer, LayerKind
from appliance.model.attachments.adapter import read_adapter
from appliance.model.attachments.draft import read_draft
from appliance.model.attachments.projector import check_match, fits, read_projector, unread_projector
from appliance.model.files.find import (
    find_model,
    find_projectors,
    is_folder_model,
    list_models,
    only_model,
    resolve_model,
)
from appliance.model.files.leftovers import why_nothing, why_piece
from appliance.model.formats.digest import ModelDigest, digest
from appliance.model.formats.parts import plain_name, read_whole

__all__ = [
    "Adapter",
    "Format",
    "Layer",
    "LayerKind",
    "Matrices",
    "Model",
    "ModelDigest",
    "Projector",
    "RopeScaling",
    "check_match",
    "digest",
    "find_model",
    "list_models",
    "only_model",
    "plain_name",
    "read_adapter",
    "read_draft",
    "read_model",
    "read_projector",
    "resolve_model",
    "unread_projector",
    "why_nothing",
    "with_projector",
]


def read_model(path: Path, *, serves: Format = "gguf") -> Model:
    """Read a model. Raises ModelUnreadableError unless it is a whole language model in the format that this image
    `serves`."""
    if not is_folder_model(path):
        if serves == "safetensors":
            raise _no_folder(path)
        return _with_projector(_parse_file(path))
    model = read_folder(path)
    if serves != "safetensors":
        message = f"model format is not served by this image: {path}: safetensors ({model.quantization})"
        hint = (
            "take the model as a GGUF file, which may be unquantized. Converting the folder needs torch and "
            "transformers, which this image does not have: run convert_hf_to_gguf.py of llama.cpp elsewhere "
            "and put its file on the volume, or serve the folder with one of the images whose name begins vllm-"
        )
        raise ModelUnreadableError(message, hint=hint)
    return model


def _parse_file(path: Path) -> Model:
    try:
        return parse_facts(read_whole(path))
    except ModelUnreadableError as error:
        if told := why_piece(path):
            raise told from error
        raise


def _no_folder(path: Path) -> ModelUnreadableError:
    message = f"model is a file, and this image serves folders of safetensors: {printable(str(path))}"
    if path.suffix.lower() == ".safetensors":
        hint = f"give its folder: {printable(str(path.parent))}"
    else:
        hint = "give a folder with config.json and safetensors files; GGUF files are served by images of other names"
    return ModelUnreadableError(message, hint=hint)


def _with_projector(model: Model) -> Model:
    """Add the projector with the most similar name, preferring those whose vectors fit the model.

    Unreadable projectors are ignored, because the model can work without one.
    """
    found = [projector for path in find_projectors(model.path) if (projector := _readable(path))]
    fitting = [each for each in found if fits(each, model)]
    return replace(model, projector=next(iter([*fitting, *found]), None))


def with_projector(model: Model, path: Path | None) -> Model:
    """Replace the model's projector with the one at `path`; None removes it."""
    return replace(model, projector=_readable(path) if path else None)


def _readable(path: Path) -> Projector | None:
    try:
        return read_projector(path)
    except ModelUnreadableError:
        return None
