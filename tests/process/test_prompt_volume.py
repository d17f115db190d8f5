"""A volume that is full, or fills up while a prompt is written: the real engine serves on and leaves nothing behind."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cache_restart import SHAPES, Engine, Rig, tokens, wait_saved, wait_write
from tests.mounts import fill_up, tmpfs
from tests.process.stages.boot import eventually
from tests.process.stages.engine import find_engine
from tests.shapes.write import write_gguf

MIB = 2**20
SIZE = 256 * MIB
IDLE_S = 4.0  # the engine has tried to save by then
COUNT = 1_000  # tokens: a state of 16 MiB, long enough in writing to be stopped in the middle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_gguf(path, SHAPES["attention"], quantization="Q8_0", with_data=True)


@pytest.fixture
def rig(model: Path, tmp_path: Path) -> Iterator[Rig]:
    with tmpfs(tmp_path / "volume", f"size={SIZE}") as volume:
        yield Rig(
            engine=find_engine("llama-server"),
            model=model,
            folder=volume / "prompts",
            context=2048,
            log=tmp_path / "log",
        )


def lines(rig: Rig) -> list[str]:
    """Return what the engine tells of prompts that it does not save."""
    text = rig.log.read_text("utf-8", errors="replace")
    return [line.partition("not saved: ")[2] for line in text.splitlines() if "prompt disk: not saved: " in line]


def fill(rig: Rig) -> Path:
    path = rig.folder.parent / "fill"
    fill_up(path, SIZE)
    return path


def ask(engine: Engine, seed: int) -> int:
    """Return how many tokens of the prompt came from disk."""
    return int(engine.complete(tokens(random.Random(seed), COUNT))["timings"]["disk_n"])


def test_a_full_volume_is_told_once_and_used_again_when_it_has_room(rig: Rig) -> None:
    with rig.running() as engine:
        filled = fill(rig)
        ask(engine, 1)
        eventually(lambda: lines(rig) == ["the volume is full"], timeout_s=30)
        ask(engine, 2)
        time.sleep(IDLE_S)
        assert lines(rig) == ["the volume is full"]
        assert list(rig.folder.iterdir()) == []
        filled.unlink()
        ask(engine, 3)
        wait_saved(rig)
    with rig.running() as engine:
        assert ask(engine, 3) >= COUNT - 8


def test_a_volume_that_fills_up_in_mid_write_keeps_no_piece(rig: Rig) -> None:
    with rig.running() as engine:
        ask(engine, 1)
        wait_write(rig)
        engine.process.send_signal(signal.SIGSTOP)
        assert [path.name[0] for path in rig.folder.iterdir()] == ["."], "stopped in mid-write"
        filled = fill(rig)
        engine.process.send_signal(signal.SIGCONT)
        eventually(lambda: lines(rig) == ["No space left on device"], timeout_s=30)
        assert list(rig.folder.iterdir()) == []
        filled.unlink()
        ask(engine, 2)
        wait_saved(rig)


def test_a_volume_without_a_free_inode_is_told_once(model: Path, rig: Rig, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "narrow", f"size={SIZE},nr_inodes=2") as volume:
        narrow = replace(rig, folder=volume / "prompts")
        with narrow.running() as engine:
            ask(engine, 1)
            eventually(lambda: lines(narrow) == ["No space left on device"], timeout_s=30)
            ask(engine, 2)
            time.sleep(IDLE_S)
            assert lines(narrow) == ["No space left on device"]
            assert list(narrow.folder.iterdir()) == []
