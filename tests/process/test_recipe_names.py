"""`appliance models pull | verify | update | rm` with names of the image's recipe, and what lies there by hand."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.process.stages.recipe import REPO, cached, empty_home, fill_hub, put
from tests.unit.weights.cache_files import put_ollama


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill_hub(tmp_path_factory.mktemp("hub") / "files")


def test_every_verb_takes_a_name_of_the_recipe(tmp_path: Path, weights: Path) -> None:
    data = (weights / REPO / "Tiny-small-q8_0.gguf").read_bytes()
    with empty_home(tmp_path, weights) as (home, hub):
        assert home.command("models", "pull", "tiny:small").returncode == 0
        verified = home.command("models", "verify", "Tiny:small-q8")
        assert verified.stdout == (
            f"tiny:small-q8_0: Tiny-small-q8_0.gguf: sound, sha256 {hashlib.sha256(data).hexdigest()}\n"
        ), verified.stderr
        asked = len(hub.requests())
        (row,) = json.loads(home.command("models", "update", "tiny:small", "--json").stdout)
        assert (row["name"], row["state"], row["bytes"]) == ("tiny:small-q8_0", "of the recipe", len(data))
        all_of_it = home.command("models", "update").stdout
        assert f"{REPO}: kept: pinned to this revision; no branch or tag leads to it" in all_of_it
        assert len(hub.requests()) == asked
        assert home.command("models", "rm", "tiny").stdout.startswith("tiny:small-q8_0: removed")
        assert cached(home) == []
        for words in (("rm", "tiny:small"), ("verify", "tiny:small"), ("update", "tiny:small")):
            refused = home.command("models", *words)
            assert (refused.returncode, "hint: `appliance models" in refused.stderr) == (10, True), refused.stderr
        refused = home.command("models", "rm", "tiny:small-q4_0")
        assert (refused.returncode, "perhaps you meant tiny:small-q8_0" in refused.stderr) == (10, True)


def test_a_name_that_means_several_here_removes_none(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        for name in ("Tiny-large-q4_0.gguf", "Tiny-large-q8_0.gguf"):
            put(home, weights, name)
        refused = home.command("models", "rm", "tiny:large")
        assert refused.returncode == 10
        assert "matches 2 models on the volume\n  tiny:large-q4_0\n  tiny:large-q8_0" in refused.stderr
        assert home.command("models", "verify", "tiny:large").stdout.count(": sound, ") == 2
        assert home.command("models", "rm", "tiny:large-q4").returncode == 0
        assert [path.name for path in (home.data / "models").iterdir()] == ["Tiny-large-q8_0.gguf"]


def test_what_lies_there_by_hand_is_not_fetched_again(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        put(home, weights, "Tiny-small-q8_0.gguf")
        own = home.data / "models/Tiny-small-q8_0.gguf"
        done = home.command("models", "pull", "tiny:small", "--json")
        (row,) = json.loads(done.stdout)
        assert (row["state"], row["files"]) == ("present", [str(own)])
        assert (hub.requests(), cached(home)) == ([], [])
        data = own.read_bytes()
        own.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        done = home.command("models", "pull", "tiny:small", "--json")
        (row,) = json.loads(done.stdout)
        assert row["state"] == "fetched"
        assert f"a file of that name and size, put there by hand, has another hash and is served: {own}" in done.stderr


def test_a_name_that_a_mounted_folder_has_and_the_recipe_lacks(tmp_path: Path, weights: Path) -> None:
    put_ollama(tmp_path / "ollama", "library/tiny/7b", b"GGUF")
    with empty_home(tmp_path, weights) as (home, _):
        found = home.command("models", "verify", "tiny:7b", model_dirs=str(tmp_path / "ollama"))
        assert (found.returncode, found.stdout.startswith("tiny:7b: sha256-")) == (0, True), found.stderr
        refused = home.command("models", "rm", "tiny:7b", model_dirs=str(tmp_path / "ollama"))
        assert refused.returncode == 10
        assert "model is in Ollama's folder" in refused.stderr


def test_a_folder_of_publisher_and_repository_has_the_recipes_files_too(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, hub):
        own = home.data / "models" / REPO / "Tiny-small-q8_0.gguf"
        own.parent.mkdir(parents=True)
        own.write_bytes((weights / REPO / own.name).read_bytes())
        (row,) = json.loads(home.command("models", "pull", "tiny:small", "--json").stdout)
        assert (row["state"], row["files"]) == ("present", [str(own)])
        assert ": sound, sha256 " in home.command("models", "verify", "tiny:small").stdout
        with home.serving(model="tiny:small") as serving:
            serving.wait_ready()
            serving.terminate()
        assert str(own) in home.started[0]
        assert (hub.requests(), cached(home)) == ([], [])
        assert home.command("models", "rm", "tiny:small").returncode == 0
        assert not own.exists()


def test_a_pipe_on_the_volume_is_read_by_nobody(tmp_path: Path, weights: Path) -> None:
    with empty_home(tmp_path, weights) as (home, _):
        with home.serving() as serving:
            serving.wait_ready()
            serving.terminate()
        (choice,) = home.data.rglob("choice.json")
        ref = home.data / "models/models--org--Tiny-GGUF/refs/main"
        ref.parent.mkdir(exist_ok=True)
        for path in (choice, ref, home.profiles / "ab.json"):
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        assert home.command("models", "list").returncode == 0
        refused = home.command("profiles", "list")
        assert (refused.returncode, "ab.json: it is not a regular file" in refused.stderr) == (50, True), refused
        (home.profiles / "ab.json").unlink()
        assert "pinned to this revision" in home.command("models", "update", REPO).stdout
        with home.serving() as serving:
            serving.wait_ready()
            serving.terminate()
