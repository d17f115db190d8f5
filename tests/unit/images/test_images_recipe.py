"""Recipes as files, the choice among their weights, and fetching from a host that does what the test says."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from appliance.image_facts import parse_image_facts
from images import __main__ as command
from images import fetch, model, recipe
from images.errors import BuildError, MatrixError, UsageError
from images.matrix import Cell
from images.recipe import Recipe, Weights

BYTES = b"GGUF" + bytes(1000)
SHA256 = hashlib.sha256(BYTES).hexdigest()


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_recipe_is_sound_and_names_itself(project: Path) -> None:
    names = [path.stem for path in (project / recipe.MODELS).glob("*.yaml")]
    assert {"demo", "qwen"} <= set(names)
    assert [recipe.load(project, name).name for name in names] == names


def test_weights_that_were_never_here_have_an_address_by_revision_and_a_source(project: Path) -> None:
    for weights in recipe.load(project, "qwen").weights:
        assert weights.url
        assert weights.url.endswith(f"/{weights.file}")
        assert weights.source


@pytest.mark.parametrize(
    ("memory_mib", "file"),
    [
        (None, "Qwen3-4B-Q4_K_M.gguf"),
        (2400, "Qwen3-1.7B-Q8_0.gguf"),
        (8192, "Qwen3-8B-Q4_K_M.gguf"),
        (16 * 1024, "Qwen3-14B-Q4_K_M.gguf"),
        (24 * 1024, "Qwen3-30B-A3B-Q4_K_M.gguf"),
        (80 * 1024, "Qwen3-32B-Q4_K_M.gguf"),
    ],
)
def test_the_largest_weights_that_leave_a_quarter(project: Path, memory_mib: int | None, file: str) -> None:
    assert recipe.choose(recipe.load(project, "qwen"), memory_mib).file == file


def test_too_little_memory_is_exit_2_and_says_how_much_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "qwen", "--memory-mib", "1024", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "no weights of qwen fit into 1024 MiB" in said
    assert "Qwen3-1.7B-Q8_0.gguf, takes 2333 MiB" in said


def test_a_budget_without_a_model_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--memory-mib", "4096"]) == 2
    assert "--model qwen" in capsys.readouterr().err


def test_an_unknown_recipe_is_exit_10_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--model", "quen"]) == 10
    assert "no such recipe: quen\nhint: there are demo, qwen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"default": "other.gguf"}, "default is none of its weights: other.gguf"),
        ({"weights": []}, "at least 1 item"),
        ({"name": "Qwen 3"}, "should match pattern"),
        ({"weihgts": []}, "images/models/x.yaml: unknown key: weihgts"),
        ({"url": "https://host/x/resolve/main/w.gguf"}, "should match pattern"),
        ({"source": None}, "has a size and a hash without a source"),
        ({"url": None}, "comes from a wheel or from a url"),
        ({"sha256": "abc"}, "should match pattern"),
        ({"file": "../w.gguf"}, "should match pattern"),
    ],
)
def test_a_file_that_is_no_recipe_is_exit_10(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {"file": "w.gguf", "bytes": 1, "sha256": SHA256, "url": f"https://host/{'0' * 40}/w.gguf", "source": "s"}
    of_weights = {key: value for key, value in change.items() if key in weights}
    data = {"name": "x", "license": "MIT", "default": "w.gguf", "weights": [{**weights, **of_weights}]}
    data |= {key: value for key, value in change.items() if key not in weights}
    (tmp_path / recipe.MODELS).mkdir(parents=True)
    (tmp_path / recipe.MODELS / "x.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(MatrixError) as caught:
        recipe.load(tmp_path, "x")
    assert message in caught.value.message


def test_weights_are_fetched_once_and_whole(tmp_path: Path, host: str) -> None:
    weights = from_host(f"{host}/whole")
    assert fetch.fetch(tmp_path, weights, tmp_path / "m", ca_bundle=None).read_bytes() == BYTES
    asked = Host.asked
    fetch.fetch(tmp_path, weights, tmp_path / "m", ca_bundle=None)
    assert Host.asked == asked
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["w.gguf"]


@pytest.mark.parametrize(
    ("path", "message"), [("other", "weights are not what was announced"), ("cut", "weights cannot be fetched"),
                          ("missing", "404")]
)  # fmt: skip
def test_what_is_not_whole_is_not_kept(tmp_path: Path, host: str, path: str, message: str) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        fetch.fetch(tmp_path, from_host(f"{host}/{path}"), tmp_path / "m", ca_bundle=None)
    assert caught.value.hint
    assert list((tmp_path / "m").iterdir()) == []


def test_a_model_image_has_its_cells_facts_and_the_recipe(project: Path, cell: Cell) -> None:
    demo = recipe.load(project, "demo")
    facts = parse_image_facts(model.facts(project, cell, demo, demo.weights[0], build_id="b" * 32))
    assert (facts.build_id, facts.cell) == ("b" * 32, "llama-cpu")
    assert facts.recipe
    assert (facts.recipe.name, facts.recipe.file) == ("demo", demo.default)
    assert facts.recipe.sha256 == demo.weights[0].sha256


def test_select_names_the_alias(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["select", "--platform", "linux/amd64", "--sm", "90", "--driver", "580.95.05", "--alias", "demo"]
    assert command.main([*words, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["alias"], found["tag"]) == ("appliance/demo", f"appliance/demo:{found['cell']}")


def test_an_alias_of_no_recipe_is_exit_10(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--sm", "90", "--alias", "nothing"]) == 10
    assert "no such recipe: nothing" in capsys.readouterr().err


def from_host(url: str) -> Weights:
    """A local host speaks no TLS, which a recipe's file may not leave out."""
    return Weights.model_construct(file="w.gguf", bytes=len(BYTES), sha256=SHA256, wheel=None, url=url, source="s")


def test_recipes_take_no_choice_of_weights_for_granted() -> None:
    with pytest.raises(UsageError):
        recipe.choose(Recipe.model_construct(name="x", weights=(from_host(""),), default="w.gguf", license="MIT"), 0)


class Host(BaseHTTPRequestHandler):
    """/whole, /other with one byte changed, /cut after half of what it announced, and 404 for the rest."""

    asked: ClassVar[int] = 0

    def do_GET(self) -> None:
        Host.asked += 1
        known = {"/whole": BYTES, "/other": BYTES[:-1] + b"x", "/cut": BYTES[:500]}
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(BYTES) if self.path in known else 0))
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        pass
