"""A volume that fills up while the appliance serves, and has room again: what serves, and what is on it afterwards."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.mounts import tmpfs
from tests.process.stages.boot import Home, Serving, eventually, write_model

WAIT_S = 120.0
NARROW = {"ubatch": "512", "load_mode": "mmap", "kv_type": "f16", "speculation": "off", "budget_s": "5"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """Return a home on a volume of 2 MiB."""
    home = Home.make(tmp_path / "home")
    shutil.rmtree(home.data)
    with tmpfs(home.data, "size=2m"):
        (home.data / "models").mkdir()
        write_model(home.data / "models/small.gguf")
        yield home


def fill(home: Home) -> Path:
    """Fill the volume to the last page, and return the file that does."""
    path = home.data / "fill"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(home.data).f_bavail == 0
    return path


def said(serving: Serving, name: str) -> list[str]:
    return [event["message"] for event in serving.events if event["event"] == name]


def assert_whole(home: Home) -> None:
    for path in home.profiles.iterdir():
        assert not path.name.endswith(".tmp")
        if path.suffix in (".json", ".partial"):
            json.loads(path.read_text())


def test_measuring_on_a_full_volume_serves_from_memory_and_is_kept_when_there_is_room(home: Home) -> None:
    with home.serving(tune="idle", idle_s="3600", **NARROW) as serving:
        serving.wait_ready()
        filler = fill(home)
        assert serving.chat()[0] == 200
        shown = home.command("key", beside=serving)
        assert (shown.returncode, shown.stdout.strip()) == (0, home.key)
        begin = partial(serving.ask, "POST", "/appliance/v1/tuning", key=home.key)
        assert begin()[0] == 202
        eventually(lambda: begin()[0] == 200, timeout_s=WAIT_S, what=lambda: serving.text)
        (words,) = said(serving, "not_kept")
        assert "No space left on device; it is used from memory, and kept when the volume has room" in words
        assert serving.document("profile")["speed"] == serving.document("status")["speed"]
        assert serving.chat()[0] == 200
        assert list(home.profiles.glob("*.json")) == []
        assert_whole(home)
        filler.unlink()
        assert begin()[0] == 200
        serving.event("profile_kept", timeout_s=WAIT_S)
        serving.terminate()
    (path,) = home.profiles.glob("*.json")
    assert_whole(home)
    assert not list(home.profiles.glob("*.partial"))
    with home.serving(tune="idle", idle_s="3600", **NARROW) as serving:
        serving.wait_ready()
        assert path.stem in said(serving, "profile_used")[0]
        serving.terminate()


def test_what_was_measured_before_a_request_is_not_lost_though_the_volume_is_full(home: Home) -> None:
    with home.serving(tune="idle", idle_s="3600", **{**NARROW, "budget_s": "60"}) as serving:
        serving.wait_ready()
        fill(home)
        assert serving.ask("POST", "/appliance/v1/tuning", key=home.key)[0] == 202
        serving.event("tune_measured", timeout_s=WAIT_S)
        assert serving.chat()[0] == 200
        assert serving.event("tune_goes_on", timeout_s=WAIT_S)["message"].startswith("resuming an interrupted tuning")
        serving.terminate()
    assert_whole(home)


def test_a_volume_that_fills_up_while_it_is_measured_first_is_no_end(home: Home) -> None:
    with home.serving(tune="first", **NARROW) as serving:
        serving.event("tune_step", timeout_s=WAIT_S)
        fill(home)
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert serving.document("status")["tuning"] == "measured"
        assert serving.document("profile")["measurements"]
        assert len(said(serving, "not_kept")) == 1
        serving.terminate()
    assert list(home.profiles.glob("*.json")) == []
    assert_whole(home)


def test_the_verb_tune_ends_with_50_when_its_result_cannot_be_kept(home: Home) -> None:
    home.set_engine("--load-seconds", "0.3")
    filler = home.data / "fill"
    with filler.open("wb") as file, suppress(OSError):
        file.write(bytes(2 * 2**20 - 160 * 1024))  # room to open the volume, and for no measurement
    fill_rest = home.folder / "engine/llama-server"
    fill_rest.write_text(fill_rest.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\ncat /dev/zero >>{filler} 2>&1\n", 1))
    done = home.command("tune", beside=None, **NARROW)
    assert done.returncode == 50, done.stderr
    assert "what was measured cannot be kept" in done.stderr
