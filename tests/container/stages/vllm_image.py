"""A program of the tests, run with vLLM's own Python in its image."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "appliance:vllm-cpu")
IMPORT_S = 300  # 12 s of CPU time; a cold disk and a busy machine take minutes


def needs_image() -> None:
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
        pytest.skip(f"{IMAGE} is not here: python -m images build --only vllm-cpu")


def answered(program: Path, question: Any) -> Any:
    """What it prints on its last line, as it prints logs before. It has no network and may write nothing."""
    argv = ["docker", "run", "--rm", "-i", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/data"]
    argv += ["-v", f"{program}:/program.py:ro", "--entrypoint", "/opt/vllm/bin/python", IMAGE, "/program.py"]
    done = subprocess.run(
        argv, input=json.dumps(question), capture_output=True, text=True, check=False, timeout=IMPORT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
