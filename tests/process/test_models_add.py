"""`appliance models add` as a process that is stopped in the middle."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.signals import hear_all

ROOT = Path(__file__).parents[2]
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "appliance", "models", "add", name, "--data-dir", str(tmp_path)]
        running.append(
            subprocess.Popen(
                argv,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=hear_all,
            )
        )
        return running[-1]

    yield begin
    for program in running:
        program.kill()
        program.communicate()


def part_of(folder: Path, name: str) -> Path:
    deadline = time.monotonic() + 90
    while not (found := list((folder / "models").glob(f".{name}.*.part"))):
        assert time.monotonic() < deadline, "no part was begun"
        time.sleep(0.02)
    return found[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_removes_the_part(
    tmp_path: Path, begin: Callable[[str], subprocess.Popen[bytes]], number: signal.Signals, code: int
) -> None:
    program = begin("a.gguf")
    part_of(tmp_path, "a.gguf")
    program.send_signal(number)
    assert program.wait(60) == code
    assert list((tmp_path / "models").iterdir()) == []


def test_the_next_add_drops_what_a_killed_one_left_and_spares_a_running_one(
    tmp_path: Path, begin: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    killed, running = begin("killed.gguf"), begin("running.gguf")
    left, live = part_of(tmp_path, "killed.gguf"), part_of(tmp_path, "running.gguf")
    killed.kill()
    killed.wait(60)
    assert left.exists()
    out, err = begin("next.gguf").communicate(GGUF, timeout=90)
    assert out.startswith(b"next.gguf: 24 bytes"), err
    assert not left.exists()
    assert live.exists()
    out, err = running.communicate(GGUF, timeout=90)
    assert out.startswith(b"running.gguf: 24 bytes"), err
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["next.gguf", "running.gguf"]
