"""A start whose model is there pays nothing for fetching."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.process.stages.boot import ROOT, Home

NEVER = ("appliance.weights", "huggingface_hub", "httpx2", "certifi", "filelock", "hf_xet")


def imported(said: str) -> set[str]:
    """Modules that a run of Python told of, whichever way they were imported."""
    names = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert "appliance.settings" in names, said
    return names


def test_a_start_does_not_import_it(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    home.variables = {"PYTHONPROFILEIMPORTTIME": "1"}
    with home.serving() as serving:
        serving.wait_ready()
        names = imported(serving.text)
    assert "appliance.gateway.app" in names
    assert [name for name in names if name.startswith(NEVER)] == []


def test_the_hubs_client_is_imported_for_a_listing_alone() -> None:
    argv = [sys.executable, "-X", "importtime", "-c", "import appliance.weights.pull"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    names = imported(done.stderr)
    assert "appliance.weights.download.fetch" in names
    assert [name for name in names if name.startswith(("huggingface_hub", "httpx2"))] == []
