"""Make a `Model` from its shape and quantization, before its file is here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance.errors import ModelUnreadableError
from appliance.model.architecture.facts import Model, parse_facts
from appliance.model.formats.gguf import Gguf, Tensor
from appliance.model.shapes.quantize import BASES, size_bytes, tensor_type
from appliance.model.shapes.shape import Shape, as_shape
from appliance.model.shapes.tensors import BLOCKS, tensors

# Header bytes per token for tokens, merges, scores and types: 5.9 MB for the 151,936 tokens of Qwen3.
HEADER_BYTES_A_TOKEN = 39


def describe_model(
    name: str, row: Mapping[str, Any], path: Path, *, quantization: str | None = None, file_bytes: int | None = None
) -> Model:
    """Make the model of a recipe's variant. `row` has `architecture`, `vocabulary`, `is_tied`, `metadata` and
    `quantization`.

    If the length of the file is known, sizes are scaled to it: publishers deviate from the usual mixtures of types.
    Raises ValueError if the shape is incomplete, or its architecture or quantization unknown.
    """
    try:
        shape = as_shape(name, row)
        return describe_shape(shape, path, quantization or row["quantization"], file_bytes=file_bytes)
    except (KeyError, TypeError, IndexError, ArithmeticError, ModelUnreadableError) as error:
        message = f"the shape of {name} does not describe a model: {type(error).__name__}: {error}"
        raise ValueError(message) from error


def describe_shape(shape: Shape, path: Path, quantization: str, *, file_bytes: int | None = None) -> Model:
    """Make the model of a shape. Raises ValueError for an unknown quantization.

    The same if the tensors are unknown: there is no table for the architecture, or the shape lacks a key that they
    follow from.
    """
    kind = near_quantization(quantization)
    if shape.architecture not in BLOCKS:
        message = f"tensors of this architecture are unknown: {shape.architecture}; known are {', '.join(BLOCKS)}"
        raise ValueError(message)
    try:
        found = tuple(_tensors(shape, kind))
    except KeyError as error:
        message = f"the shape of {shape.name} has no {error.args[0]}"
        raise ValueError(message) from error
    except ZeroDivisionError as error:
        message = f"the shape of {shape.name} has no attention.head_count, or it is 0"
        raise ValueError(message) from error
    header_bytes = HEADER_BYTES_A_TOKEN * shape.vocabulary
    whole = header_bytes + sum(tensor.size_bytes for tensor in found)
    if file_bytes is not None:
        found = _scaled(found, max(0, file_bytes - header_bytes))
        whole = file_bytes
    gguf = Gguf(
        path=path,
        version=3,
        metadata=_metadata(shape),
        tensors=found,
        header_bytes=header_bytes,
        file_bytes=whole,
    )
    return replace(parse_facts(gguf), file_type=quantization)


def requantized(gguf: Gguf, quantization: str, *, file_bytes: int | None = None) -> Model:
    """Compute the model with the same tensors in another quantization. Raises ValueError if that is unknown."""
    kind = near_quantization(quantization)
    shape = _shape_of(gguf)
    found = []
    for tensor in gguf.tensors:
        of = tensor_type(tensor.name, tensor.shape, shape, kind)
        size = size_bytes(tensor.shape, of)
        found.append(replace(tensor, type_name=of.name, size_bytes=size))
    tensors_ = tuple(found)
    if file_bytes is not None:
        tensors_ = _scaled(tensors_, max(0, file_bytes - gguf.header_bytes))
    whole = file_bytes or gguf.header_bytes + sum(tensor.size_bytes for tensor in tensors_)
    return replace(parse_facts(replace(gguf, tensors=tensors_, file_bytes=whole)), file_type=quantization)


def _shape_of(gguf: Gguf) -> Shape:
    architecture = str(gguf.metadata.get("general.architecture", ""))
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    is_tied = not any(tensor.name == "output.weight" for tensor in gguf.tensors)
    return Shape(name="", architecture=architecture, metadata=own, vocabulary=0, is_tied=is_tied, source="a header")


def near_quantization(name: str) -> str:
    """Return the most similar usual mixture of types: Q4_K_M for UD-Q4_K_XL. Raises ValueError if there is none."""
    plain = re.sub(r"^UD-", "", name.upper())
    bare = re.sub(r"_(XL|L|M|S)$", "", plain)  # Q4_K, and Q8_K for Q8_K_XL
    for word in (plain, re.sub(r"_(XL|L)$", "_M", plain), bare, f"{bare}_M", bare.replace("_K", "_0")):
        if word in BASES:
            return word
    for word, near in (("IQ4", "IQ4_XS"), ("IQ3", "Q3_K_S"), ("IQ2", "Q2_K"), ("IQ1", "Q2_K"), ("MXFP4", "MXFP4")):
        if plain.startswith(word):
            return near
    message = f"quantization is unknown: {name}"
    raise ValueError(message)


def _metadata(shape: Shape) -> dict[str, Any]:
    own = {
        f"{shape.architecture}.{key}": tuple(value) if isinstance(value, list) else value
        for key, value in shape.metadata.items()
    }
    head = {"general.architecture": shape.architecture, "general.name": shape.name}
    return head | {f"{shape.architecture}.vocab_size": shape.vocabulary} | own


def _tensors(shape: Shape, quantization: str) -> list[Tensor]:
    found = []
    for name, size in tensors(shape):
        kind = tensor_type(name, size, shape, quantization)
        found.append(Tensor(name=name, type_name=kind.name, shape=size, offset=0, size_bytes=size_bytes(size, kind)))
    return found


def _scaled(found: tuple[Tensor, ...], weights_bytes: int) -> tuple[Tensor, ...]:
    factor = weights_bytes / sum(tensor.size_bytes for tensor in found)
    return tuple(replace(tensor, size_bytes=round(tensor.size_bytes * factor)) for tensor in found)
