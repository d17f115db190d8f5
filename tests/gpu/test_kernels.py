"""The engine's kernels on the GPU that is here. With CUDA_DISABLE_PTX_JIT=1 one without machine code for it fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.settings import process_environment
from tests.shapes import SMALL, write_gguf

pytestmark = pytest.mark.gpu
ALL_LAYERS = 99


@pytest.fixture
def engine() -> Path:
    folder = process_environment().get("APPLIANCE_ENGINE_DIR")
    if not folder:
        pytest.skip("APPLIANCE_ENGINE_DIR names no engine")
    return Path(folder)


def bench(engine: Path, model: Path, gpu_layers: int, *more: str) -> list[dict[str, Any]]:
    words = ["-m", model, "-ngl", gpu_layers, "-fa", "1", "-p", "256", "-n", "32", "-r", "1", "-o", "json", *more]
    argv = [str(engine / "llama-bench"), *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-3000:]}"
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.parametrize("shape", SMALL)
def test_a_small_model_of_each_kind_reads_and_decodes(shape: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL[shape], quantization="Q4_K_M", with_data=True)
    prefill, decode = bench(engine, model, ALL_LAYERS)
    assert "CUDA" in prefill["backends"]
    assert (prefill["n_prompt"], decode["n_gen"]) == (256, 32)
    assert min(prefill["avg_ts"], decode["avg_ts"]) > 0
    print(
        f"{shape}: prefill {prefill['avg_ts']:,.0f} tok/s, decode {decode['avg_ts']:,.1f} tok/s on {decode['gpu_info']}"
    )


@pytest.mark.parametrize("quantization", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_0", "Q3_K_M", "Q2_K", "F16", "BF16"])
def test_every_quantization_reads_and_decodes(quantization: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"], quantization=quantization, with_data=True)
    prefill, decode = bench(engine, model, ALL_LAYERS)
    assert "CUDA" in prefill["backends"]
    print(f"{quantization}: prefill {prefill['avg_ts']:,.0f} tok/s, decode {decode['avg_ts']:,.1f} tok/s")


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_rounded_caches_read_and_decode(kv_type: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"], quantization="Q4_K_M", with_data=True)
    rows = bench(engine, model, ALL_LAYERS, "-ctk", kv_type, "-ctv", kv_type)
    assert [row["type_k"] for row in rows] == [kv_type, kv_type]
    assert all("CUDA" in row["backends"] for row in rows)


def test_experts_in_host_memory_decode(engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["moe"], quantization="Q4_K_M", with_data=True)
    rows = bench(engine, model, ALL_LAYERS, "-ncmoe", "2")
    assert [row["n_cpu_moe"] for row in rows] == [2, 2]
    assert all("CUDA" in row["backends"] for row in rows)
