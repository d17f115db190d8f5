"""Each ending of tests/endings/vllm.yaml that can be brought about here, by the real vLLM in its own image: its class,
its cause, and nothing left of its tree. The supervisor and the rules are those of the image.

Run by `make test CELL=vllm-cpu`: left out without `APPLIANCE_TEST_VLLM_IMAGE`, the image's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.container.stages.containers import ROOT
from tests.container.stages.soak import write_model

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "")
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1"  # whose tokenizer is lent
ENDINGS = ROOT / "tests/endings"
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((ENDINGS / "vllm.yaml").read_text(encoding="utf-8"))
PROVOKED = [name for name, row in INDEX.items() if "run" in row]
ALL_S = 3600.0  # eight minutes on two cores that have nothing else to do


@pytest.fixture(scope="module")
def told() -> Iterator[Mapping[str, dict[str, Any]]]:
    """Yield the lines that `provoke_vllm.py` printed, keyed by their name."""
    if not IMAGE:
        pytest.skip("it has a run of its own: make test CELL=vllm-cpu")
    assert (MODEL / "config.json").is_file(), "python -m images fetch demo --rung 135m-bf16"
    with tempfile.TemporaryDirectory(dir=ROOT / ".make", prefix="endings-") as name:
        Path(name).chmod(0o755)
        write_model(Path(name) / "m", MODEL)
        argv = ["docker", "run", "--rm", "--network", "none", "--read-only", "--shm-size", "1g"]
        argv += ["--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL", "--user", "12345:0"]
        argv += ["-v", f"{ENDINGS}:/endings:ro", "-v", f"{name}:/data/models:ro", "-e", "PYTHONPATH=/opt/appliance/lib"]
        argv += ["--entrypoint", "python3", IMAGE, "/endings/provoke_vllm.py", "--vllm", "/opt/vllm/bin/vllm"]
        done = subprocess.run(
            [*argv, "--model", "/data/models/m"], capture_output=True, text=True, check=False, timeout=ALL_S
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode in (0, 1), done.stderr[-2000:]
        yield {each["name"]: each for each in lines}


@pytest.mark.parametrize("name", PROVOKED)
def test_it_ends_as_it_was_read(name: str, told: Mapping[str, dict[str, Any]]) -> None:
    row, found = INDEX[name], told[name]
    assert found["code"] == row["code"], found
    # Where vLLM looks before the exit code of a killed worker is there, it says None.
    assert row.get("says", "") in found["message"].replace("(exit code: None)", "(exit code: -9)")
    assert found["left"] == []
