"""Commands whose output cannot be written: the reader has left, the disk is full, the stream is closed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        done = _run(*words, stdout=out, stderr=subprocess.PIPE)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


@pytest.mark.parametrize("command", ["version", "probe", "status --help"])
def test_a_full_disk_under_its_output_is_said(command: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = _run("appliance", *command.split(), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 50
    assert done.stderr.startswith("error: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_none(closed: str) -> None:
    words = f"exec {shlex.quote(sys.executable)} -m appliance plan --ctx-size no {closed}"
    assert subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, check=False).returncode == 10


def test_errors_that_cannot_be_written_leave_the_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        assert _run("appliance", "plan", "--ctx-size", "no", stderr=full).returncode == 10
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as err:
        assert _run("appliance", "plan", "--ctx-size", "no", stderr=err).returncode == 10


def _run(*words: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, text=True, check=False, **streams)
