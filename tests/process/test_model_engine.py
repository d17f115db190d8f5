"""What is computed from a header against what the real llama-server allocates, for every kind of cache.

Needs the engine: a folder with llama-server in APPLIANCE_ENGINE_DIR, or llama-server on the path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.model import Layer, Model, read_model
from tests.process.stages.engine import find_engine, plain_environment
from tests.shapes import PUBLISHED, SMALL, Shape, write_gguf

MIB = 1 << 20
SLOTS, UBATCH = 2, 256
_KV = re.compile(r"llama_kv_cache: size = .*?K \(\w+\): +([\d.]+) MiB, V \(\w+\): +([\d.]+) MiB")
_STATE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
_READY = "listening on"


@contextmanager
def running(argv: Sequence[str | Path]) -> Iterator[Iterator[str]]:
    """The lines that a server prints, while it runs."""
    server = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=plain_environment(Path(argv[0])),
    )
    assert server.stdout
    try:
        yield iter(server.stdout)
    finally:
        server.kill()
        server.stdout.close()
        server.wait()


def allocated(model: Path, context: int, slots: int = SLOTS, *more: str) -> tuple[float, float, float]:
    """Return MiB of K, V and states from the log of a server that became ready."""
    folder = Path(tempfile.mkdtemp(prefix="me", dir="/tmp"))
    argv = [
        str(find_engine("llama-server")),
        "-m",
        str(model),
        "--host",
        str(folder / "s.sock"),
        "--no-warmup",
        "-fa",
        "on",
        *more,
    ]
    argv += ["--fit", "off", "-c", str(context), "-np", str(slots), "-ub", str(UBATCH), "-t", "2", "-lv", "4"]
    seen: list[str] = []
    try:
        with running(argv) as lines:
            for line in lines:
                seen.append(line)
                if _READY in line:
                    break
    finally:
        shutil.rmtree(folder)
    text = "".join(seen)
    assert _READY in text, text[-2000:]
    caches = _KV.findall(text)
    states = _STATE.findall(text)
    return sum(float(k) for k, _ in caches), sum(float(v) for _, v in caches), sum(map(float, states))


def cells(layer: Layer, context: int) -> int:
    if layer.window is None:
        return context
    return -(-min(context, layer.window + UBATCH) // 256) * 256


def computed(model: Model, context: int, sequences: int, *, drafts: bool = False) -> tuple[float, float, float]:
    """Return the computed MiB of K, V and states for caches of f16. `context` is that of one sequence."""
    trunk = [layer for layer in model.stack if drafts or not layer.is_draft]
    each = [sum(2 * size * cells(layer, context) for layer, size in sizes) for sizes in _sizes(trunk)]
    states = sum(layer.state_bytes for layer in trunk)
    return each[0] * sequences / MIB, each[1] * sequences / MIB, states * sequences / MIB


def _sizes(layers: list[Layer]) -> tuple[list[tuple[Layer, int]], list[tuple[Layer, int]]]:
    return [(layer, layer.k_elements) for layer in layers], [(layer, layer.v_elements) for layer in layers]


@pytest.mark.parametrize("shape", SMALL.values(), ids=lambda shape: shape.name)
def test_caches_and_states_are_what_the_engine_allocates(tmp_path: Path, shape: Shape) -> None:
    path = write_gguf(tmp_path / "m.gguf", shape, with_data=True)
    context = 4096
    expected = computed(read_model(path), context, SLOTS)
    # The log rounds to hundredths of a MiB, and there are at most two caches.
    assert allocated(path, context * SLOTS) == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize("name", ["delta-net", "mla-with-drafts"])
def test_draft_layers_have_a_cache_and_states_go_back_by_as_many_tokens(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL[name], with_data=True)
    k, v, states = computed(read_model(path), 4096, 1, drafts=True)
    found = allocated(path, 4096, 1, "--spec-type", "draft-mtp", "--spec-draft-n-max", "2")
    assert found == pytest.approx((k, v, states * (1 + 2)), abs=0.011)


@pytest.mark.parametrize("shape", PUBLISHED.values(), ids=lambda shape: shape.name)
def test_published_models_against_the_engines_own_estimate(tmp_path: Path, shape: Shape) -> None:
    """llama-fit-params opens a file that is a hole and says in whole MiB what it would take on a CPU."""
    path = write_gguf(tmp_path / "m.gguf", shape, quantization="MXFP4" if shape.architecture == "gpt-oss" else "Q4_K_M")
    argv = [
        str(find_engine("llama-fit-params")),
        "-m",
        str(path),
        "-c",
        "8192",
        "-np",
        "1",
        "-ub",
        str(UBATCH),
        "-fitp",
        "on",
    ]
    around = plain_environment(Path(argv[0]))
    out = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=600, env=around).stdout
    _, context_mib, _ = map(int, out.split()[-3:])
    assert context_mib == pytest.approx(sum(computed(read_model(path), 8192, 1)), abs=1)
