"""The whole appliance with the real engine, on models of random weights that are made for the test."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from appliance.engines.llama.process.facts import query_facts
from appliance.image_facts import dump_facts
from tests.builders import IMAGE
from tests.process.stages.boot import Home, Serving
from tests.process.stages.engine import find_engine


def real_home(folder: Path) -> Home:
    """An empty volume."""
    binary = find_engine("llama-server")
    home = Home(folder)
    for name in ("data/models", "facts"):
        (folder / name).mkdir(parents=True)
    (folder / "engine").symlink_to(binary.parent)
    (folder / "facts/image_facts.json").write_text(dump_facts(IMAGE))
    (folder / "facts/engine_facts.json").write_text(dump_facts(query_facts(binary)))
    return home


def post(serving: Serving, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return serving.ask("POST", path, body, key=serving.home.key)


def listed(serving: Serving) -> Any:
    status, document = serving.ask("GET", "/v1/models", key=serving.home.key)
    assert status == 200
    return document["data"][0]


def sound(hertz: float, *, seconds: float = 1.0) -> str:
    """A tone as a WAV file, in base64."""
    rate = 16000
    samples = (int(20000 * math.sin(2 * math.pi * hertz * at / rate)) for at in range(int(rate * seconds)))
    data = b"".join(struct.pack("<h", sample) for sample in samples)
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16,
                       b"data", len(data))  # fmt: skip
    return base64.b64encode(head + data).decode()


def picture(red: int, green: int, blue: int, *, side: int = 64) -> str:
    """A PNG of one color, as a data URL."""
    row = b"\0" + bytes((red, green, blue)) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * side)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def write_f16(source: Path, target: Path) -> Path:
    """Write a model with its matrices as F16, as a publisher's unquantized file has them."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            of = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=of)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype(np.float32 if data.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
