"""The GGUF reader on files of real size, and in a process that may have little memory."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.model import read_model
from appliance.model.formats.gguf import read_gguf
from tests.unit.model.gguf_files import array, assert_as_oracle, header, key, refusal, tensor, text, write_model

REAL_MODELS = sorted((Path(__file__).parents[2] / ".make/models").glob("*.gguf"))


@pytest.mark.skipif(not REAL_MODELS, reason="no model in .make/models: `make up` fetches one")
@pytest.mark.parametrize("path", REAL_MODELS, ids=lambda path: path.name)
def test_reads_a_real_model_as_the_oracle_does(path: Path) -> None:
    assert_as_oracle(path)
    assert read_model(path).cache_kind == "attention"


def test_a_vocabulary_longer_than_the_first_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", tokens=50_000)
    assert read_gguf(path).header_bytes > 1_500_000
    assert_as_oracle(path)
    data = path.read_bytes()
    path.write_bytes(data[:1_600_000])
    assert "of the 50000 texts of tokenizer.ggml.merges at byte" in refusal(path)


HOSTILE = {
    "strings": lambda: header(keys=1) + key("k", 9, array(8, 8_000_000)),
    "numbers": lambda: header(keys=1) + key("k", 9, array(0, 64_000_000)),
    "kept arrays": lambda: header(keys=8000) + b"".join(
        key(f"k{n}", 9, array(10, 1024, struct.pack("<1024Q", *range(1 << 40, (1 << 40) + 1024)))) for n in range(8000)
    ),
    "texts": lambda: header(keys=8192) + b"".join(
        key(f"{n}" + "é" * 500, 8, text("\U0001f600" + "a" * 500)) for n in range(8192)
    ),
    "tensors": lambda: header(tensors=65536) + b"".join(
        tensor(f"{n:050}", (1, 1, 1, 1), 0, n * 32) for n in range(65536)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[name]())
    os.truncate(path, max(path.stat().st_size, 1 << 30))  # a sparse file: a gigabyte that costs nothing
    code = (
        "import pathlib, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))\n"
        "from appliance.model.formats.gguf import read_gguf\n"
        "from appliance.errors import ModelUnreadableError\n"
        "try:\n print(len(read_gguf(pathlib.Path(sys.argv[1])).metadata))\n"
        "except ModelUnreadableError as error:\n print(error.message)\n"
    )
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.strip()
