"""Write a model of some shape as a GGUF file: a header over a hole, or with random weights that the engine can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from appliance.model.shapes.quantize import tensor_type
from appliance.model.shapes.shape import Shape
from appliance.model.shapes.tensors import tensors

ALIGNMENT = 32
_PIECE_BYTES = 256 * 1024  # random bytes that are repeated: weights need not differ, only be finite


QUANTIZATIONS = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "MXFP4")
# Where in a block its f16 scales are (ggml-common.h), and the scale by which random bytes have a deviation of 0.02.
_SCALES = {
    Type.Q4_0: ((0,), 0.0043),
    Type.Q5_0: ((0,), 0.0022),
    Type.Q5_1: ((0, 2), 0.0022),
    Type.Q8_0: ((0,), 0.00027),
    Type.Q2_K: ((80, 82), 0.0016),
    Type.Q3_K: ((108,), 0.00046),
    Type.Q4_K: ((0, 2), 0.000091),
    Type.Q5_K: ((0, 2), 0.000045),
    Type.Q6_K: ((208,), 0.000015),
}


def write_gguf(
    path: Path,
    shape: Shape,
    *,
    quantization: str = "Q4_K_M",
    with_data: bool = False,
    seed: int = 0,
    is_varied: bool = False,
) -> Path:
    """Write a model of this shape. Without data the file has its full length but is a hole behind the header.

    With data it has a tokenizer of bytes, so that the engine answers; without, only the size of its vocabulary.
    `is_varied` True: no weights are repeated, so that one expert taken for another changes the answer.
    """
    entries = [(name, size, Type[tensor_type(name, size, shape, quantization).name]) for name, size in tensors(shape)]
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(shape.name)
    for key, value in shape.metadata.items():
        _add(writer, f"{shape.architecture}.{key}", value)
    _add_vocabulary(writer, shape, with_data=with_data)
    for name, size, kind in entries:
        writer.add_tensor_info(name, tuple(reversed(size)), np.dtype(np.float32), _bytes(size, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _write_data(path, entries, np.random.default_rng(seed) if with_data else None, is_varied=is_varied)
    return path


def _write_data(
    path: Path,
    entries: Sequence[tuple[str, tuple[int, ...], Type]],
    random: np.random.Generator | None,
    *,
    is_varied: bool,
) -> None:
    with path.open("r+b") as file:
        end = _padded(file.seek(0, os.SEEK_END))
        pieces: dict[Type, bytes] = {}
        for name, size, kind in entries:
            length = _bytes(size, kind)
            if random is not None:
                file.seek(end)
                if kind is Type.F32:
                    file.write(_floats(name, length // 4, random))
                else:
                    piece = pieces.setdefault(kind, _blocks(kind, random))
                    for begin in range(0, length, len(piece)):
                        file.write(piece[: min(len(piece), length - begin)])
                        piece = _blocks(kind, random) if is_varied else piece
            end += _padded(length)
        file.truncate(end)


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _bytes(size: Sequence[int], kind: Type) -> int:
    block, length = gguf.GGML_QUANT_SIZES[kind]
    elements = 1
    for dimension in size:
        elements *= dimension
    return elements // block * length


def _floats(name: str, count: int, random: np.random.Generator) -> bytes:
    """Return random weights. Norms are ones; decay rates (`ssm_a`) are negative, as in every trained model."""
    if "norm" in name:
        return np.ones(count, dtype=np.float32).tobytes()
    values = random.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    return (-np.abs(values) if name.endswith("ssm_a") else values).tobytes()


def _blocks(kind: Type, random: np.random.Generator) -> bytes:
    _, length = gguf.GGML_QUANT_SIZES[kind]
    count = _PIECE_BYTES // length
    if kind in (Type.F16, Type.BF16):
        values = random.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        upper_half = (values.view(np.uint32) >> 16).astype(np.uint16)  # which is what a BF16 is
        return values.astype(np.float16).tobytes() if kind is Type.F16 else upper_half.tobytes()
    blocks = random.integers(0, 256, (count, length), dtype=np.uint8)
    if kind is Type.MXFP4:
        blocks[:, 0] = 120  # an exponent: 2^(120 - 127)
    offsets, scale = _SCALES.get(kind, ((), 0.0))
    for offset in offsets:
        blocks[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
    return blocks.tobytes()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    if isinstance(value, list):
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.INT32)
    else:
        adders[type(value)](key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, shape: Shape, *, with_data: bool) -> None:
    """A token for each byte in the letters of GPT-2's vocabulary, one that ends a text, and fillers."""
    writer.add_vocab_size(shape.vocabulary)
    if not with_data:
        writer.add_tokenizer_model("no_vocab")
        return
    fillers = [f"<filler{number}>" for number in range(shape.vocabulary - 257)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_letters(), "<end>", *fillers])
    writer.add_token_types([1] * 256 + [3] + [5] * len(fillers))  # normal, control, unused
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
