"""The KV cache of the real vLLM has as many tokens as predicted: thirteen shapes, one rank and two, several budgets.

Run by `make test CELL=vllm-cpu`: left out without `APPLIANCE_TEST_VLLM_IMAGE`, the image's name.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from docker.types import Mount

from tests.container.stages.containers import ROOT, started, volume
from tests.container.stages.soak import START_S, write_model

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "")
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1"  # whose tokenizer is lent
BYTES = "--kv-cache-memory-bytes 50000000"  # no whole number of blocks in any shape
SLIDING = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
HYBRID = {**SLIDING, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}


def shape(kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {"num_key_value_heads": kv_heads, "head_dim": head_dim, **more}


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    if not IMAGE:
        pytest.skip("it has a run of its own: make test CELL=vllm-cpu")
    assert (MODEL / "config.json").is_file(), "python -m images fetch demo --rung 135m-bf16"


@pytest.mark.parametrize(
    ("model", "ranks", "context", "argument"),
    [
        pytest.param(shape(4, 64), 1, 4096, "", id="every head has its own"),
        pytest.param(shape(2, 64), 1, 4096, "", id="GQA"),
        pytest.param(shape(1, 64), 1, 4096, "", id="MQA"),
        pytest.param(shape(2, 128), 1, 4096, "", id="GQA of 128"),
        pytest.param(shape(1, 128), 1, 16384, "", id="MQA of 128, 16k"),
        pytest.param(shape(2, 64), 1, 4096, BYTES, id="GQA, bytes"),
        pytest.param(shape(1, 128, num_hidden_layers=7), 1, 4096, BYTES, id="MQA of 128, 7 layers, bytes"),
        pytest.param(shape(2, 64), 2, 4096, "", id="GQA, two ranks"),
        pytest.param(shape(1, 64), 2, 4096, "", id="MQA, which both ranks keep"),
        pytest.param(shape(4, 128), 2, 16384, "", id="128, two ranks, 16k"),
        pytest.param(shape(2, 128), 2, 4096, BYTES, id="GQA of 128, two ranks, bytes"),
        pytest.param(shape(2, 64, **SLIDING), 1, 16384, "", id="sliding window"),
        pytest.param(shape(2, 64, **HYBRID), 1, 16384, "", id="three of four layers slide"),
    ],
)
def test_its_cache_has_as_many_tokens_as_predicted(
    model: dict[str, Any], ranks: int, context: int, argument: str
) -> None:
    arguments = f"{argument} --tensor-parallel-size 2" if ranks == 2 else argument
    env = {
        "APPLIANCE_MODEL": "/models/small",
        "APPLIANCE_CTX_SIZE": str(context),
        "APPLIANCE_ENGINE_ARG": arguments.strip(),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if ranks == 2 else "nobind",
    }
    with tempfile.TemporaryDirectory(dir=ROOT / ".make", prefix="blocks-") as folder, volume(model=False) as name:
        Path(folder).chmod(0o755)
        write_model(Path(folder) / "small", MODEL, **model)
        mount = Mount(target="/models/small", source=f"{folder}/small", type="bind", read_only=True)
        with started(name, image=IMAGE, mounts=[mount], shm_size="1g", env=env) as stage:
            stage.wait_ready(START_S)
            (ready,) = [event["message"] for event in stage.events() if event["event"] == "ready"]
            assert ready.endswith("tokens, as predicted"), ready
