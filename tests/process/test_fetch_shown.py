"""What a person sees of a download: a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.hub.running import MIB, REPO, gguf_bytes, put, running_hub
from tests.process.stages.fetching import ROOT, ended

NAME = "Tiny-Q4_K_M.gguf"
SLOW = ("--bytes-per-s", str(4 * MIB), "--cut-after", str(5 * MIB), "--cuts", "1")


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    put(tmp_path / "hub", NAME, gguf_bytes(9 * MIB))
    return tmp_path / "hub"


def read_all(handle: int) -> str:
    """Return all text until nobody writes any more, which a terminal tells by an error."""
    data = b""
    while True:
        try:
            chunk = os.read(handle, 65536)
        except OSError:
            return data.decode()
        data += chunk


def test_a_terminal_gets_a_bar(tmp_path: Path, shelf: Path) -> None:
    (tmp_path / "data").mkdir()
    ours, its = pty.openpty()
    argv = [sys.executable, "-m", "appliance", "models", "pull", REPO, "--data-dir", str(tmp_path / "data")]
    with running_hub(shelf, *SLOW) as hub:
        environment = {**os.environ, **hub.environment(), "TERM": "xterm", "COLUMNS": "140"}
        with subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=its, text=True
        ) as program:
            os.close(its)
            said = read_all(ours)
            os.close(ours)
            out, _ = program.communicate(timeout=90)
    assert program.returncode == 0, said
    assert out.startswith(f"{REPO}: fetched and checked, 9.4 MB")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    assert "asking the hub" in shown
    assert re.search(rf"{NAME} ━+.* [\d.]+/9\.4 MB +[\d.]+ MB/s, \d+ s left", shown)
    assert "waiting for an answer: the connection to 127.0.0.1 broke; asking again in 1 s" in shown


def test_a_log_gets_few_lines(tmp_path: Path, shelf: Path) -> None:
    with running_hub(shelf, *SLOW) as hub:
        code, out, err = ended(hub, tmp_path / "data", "pull", REPO)
    assert code == 0
    assert out.startswith(f"{REPO}: fetched and checked, 9.4 MB")
    lines = err.splitlines()
    assert lines[:2] == [f"{REPO}: {NAME}", f"{NAME}: 0 bytes of 9.4 MB"]
    assert lines[2].endswith("waiting for an answer: the connection to 127.0.0.1 broke; asking again in 1 s")
    assert 4 <= len(lines) < 12  # one each ten seconds on a machine that is slow
