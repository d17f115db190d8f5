"""GGUF files for tests, written by the `gguf` package as an independent reference, or byte by byte if it refuses."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from appliance.errors import ModelUnreadableError
from appliance.model import read_model
from appliance.model.formats.gguf import Skipped, read_gguf

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
}
LLAMA_TENSORS = [
    ("token_embd.weight", (64, 100), Q8_0),
    ("blk.0.attn_q.weight", (64, 64), F32),
    ("blk.1.ffn_up.weight", (64, 128), Q8_0),
    ("output.weight", (64, 100), Q8_0),
]


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    tensors: Sequence[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]] | None = None,
    tokens: int = 100,
    alignment: int | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write a model with all weights 0. A shape has its innermost dimension first, as in the file."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in (LLAMA if metadata is None else metadata).items():
        _add(writer, key, value)
    if tokens:
        writer.add_token_list([f"token{number}" for number in range(tokens)])
        writer.add_token_merges([f"a{number} b" for number in range(tokens)])
        writer.add_token_scores([0.0] * tokens)
    for name, shape, kind in _tensors(tokens) if tensors is None else tensors:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.zeros((*reversed(shape[1:]), shape[0] // block * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def last_layer(layers: int) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]:
    """Return a norm of the last layer: without any tensor of its last layer a file is refused."""
    return (f"blk.{layers - 1}.attn_norm.weight", (64,), F32)


def _tensors(tokens: int) -> Sequence[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]]:
    """List the tensors; an embedding has a row for every token."""
    rows = tokens or 100
    return [(name, (shape[0], rows) if shape[1] == 100 else shape, kind) for name, shape, kind in LLAMA_TENSORS]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        adders[type(value)](key, value)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def header(*, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def refusal(path: Path) -> str:
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(path)
    assert caught.value.exit_code == 30
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


def assert_as_oracle(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {
        entry.name: (list(entry.shape), entry.type_name, entry.offset, entry.size_bytes) for entry in ours.tensors
    } == {
        entry.name: (entry.shape.tolist(), entry.tensor_type.name, entry.data_offset, entry.n_bytes)
        for entry in theirs.tensors
    }
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for name, value in ours.metadata.items():
        expected: Any = fields[name].contents()
        if isinstance(value, Skipped):
            assert value.count == len(expected.encode() if isinstance(expected, str) else expected)
        elif isinstance(value, tuple):
            assert list(value) == expected
        elif not isinstance(value, str):
            assert value == expected
        else:
            assert value.replace("\ufffd", "") == "".join(c for c in expected if c.isprintable())
    assert ours.header_bytes == theirs.data_offset
    assert ours.file_bytes == path.stat().st_size
