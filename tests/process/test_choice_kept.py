"""A choice among files that are here: damaged ones are passed over, and an earlier choice stays while it fits."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mounts import tmpfs
from tests.process.stages.boot import Home
from tests.process.stages.recipe import empty_home, error_of, fill_hub, put

NAMES = ("small-q8_0", "large-q4_0", "large-q8_0")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_hub(tmp_path_factory.mktemp("hub") / "files")


def damage(path: Path) -> None:
    """Overwrite the first 4,096 bytes of the file. Its size stays."""
    with path.open("r+b") as file:
        file.write(b"\xff" * 4096)


def files_of(home: Home) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(home.command("plan", "--files", "--json").stdout)
    return found


def verdicts(home: Home) -> dict[str, str]:
    return {row["model"]: row["verdict"] for row in files_of(home)["files"]}


def test_a_damaged_file_is_its_own_rows_verdict_and_the_others_are_served(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        for name in NAMES:
            put(home, weights, f"Tiny-{name}.gguf")
        damage(home.data / "models/Tiny-large-q4_0.gguf")
        assert verdicts(home) == {"tiny:small-q8_0": "fits", "tiny:large-q4_0": "damaged", "tiny:large-q8_0": "chosen"}
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.event("model_chosen")["model"] == "tiny:large-q8_0"
            assert "Tiny-large-q4_0.gguf" in serving.event("model_damaged")["message"]
            serving.terminate()
        assert hub.requests() == []
        code, text = error_of(home, model="tiny:large-q4_0")
        assert code == 30, text
        for name in NAMES:
            damage(home.data / f"models/Tiny-{name}.gguf")
        code, text = error_of(home)
        assert code == 30, text
        assert "none of the models that are here can be read" in text
        assert "`appliance models rm`" in text


def test_a_file_that_was_damaged_since_is_not_served_as_it_was_chosen(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        for name in NAMES:
            put(home, weights, f"Tiny-{name}.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            serving.terminate()
        damage(home.data / "models/Tiny-large-q4_0.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.event("model_chosen")["model"] == "tiny:large-q8_0"


def test_what_becomes_possible_later_is_said_and_not_taken(tmp_path: Path, weights: Path) -> None:
    """The volume has no room for the better file at first, and gets some later. `plan` says what a start would
    serve."""
    with empty_home(tmp_path, weights) as (home, hub):
        shutil.rmtree(home.data)
        with tmpfs(home.data, "size=20m"):
            (home.data / "models").mkdir()
            put(home, weights, "Tiny-small-q8_0.gguf")
            with home.serving() as serving:
                serving.wait_ready()
                assert serving.event("model_chosen")["model"] == "tiny:small-q8_0"
                assert "model_better" not in serving.names()
                serving.terminate()
            assert verdicts(home)["tiny:large-q4_0"] == "no room"
            subprocess.run(["mount", "-o", "remount,size=3g", str(home.data)], check=True)
            found = files_of(home)
            assert (found["chosen"], found["better"]) == ("tiny:small-q8_0", "tiny:large-q4_0")
            assert home.command("plan", "--dry-run").stdout.count("Tiny-small-q8_0.gguf") == 1
            for _ in range(2):  # the second of them does not choose anew
                with home.serving() as serving:
                    serving.wait_ready()
                    assert serving.event("model_chosen")["model"] == "tiny:small-q8_0"
                    assert "--model tiny:large-q4_0" in serving.event("model_better")["message"]
                    serving.terminate()
            assert hub.requests() == []
            (home.data / "models/Tiny-small-q8_0.gguf").unlink()
            assert files_of(home)["chosen"] == "tiny:large-q4_0"


def test_what_is_here_now_and_better_is_chosen(tmp_path: Path, weights: Path) -> None:
    """A user who fetches the better file by hand wants it."""
    with empty_home(tmp_path, weights) as (home, _):
        put(home, weights, "Tiny-large-q8_0.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            serving.terminate()
        put(home, weights, "Tiny-large-q4_0.gguf")
        with home.serving() as serving:
            serving.wait_ready()
            assert serving.event("model_chosen")["model"] == "tiny:large-q4_0"
            assert "model_better" not in serving.names()
