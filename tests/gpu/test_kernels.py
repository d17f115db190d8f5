"""The engine's kernels on the GPU that is here. With CUDA_DISABLE_PTX_JIT=1 one without machine code for it fails."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from appliance.settings import process_environment
from tests.shapes import SMALL, write_gguf

ALL_LAYERS = 99
PROMPT, MADE = 256, 32  # tokens
START_S, ANSWER_S = 60.0, 60.0


@pytest.fixture
def engine() -> Path:
    folder = process_environment().get("APPLIANCE_ENGINE_DIR")
    if not folder:
        pytest.skip("APPLIANCE_ENGINE_DIR names no engine")
    return Path(folder)


class Client(HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask(socket_path: Path, method: str, route: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    client = Client(socket_path)
    try:
        client.request(method, route, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        reply = client.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        client.close()


def is_ready(socket_path: Path) -> bool:
    try:
        return ask(socket_path, "GET", "/health")[0] == 200
    except OSError:
        return False


def complete(engine: Path, model: Path, *more: str) -> tuple[dict[str, Any], str]:
    """Run one prompt; return the engine's `timings` and its log."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as name:  # a socket's path is at most 107 bytes long
        socket_path, log = Path(name, "s.sock"), Path(name, "log")
        words = ["-m", model, "-ngl", ALL_LAYERS, "-fa", "on", "-c", 2 * PROMPT, "-np", 1, "--fit", "off", "-lv", 4]
        argv = [engine / "llama-server", "--host", socket_path, *words, *more]
        with log.open("wb") as lines:
            server = subprocess.Popen([*map(str, argv)], stdout=lines, stderr=subprocess.STDOUT)
        try:
            give_up_at = time.monotonic() + START_S
            while not is_ready(socket_path):
                said = log.read_text(errors="replace")[-3000:]
                assert server.poll() is None, f"exit {server.returncode}: {said}"
                assert time.monotonic() < give_up_at, f"not ready after {START_S:g} s: {said}"
                time.sleep(0.05)
            body = {"prompt": list(range(PROMPT)), "n_predict": MADE, "ignore_eos": True, "cache_prompt": False}
            status, reply = ask(socket_path, "POST", "/completion", body)
        finally:
            server.kill()
            server.wait()
        said = log.read_text(errors="replace")
    assert status == 200, f"{reply}: {said[-3000:]}"
    return reply["timings"], said


def speeds(timings: dict[str, Any], said: str) -> str:
    """Check that all of the work was done on the GPU, and return the speeds in words."""
    assert (timings["prompt_n"], timings["predicted_n"]) == (PROMPT, MADE)
    assert "CUDA0 model buffer size" in said
    prefill = 1000 * PROMPT / timings["prompt_ms"]
    return f"prefill {prefill:,.0f} tok/s, decode {1000 * (MADE - 1) / timings['predicted_ms']:,.1f} tok/s"


@pytest.mark.parametrize("shape", SMALL)
def test_a_small_model_of_each_kind_reads_and_decodes(shape: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL[shape], quantization="Q4_K_M", with_data=True)
    print(f"{shape}: {speeds(*complete(engine, model))}")


@pytest.mark.parametrize("quantization", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_0", "Q3_K_M", "Q2_K", "F16", "BF16"])
def test_every_quantization_reads_and_decodes(quantization: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"], quantization=quantization, with_data=True)
    print(f"{quantization}: {speeds(*complete(engine, model))}")


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_rounded_caches_read_and_decode(kv_type: str, engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"], quantization="Q4_K_M", with_data=True)
    timings, said = complete(engine, model, "-ctk", kv_type, "-ctv", kv_type)
    print(f"{kv_type}: {speeds(timings, said)}")
    assert f"K ({kv_type})" in said


def test_experts_in_host_memory_decode(engine: Path, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", SMALL["moe"], quantization="Q4_K_M", with_data=True)
    print(f"experts of 2 layers in host memory: {speeds(*complete(engine, model, '--n-cpu-moe', '2'))}")
