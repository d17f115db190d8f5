"""Recipes as files, the choice among their weights, and fetching from a host that does what the test says."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from appliance.image_facts import Rung, dump_recipe, parse_image_facts, parse_recipe
from images import __main__ as command
from images.build import model
from images.errors import BuildError, MatrixError, UsageError
from images.matrix.matrix import Cell
from images.recipes import fetch, recipe
from images.recipes.recipe import FileRow, RecipeRow, RungRow

PIECE = 2**16
BYTES = b"GGUF" + bytes(4 * PIECE)
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


def test_what_an_image_carries_is_what_was_read(project: Path) -> None:
    for name in recipe.names(project):
        carried = recipe.as_recipe(recipe.load(project, name))
        assert parse_recipe(dump_recipe(carried)) == carried
        assert carried.default_rung.weights


def test_weights_that_were_never_here_have_an_address_by_revision_and_a_source(project: Path) -> None:
    for rung in recipe.as_recipe(recipe.load(project, "qwen")).rungs:
        assert rung.repo
        assert re.fullmatch("[0-9a-f]{40}", str(rung.revision))
        assert re.search(r"\S+/\S+ \S+ at [0-9a-f]{40}, read 20\d\d-\d\d-\d\d", rung.source)


def test_a_rung_is_found_by_the_only_beginning_of_its_name(project: Path) -> None:
    row = recipe.load(project, "qwen")
    assert recipe.find_rung(row, "14b").name == "14b-q4_k_m"
    assert recipe.find_rung(row, "14b-a").name == "14b-awq"
    assert recipe.find_rung(row, "4b-q4_k_m").name == "4b-q4_k_m"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("8b-q", "qwen has 2 rungs of that name: 8b-q", "there are 8b-q4_k_m, 8b-q6_k"),
        ("4b-q4_k_n", "qwen has no rung of that name: 4b-q4_k_n", "perhaps you meant 4b-q4_k_m"),
    ],
)
def test_a_rung_that_nobody_can_tell(project: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe.find_rung(recipe.load(project, "qwen"), name)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"default": "135m-q4_1"', '"default": "135m"', "Recipe cannot be"),
        ('"schema": 1', '"schema": 2', "recipe have another schema"),
        ('"tier": "balanced"', '"tier": "best"', "Invalid enum value 'best'"),
        ('"bytes"', '"byte"', "missing required field `bytes`"),
        ('"path": "SmolLM2', '"path": "mmproj-SmolLM2', r"Recipe.rungs\[0\] cannot be"),
        ("{", "[", "recipe are not JSON"),
    ],
)
def test_a_damaged_recipe_is_refused(project: Path, old: str, new: str, message: str) -> None:
    text = dump_recipe(recipe.as_recipe(recipe.load(project, "demo")))
    assert old in text
    with pytest.raises(ValueError, match=message):
        parse_recipe(text.replace(old, new))


@pytest.mark.parametrize(
    ("memory_mib", "name"),
    [
        (None, "4b-q4_k_m"),
        (2400, "1.7b-q8_0"),
        (8192, "8b-q4_k_m"),
        (16 * 1024, "14b-q4_k_m"),
        (24 * 1024, "3.6-35b-a3b-ud-iq4_xs"),
        (80 * 1024, "30b-a3b-2507-q8_0"),
    ],
)
def test_the_largest_weights_that_leave_a_quarter(project: Path, memory_mib: int | None, name: str) -> None:
    assert recipe.choose(recipe.load(project, "qwen"), memory_mib).name == name


def test_too_little_memory_is_exit_2_and_says_how_much_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "qwen", "--memory-mib", "512", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "no weights of qwen fit into 512 MiB" in said
    assert "3.5-0.8b-q4_k_m, takes 678 MiB" in said


def test_a_budget_without_a_model_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--memory-mib", "4096"]) == 2
    assert "--model qwen" in capsys.readouterr().err


def test_an_unknown_recipe_is_exit_10_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", "--model", "quen"]) == 10
    assert "no such recipe: quen\nhint: perhaps you meant qwen" in capsys.readouterr().err


RECIPE = f"""
name: x
license: MIT
vendors: [org]
default: 1b-q4_0
models:
  1b: {{parameters_b: 1.0, active_b: 1.0}}
rungs:
  - name: 1b-q4_0
    model: 1b
    tier: balanced
    format: gguf
    quantization: Q4_0
    repo: org/x-GGUF
    revision: {"a" * 40}
    files:
      - {{path: x-q4_0.gguf, bytes: 10, sha256: {SHA256}}}
    source: [here]
sources:
  here: {{repo: org/public, path: a.json, commit: {"b" * 40}, read: 2026-11-22}}
"""
FILE = f"{{path: x-q4_0.gguf, bytes: 10, sha256: {SHA256}}}"


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("default: 1b-q4_0", "default: 1b-q4", "x.yaml: default: none of 1b-q4_0: 1b-q4", "perhaps you meant 1b-q4_0"),
        ("name: x", "name: y", "name: it is not the file's: y", "name: x"),
        ("name: x", "name: Qwen 3", "name: String should match pattern", ""),
        (
            "tier: balanced",
            "tier: best",
            "rungs.0.tier: Input should be 'quality', 'balanced' or 'compact': 'best'",
            "",
        ),
        ("    tier:", "    teir:", "unknown key: rungs.0.teir", "perhaps you meant tier"),
        ("model: 1b", "model: 1bb", "rungs.0.model: none of 1b: 1bb", "perhaps you meant 1b"),
        ("  1b: {", "  3b: {parameters_b: 3, active_b: 3}\n  1b: {", "no rung is of the model: 3b", "take it out"),
        ("    source: [here]", "", "has sizes and hashes without a source", ""),
        ("source: [here]", "source: [her]", "cites a source that is not there: her", "perhaps you meant here"),
        ("revision: ", "# ", "a repo has a revision", ""),
        ("repo: org/x-GGUF", "url: https://host/x.gguf", "a repo has a revision", ""),
        ("repo: org/x-GGUF", "# none", "comes from a repo, from a url, from a wheel, or is made of", ""),
        (SHA256, "abc", "rungs.0.files.0.sha256: String should match pattern", ""),
        ("x-q4_0.gguf", "../x.gguf", "rungs.0.files.0.path: String should match pattern", ""),
        ("x-q4_0.gguf", "a/.x.gguf", "rungs.0.files.0.path: String should match pattern", ""),
        ("x-q4_0.gguf", "mmproj-x.gguf", "one projector at most, behind the weights", ""),
        ("x-q4_0.gguf", "x-00002-of-00002.gguf", "its parts are not 1 to 1", ""),
        (f"- {FILE}", f"- {FILE}\n      - {FILE}", "its parts are not 1 to 2", ""),
        ("bytes: 10", "bytes: 0", "rungs.0.files.0.bytes: Input should be greater than 0", ""),
        ("active_b: 1.0", "active_b: -1", "models.1b.active_b: Input should be greater than 0", ""),
        ("models:", "models: []\nmodels:", "key is there twice: models", ""),
    ],
)
def test_a_file_that_is_no_recipe_is_exit_10(tmp_path: Path, old: str, new: str, message: str, hint: str) -> None:
    assert old in RECIPE
    with pytest.raises(MatrixError) as caught:
        load_text(tmp_path, RECIPE.replace(old, new, 1))
    assert message in caught.value.message
    assert "images/models/x.yaml" in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_better_tier_is_never_the_smaller_one(tmp_path: Path) -> None:
    row = RECIPE.partition("rungs:\n")[2].partition("sources:")[0]
    better = row.replace("1b-q4_0", "1b-q3").replace("balanced", "quality").replace("bytes: 10", "bytes: 9")
    with pytest.raises(MatrixError, match="1b-q3 is of tier quality and smaller than 1b-q4_0: balanced"):
        load_text(tmp_path, RECIPE.replace("sources:", f"{better}sources:"))


MADE = f"""\
  - name: 1b-bf16
    model: 1b
    tier: balanced
    format: safetensors
    quantization: BF16
    made_of: 1b-q4_0
    files:
      - {{path: X/model.safetensors, bytes: 20, sha256: {SHA256}}}
      - {{path: X/config.json, bytes: 2, sha256: {SHA256}}}
"""


def test_a_rung_may_be_made_of_another_one(tmp_path: Path) -> None:
    row = load_text(tmp_path, RECIPE.replace("sources:", f"{MADE}sources:"))
    made = recipe.choose(row, None, "safetensors")
    assert (made.name, made.made_of) == ("1b-bf16", "1b-q4_0")
    (rung,) = recipe.as_recipe(row).find("1b-bf16")
    assert (rung.repo, rung.url, rung.source) == (None, None, "made of 1b-q4_0")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("made_of: 1b-q4_0", "made_of: 1b-q4", "rungs.1.made_of: none of 1b-q4_0: 1b-q4"),
        ("made_of: 1b-q4_0", "made_of: 1b-bf16", "rungs.1.made_of: none of 1b-q4_0: 1b-bf16"),
        ("X/config.json", "Y/config.json", "is one folder of safetensors"),
        ("made_of", "url: https://host/x\n    made_of", "comes from a repo, from a url, from a wheel, or is made of"),
    ],
)
def test_what_a_rung_is_made_of_is_one_gguf_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        load_text(tmp_path, RECIPE.replace("sources:", f"{MADE.replace(old, new, 1)}sources:"))
    assert message in caught.value.message


def test_parts_and_projector_are_told_apart(tmp_path: Path) -> None:
    files = [
        f"{{path: {name}, bytes: 10, sha256: {SHA256}}}"
        for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "mmproj-x.gguf")
    ]
    row = load_text(tmp_path, RECIPE.replace(f"- {FILE}", "\n      ".join(f"- {file}" for file in files)))
    rung: Rung = recipe.as_recipe(row).default_rung
    assert [file.path for file in rung.weights] == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
    assert rung.projector
    assert (rung.projector.path, rung.bytes) == ("mmproj-x.gguf", 30)


def load_text(root: Path, text: str) -> RecipeRow:
    (root / recipe.MODELS).mkdir(parents=True)
    (root / recipe.MODELS / "x.yaml").write_text(text)
    return recipe.load(root, "x")


def test_weights_are_fetched_once_and_whole(tmp_path: Path, host: str) -> None:
    rung = from_host(f"{host}/whole")
    (found,) = fetch.fetch(tmp_path, rung, tmp_path / "m", ca_bundle=None)
    assert found.read_bytes() == BYTES
    asked = Host.asked
    fetch.fetch(tmp_path, rung, tmp_path / "m", ca_bundle=None)
    assert Host.asked == asked
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["w.gguf"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "message", "kept"), [("other", "weights are not what was announced", 0), ("missing", "404", 0),
                                  ("cut", "weights cannot be fetched", PIECE), ("more", "have another size", 0)]
)  # fmt: skip
def test_what_is_not_whole_is_taken_for_nothing(tmp_path: Path, host: str, path: str, message: str, kept: int) -> None:
    with pytest.raises(BuildError, match=message) as caught:
        fetch.fetch(tmp_path, from_host(f"{host}/{path}"), tmp_path / "m", ca_bundle=None)
    assert caught.value.hint
    assert not (tmp_path / "m/w.gguf").exists()
    assert sum(part.stat().st_size for part in (tmp_path / "m").iterdir()) == kept


def test_what_broke_off_goes_on_where_it_ended(tmp_path: Path, host: str) -> None:
    (tmp_path / f".fetch-{SHA256}").write_bytes(BYTES[:700])
    Host.sent = 0
    (found,) = fetch.fetch(tmp_path, from_host(f"{host}/ranges"), tmp_path, ca_bundle=None)
    assert found.read_bytes() == BYTES
    assert Host.sent == len(BYTES) - 700


def test_a_connection_that_breaks_is_made_again(tmp_path: Path, host: str) -> None:
    said: list[str] = []
    (found,) = fetch.fetch(tmp_path, from_host(f"{host}/breaks"), tmp_path, ca_bundle=None, say=said.append)
    assert found.read_bytes() == BYTES
    assert "broke off after 65,536 bytes" in said[0]


def test_weights_of_a_repository_come_from_the_hub_that_is_named(project: Path) -> None:
    rung = recipe.load(project, "gpt-oss").default_rung
    path = f"ggml-org/gpt-oss-20b-GGUF/resolve/{rung.revision}/gpt-oss-20b-mxfp4.gguf"
    assert fetch.address_of(rung, rung.files[0]) == f"https://huggingface.co/{path}"
    assert fetch.address_of(rung, rung.files[0], "http://mirror/hf/") == f"http://mirror/hf/{path}"


def test_a_disk_without_room_is_told_before_the_first_byte(tmp_path: Path, host: str) -> None:
    huge = from_host(f"{host}/whole").model_copy(
        update={"files": (FileRow(path="w.gguf", bytes=2**60, sha256=SHA256),)}
    )
    with pytest.raises(
        BuildError, match=r"no room for the weights: w\.gguf needs 1,152,921,504,606,846,976 bytes more"
    ):
        fetch.fetch(tmp_path, huge, tmp_path, ca_bundle=None)


def test_a_model_image_has_its_cells_facts_and_the_recipe(project: Path, cell: Cell) -> None:
    demo = recipe.as_recipe(recipe.load(project, "demo"))
    facts = parse_image_facts(model.facts(project, cell, demo, build_id="b" * 32))
    assert (facts.build_id, facts.cell, facts.recipe) == ("b" * 32, "llama-cpu", "demo")


@pytest.mark.thorough
def test_select_names_the_alias(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["select", "--platform", "linux/amd64", "--sm", "90", "--driver", "580.95.05", "--alias", "demo"]
    assert command.main([*words, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["alias"], found["tag"]) == ("appliance/demo", f"appliance/demo:{found['cell']}")


@pytest.mark.thorough
def test_an_alias_of_no_recipe_is_exit_10(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["select", "--sm", "90", "--alias", "nothing"]) == 10
    assert "no such recipe: nothing" in capsys.readouterr().err


def from_host(url: str) -> RungRow:
    """A local host speaks no TLS, which a recipe's file may not leave out."""
    file = FileRow(path="w.gguf", bytes=len(BYTES), sha256=SHA256)
    return RungRow.model_construct(name="w", url=url, files=(file,), wheel=None)


class Host(BaseHTTPRequestHandler):
    """/whole, /other with one byte changed, /more than announced, /cut after a piece of what it announced, /ranges,
    /breaks after a piece of each range, and 404 for the rest.
    """

    asked: ClassVar[int] = 0
    sent: ClassVar[int] = 0

    def do_GET(self) -> None:
        Host.asked += 1
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if self.path not in ("/ranges", "/breaks"):
            begin = 0
        rest = BYTES[begin:]
        known = {"/whole": BYTES, "/other": BYTES[:-1] + b"x", "/more": BYTES + b"x", "/cut": BYTES[:PIECE]}
        known |= {"/ranges": rest, "/breaks": rest[:PIECE]}
        body = known.get(self.path, b"")
        announced = {"/cut": len(BYTES), "/breaks": len(rest)}.get(self.path, len(body))
        self.send_response(206 if begin else 200 if self.path in known else 404)
        self.send_header("Content-Length", str(announced))
        self.end_headers()
        Host.sent += len(body)  # before the client has all of it, and the test asks
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
