"""Safetensors folders for tests: config.json and weights of 0, or invalid files written byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import ModelUnreadableError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "I32": 4}
Tensors = Mapping[str, tuple[str, Sequence[int]]]
DENSE: Tensors = {
    "model.embed_tokens.weight": ("BF16", (100, 64)),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (128, 64)),
    "model.layers.1.self_attn.q_proj.weight": ("BF16", (64, 64)),
    "model.layers.1.input_layernorm.weight": ("F32", (64,)),
    "model.norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("BF16", (100, 64)),
}


def header(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> tuple[dict[str, Any], int]:
    """Return header entries that follow each other without gaps, and the end of the last one."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return entries, end


def raw(data: bytes, data_bytes: int, length: int | None = None) -> bytes:
    return (len(data) if length is None else length).to_bytes(8, "little") + data + bytes(data_bytes)


def write_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    entries, end = header(tensors, metadata)
    path.write_bytes(raw(json.dumps(entries).encode(), end))
    return path


def write_folder(folder: Path, tensors: Tensors = DENSE, *, config: dict[str, Any] | None = None, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**(CONFIG if config is None else config), **more}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))
    write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def read_or_words(path: Path, read: Callable[[Path], Any]) -> Any:
    """Return what `read` gives, or its error message. The error must have a hint and a printable message."""
    try:
        return read(path)
    except ModelUnreadableError as error:
        if not (error.hint and error.message.isprintable()):
            message = f"refused without a hint, or in words that no terminal may show: {error.message!r}"
            raise AssertionError(message) from error
        return error.message


def write_shards(
    folder: Path, tensors: Tensors = DENSE, *, count: int = 2, has_index: bool = True, **more: Any
) -> Path:
    write_folder(folder, {}, **more)
    (folder / "model.safetensors").unlink()
    names, places = list(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        mine = names[number::count]
        write_file(folder / file, {name: tensors[name] for name in mine})
        places.update(dict.fromkeys(mine, file))
    if has_index:
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
