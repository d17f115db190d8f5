"""`python -m images` told to end while another program runs: it leaves nothing behind; an interrupt is 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.signals import hear_all

PROJECT = Path(__file__).parents[2]
# Writes who it is and what it started, says that it runs, and never ends by itself. $IGNORED: a signal that it ignores.
HANGING = """#!/bin/sh
trap "" $IGNORED
sleep 1000 &
echo $$ $! > "$PIDS"
echo running > "$FIFO"
wait
sleep 1000
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Opening it for reading waits until the program runs."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.fixture
def environment(tmp_path: Path, fifo: Path) -> Iterator[dict[str, str]]:
    yield {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PIDS": f"{tmp_path}/pids", "FIFO": str(fifo)}
    for pid in _left(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "words"),
    [("docker", ["list"]), ("nvidia-smi", ["select"]), ("git", ["build", "--only", "llama-cpu", "--dry-run"])],
)
def test_an_interrupt_ends_it_and_what_it_runs(
    tmp_path: Path, fifo: Path, environment: dict[str, str], program: str, words: list[str]
) -> None:
    """The signal goes to `images` alone, as `kill -INT` sends it: what a terminal does reaches the others as well."""
    done = _ended(tmp_path, fifo, {**environment, "IGNORED": "INT"}, program, words)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in done.stderr
    assert _left(tmp_path) == []


def test_what_ignores_the_request_to_end_is_killed(tmp_path: Path, fifo: Path, environment: dict[str, str]) -> None:
    done = _ended(tmp_path, fifo, {**environment, "IGNORED": "INT TERM"}, "docker", ["list"])
    assert done.returncode == 130
    assert _left(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_closed_terminal_and_a_request_to_end_leave_nothing(
    tmp_path: Path, fifo: Path, environment: dict[str, str], number: signal.Signals, code: int
) -> None:
    done = _ended(tmp_path, fifo, {**environment, "IGNORED": "INT HUP"}, "docker", ["list"], number)
    assert (done.returncode, done.stderr) == (code, "")
    assert _left(tmp_path) == []


def _ended(
    folder: Path,
    fifo: Path,
    environment: dict[str, str],
    program: str,
    words: list[str],
    number: signal.Signals = signal.SIGINT,
) -> subprocess.CompletedProcess[str]:
    """Run `images` with a program of this name that hangs, and send `number` as soon as that program runs."""
    (folder / program).write_text(HANGING)
    (folder / program).chmod(0o755)
    argv = [sys.executable, "-m", "images", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=PROJECT, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=hear_all
    ) as process:
        assert fifo.read_text() == "running\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _left(folder: Path) -> list[int]:
    """Return the pids that the program wrote down and that still run. A zombie counts as gone."""
    file = folder / "pids"
    pids = [int(word) for word in file.read_text().split()] if file.exists() else []
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
