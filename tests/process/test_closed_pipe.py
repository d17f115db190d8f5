"""A command whose reader leaves, as in `appliance plan | head -1`, ends in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tests/golden/matrix/machines/4090.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ("appliance", "plan", "--machine", str(MACHINE), "--model", "qwen3-8b"),
        ("appliance", "version"),
        ("appliance.host", "--help"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_it_ends_as_by_sigpipe(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_so_does_one_whose_errors_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as err:
        done = subprocess.run(
            [sys.executable, "-m", "appliance", "plan", "--ctx-size", "no"], cwd=ROOT, stderr=err, check=False
        )
    assert done.returncode == 141
