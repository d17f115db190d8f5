"""A LoRA adapter: its base model and its size, from its header alone.

The rules are those of llama.cpp's src/llama-adapter.cpp (build 11312), which refuses other files only after loading
the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.architecture.attached import Adapter
from appliance.model.architecture.facts import Model
from appliance.model.formats.gguf import Tensor, read_gguf
from appliance.model.formats.keys import Keys
from appliance.model.formats.parts import read_whole

_LAYER = re.compile(r"blk\.(\d+)\.")
_HALF = re.compile(r"(.+)\.lora_([ab])")
_EMBEDDING = "token_embd.weight"


def read_adapter(path: Path, scale: float, base: Model) -> Adapter:
    """Read an adapter. Raises ModelUnreadableError if it is not a LoRA adapter of this base."""
    gguf = read_gguf(path)
    keys = Keys(gguf)
    _check_kind(keys, base)
    halves = _halves(keys, gguf.tensors)
    shapes = {tensor.name: tensor.shape for tensor in read_whole(base.path).tensors}
    for name, pair in halves.items():
        if why := _why_not(name, pair, shapes.get(name)):
            _refuse(path, base, why)
    layers: defaultdict[int, int] = defaultdict(int)
    others = 0
    for name, pair in halves.items():
        size = sum(tensor.size_bytes for tensor in pair.values())
        if found := _LAYER.match(name):
            layers[int(found[1])] += size
        else:
            others += size
    return Adapter(
        path=path,
        scale=scale,
        layer_bytes=tuple(sorted(layers.items())),
        other_bytes=others,
        size=gguf.file_bytes,
        header_bytes=gguf.header_bytes,
    )


def _check_kind(keys: Keys, base: Model) -> None:
    kind, adapter = keys.text("general.type"), keys.text("adapter.type")
    if kind != "adapter" or adapter != "lora":
        keys.fail(f"it is not a LoRA adapter: general.type {kind}, adapter.type {adapter}", hint="give a LoRA as GGUF")
    if keys.architecture != base.architecture:
        message = f"adapter has another base: {keys.architecture}, but {base.title} is {base.architecture}"
        raise ModelUnreadableError(message, hint="use an adapter that was trained on this model")


def _halves(keys: Keys, tensors: tuple[Tensor, ...]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the name of the base's matrix. Norms are ignored, as the engine does."""
    found: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        if half := _HALF.fullmatch(tensor.name):
            found.setdefault(half[1], {})[half[2]] = tensor
        elif not tensor.name.endswith("_norm.weight"):
            keys.fail(f"its tensor {tensor.name} is not part of a LoRA", hint="convert the adapter again")
    if not found:
        keys.fail("it has no tensors of a LoRA", hint="convert the adapter again")
    if lone := next((name for name, pair in found.items() if len(pair) < 2), None):
        keys.fail(f"its matrix {lone} has only one half", hint="fetch or convert the adapter again")
    return found


def _why_not(name: str, pair: dict[str, Tensor], shape: tuple[int, ...] | None) -> str | None:
    """Return why this pair does not fit a matrix of this shape; None if it fits."""
    if shape is None:
        return f"it has no {name}"
    a, b = pair["a"].shape, pair["b"].shape
    if min(len(a), len(b), len(shape)) < 2:
        return f"{name} is not a matrix"
    if name == _EMBEDDING:
        columns, rows = b[1], a[1]
    else:
        columns, rows = a[0], b[1]
        if a[1] != b[0]:
            return f"the halves of {name} have ranks {a[1]} and {b[0]}"
    if (columns, rows) != shape[:2]:
        return f"{name} is {shape[0]:,} x {shape[1]:,} in the base and {columns:,} x {rows:,} in the adapter"
    return None


def _refuse(path: Path, base: Model, why: str) -> NoReturn:
    message = f"adapter has another base than {base.title}: {path.name}: {why}"
    raise ModelUnreadableError(message, hint="use an adapter that was trained on this model")
