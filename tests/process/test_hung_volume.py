"""A volume that hangs, as a network share whose server is gone: writers hang in the kernel, and models answer on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import FreezableDisk, freezable
from tests.process.stages.boot import ROOT, Home, Serving, eventually, is_alive
from tests.process.test_fleet import STRICT, chat, loaded, post


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FreezableDisk]:
    with freezable(tmp_path / "data", tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def home(tmp_path: Path, disk: FreezableDisk) -> Home:
    """Three models, on a disk that can be frozen."""
    home = Home.make(tmp_path / "home")
    shutil.copytree(home.data, disk.folder, dirs_exist_ok=True)
    shutil.rmtree(home.data)
    home.data.symlink_to(disk.folder)
    for name in ("second", "third"):
        shutil.copy(home.data / "models/small.gguf", home.data / f"models/{name}.gguf")
    (home.data / "appliance.yaml").write_text(STRICT)
    return home


def assert_answers(front: Serving, *names: str) -> None:
    for name in names:
        assert chat(front, name)[0] == 200, front.text
    for path in ("/health/live", "/health/ready"):
        assert front.ask("GET", path)[0] == 200
    for path in ("/v1/models", "/metrics", "/appliance/v1/usage", "/appliance/v1/fleet"):
        assert front.ask("GET", path, key=front.home.key)[0] == 200, path


def test_loaded_models_answer_on_it_is_told_once_and_over_once(home: Home, disk: FreezableDisk) -> None:
    with home.serving(load_wait_s="1") as front:
        front.wait_ready()
        eventually(lambda: chat(front, "b")[0] == 200)  # a load may take longer than a request waits here
        disk.freeze()
        assert post(front, "/models/unload", "b")[0] == 200  # it is written down who is loaded, which hangs
        eventually(lambda: loaded(front) == {"a"})
        assert_answers(front, "a")
        status, answer = chat(front, "c")  # a load takes the lock of the volume
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        front.event("volume_silent")
        assert_answers(front, "a")
        assert front.document("status")["volume_problem"] == f"volume does not answer: {home.data}"
        disk.thaw()
        front.event("volume_answers")
        for name in ("b", "c"):
            eventually(lambda: chat(front, name)[0] == 200, what=lambda: front.text)  # noqa: B023 - called at once
        assert front.document("status")["volume_problem"] is None
        assert [front.names().count(name) for name in ("volume_silent", "volume_answers")] == [1, 1]
        front.terminate()


def test_a_stop_ends_all_that_the_kernel_lets_end(home: Home, disk: FreezableDisk) -> None:
    with home.serving() as front:
        front.wait_ready()
        assert chat(front, "b")[0] == 200
        engines = front.engine_pids()
        disk.freeze()
        assert post(front, "/models/unload", "b")[0] == 200
        eventually(lambda: loaded(front) == {"a"})
        front.process.send_signal(signal.SIGTERM)
        front.event("stopped")
        # A thread that hangs in the kernel keeps the process's number until the disk answers.
        eventually(lambda: not is_alive(front.process.pid), what=lambda: front.text)
        assert not any(map(is_alive, engines))
        assert front.ask("GET", "/health/live")[0] == 0
        disk.thaw()
        assert front.wait_exit() == 0


def test_measuring_goes_on_in_memory(home: Home, disk: FreezableDisk) -> None:
    (home.data / "appliance.yaml").unlink()
    with home.serving(tune="idle", idle_s="3600", model="small.gguf", budget_s="20") as front:
        front.wait_ready()
        front.measure_now()
        front.event("tune_measured")
        disk.freeze()
        measured = front.names().count("tune_measured")
        eventually(lambda: front.names().count("tune_measured") > measured, what=lambda: front.text)
        assert_answers(front, "small")
        disk.thaw()
        front.measure_now()
        eventually(lambda: list(home.profiles.glob("*.json")), what=lambda: front.text)
        assert front.terminate()


def test_doctor_says_that_the_volume_does_not_answer(home: Home, disk: FreezableDisk, tmp_path: Path) -> None:
    disk.freeze()
    said = tmp_path / "said"
    with said.open("wb") as file:
        command = [sys.executable, "-m", "appliance", "doctor"]
        asking = subprocess.Popen(command, env=home.environment(tmp_path), stdout=file, stderr=file, cwd=ROOT)
    eventually(lambda: not is_alive(asking.pid))  # as a stop, it ends as far as the kernel lets it end
    disk.thaw()
    assert asking.wait(60) == 50
    assert f"volume does not answer: {home.data}" in said.read_text()
