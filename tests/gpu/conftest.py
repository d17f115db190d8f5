"""These tests want a GPU: on a machine without one they are skipped, and say so."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours or not (why := _why_none()):
        return
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=why))


def _why_none() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU: there is no nvidia-smi"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return None if "GPU 0" in listed.stdout else f"no NVIDIA GPU: {(listed.stdout + listed.stderr).strip()[:200]}"
