"""The real engine on this machine, outside of a container: what `make integration` copies out of the built image."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

COPIED = Path(__file__).parents[2] / ".make/engine"


def find_engine(name: str) -> Path:
    """APPLIANCE_ENGINE_DIR's program of this name, else the copied one; skips the test where there is neither."""
    folder = os.environ.get("APPLIANCE_ENGINE_DIR") or str(COPIED)
    found = shutil.which(name, path=folder)
    if not found:
        pytest.skip(f"needs {name}: `make integration` copies it out of the image, or set APPLIANCE_ENGINE_DIR")
    return Path(found)


def find_model() -> Path:
    """The demo model that lies beside the copied engine; skips the test where there is none."""
    folder = Path(os.environ.get("APPLIANCE_ENGINE_DIR") or COPIED)
    found = sorted((folder.parent / "models").glob("*.gguf"))
    if not found:
        pytest.skip(f"needs a model in {folder.parent / 'models'}: `make up` fetches one")
    return found[0]
