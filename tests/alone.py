"""Hide what else a machine has (Docker, variables) from tests whose result must be the same on every machine."""

from __future__ import annotations

import os
import re

import pytest

# Of engines and the libraries that they load, which tests on a GPU set; and where programs keep their settings, which
# a rootless Docker needs.
OF_OTHERS = re.compile(r"GGML_|LLAMA_|VLLM_|OMP_|CUDA_|NVIDIA_|XDG_")


def be_alone(patch: pytest.MonkeyPatch) -> None:
    """Hide the Docker engine, and the caller's variables that would reach an engine or an editor's settings."""
    patch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    for name in [name for name in os.environ if OF_OTHERS.match(name)]:
        patch.delenv(name)
