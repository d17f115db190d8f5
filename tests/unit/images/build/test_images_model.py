"""Model images before an engine is asked: their names, the context of their build, and what a command line may ask."""

from __future__ import annotations

import hashlib
import json
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.image_facts import Recipe, RecipeFile, Rung, dump_recipe, parse_recipe
from images import __main__ as command
from images.build import model
from images.build.model import Weights
from images.errors import UsageError
from images.layers.tree import Tree, read_tree
from images.matrix import space
from images.recipes import recipe

EPOCH_S = 1_700_000_000
TEXTS = {"image_facts.json": "{}", "recipe.json": "[]"}
PARTS = {"x/weights-00001-of-00002.gguf": b"one", "x/weights-00002-of-00002.gguf": b"two", "mmproj-x.gguf": b"eye"}
REVISION = "a" * 40


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Return three files of a repository in the state that `fetch` leaves: with their own mode and date."""
    folder = tmp_path / "fetched"
    folder.mkdir()
    for path, data in PARTS.items():
        (folder / Path(path).name).write_bytes(data)
        (folder / Path(path).name).chmod(0o600)
    files = tuple(
        RecipeFile(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for path, data in PARTS.items()
    )
    rung = Rung(
        name="1b-q4_0", tier="balanced", format="gguf", repo="org/x-GGUF", revision=REVISION, files=files,
        parameters_b=1, active_b=1, shape=None, loss=None, loss_source=None, url=None, source="here",
    )  # fmt: skip
    return Weights(rung=rung, files=tuple(folder / Path(path).name for path in PARTS))


@pytest.mark.parametrize("prefix", ["appliance", "appliance/", "registry.example:5000/team", "a_b-c/d/"])
def test_a_prefix_may_leave_its_slash_out(prefix: str) -> None:
    assert model.check_prefix(prefix) == f"{prefix.rstrip('/')}/"


@pytest.mark.parametrize("prefix", ["", "/", "a b", "registry.example/Team", "a//", "-a", "a:tag", "https://host/x"])
def test_what_begins_no_name_is_exit_2(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        model.check_prefix(prefix)
    words = ["build", "--only", "llama-cpu", "--model", "demo", f"--image-prefix={prefix}"]
    assert command.main(words) == 2
    assert f"--image-prefix does not begin an image's name: '{prefix}'" in capsys.readouterr().err


def test_names_are_of_the_prefix(project: Path) -> None:
    assert model.tag_of("qwen", "llama-cpu", "host/team/") == "host/team/qwen:llama-cpu"
    assert model.alias_of("qwen") == "appliance/qwen"
    assert f"IMAGE_PREFIX ?= {model.PREFIX.rstrip('/')}\n" in (project / "Makefile").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("prefix", ["registry.example/team", "registry.example/team/"])
def test_select_names_the_alias_with_the_prefix(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["select", "--platform", "linux/amd64", "--sm", "90", "--driver", "580.95.05", "--alias", "qwen"]
    assert command.main([*words, "--image-prefix", prefix, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alias"] == "registry.example/team/qwen"
    assert found["tag"] == f"registry.example/team/qwen:{found['cell']}"


@pytest.mark.parametrize("words", [["--memory-mib", "1"], ["--rung", "8b"], ["--bake-weights"], ["--alias"]])
def test_what_is_about_a_model_needs_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["build", "--only", "llama-cpu", *words]) == 2
    said = capsys.readouterr().err
    assert f"{words[0]} is about the weights of a model, and none is named" in said
    assert "--model qwen" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "qwen", "--rung", "8b-q6", "--memory-mib", "1"], "--memory-mib chooses others: 1"),
        (["--model", "qwen", "--rung", "8b-q7"], "qwen has no rung of that name: 8b-q7"),
        (["--model", "qwen", "--rung", "8b-bf16"], "8b-bf16 of qwen is safetensors, and this engine serves gguf"),
        (["--model", "qwen", "--memory-mib", "100"], "no weights of qwen fit into 100 MiB"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_the_build(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["build", "--only", "llama-cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_engine_gets_weights_of_its_own_format(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qwen = recipe.load(project, "qwen")
    assert recipe.choose(qwen, None, "safetensors").format == "safetensors"
    assert recipe.choose(qwen, 24 * 1024, "safetensors").name == "8b-bf16"
    assert recipe.find_rung(qwen, "14b", "safetensors").name == "14b-awq"
    assert command.main(["build", "--only", "vllm-cu130", "--model", "gpt-oss"]) == 2
    assert "gpt-oss has no weights as safetensors" in capsys.readouterr().err


def test_with_its_weights_in_it_an_image_has_no_choice_to_make(project: Path) -> None:
    qwen = recipe.load(project, "qwen")
    rung = qwen.rung("8b-q4_k_m")
    named, baked = (recipe.carried(qwen, rung, is_baked=is_baked) for is_baked in (False, True))
    assert (named.default, len(named.rungs)) == ("8b-q4_k_m", len(qwen.rungs))
    assert baked.rungs == (named.default_rung,)
    assert parse_recipe(dump_recipe(baked)) == baked


def test_weights_lie_as_a_hub_cache(tmp_path: Path, weights: Weights) -> None:
    """Read as the hub's client reads it: the branch's revision, its folder, links to blobs by hash."""
    context = _laid_out(tmp_path / "context", weights)
    cache = context / "models/models--org--x-GGUF"
    snapshot = cache / "snapshots" / (cache / "refs/main").read_text()
    assert {path: (snapshot / path).read_bytes() for path in PARTS} == PARTS
    assert all(not (snapshot / path).readlink().is_absolute() for path in PARTS)
    assert {blob.name: blob.read_bytes() for blob in (cache / "blobs").iterdir()} == {
        file.sha256: PARTS[file.path] for file in weights.rung.files
    }
    assert [context / "models" / weights.rung.place(file) for file in weights.rung.files] == [
        snapshot / path for path in PARTS
    ]


def test_weights_of_no_repository_lie_by_name(tmp_path: Path, weights: Weights) -> None:
    alone = replace(weights.rung, repo=None, revision=None)
    context = _laid_out(tmp_path / "context", replace(weights, rung=alone))
    folder = context / "models"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)): path.read_bytes() for path in files} == PARTS


def test_a_context_is_the_same_wherever_it_is_made(tmp_path: Path, weights: Weights) -> None:
    def listed(context: Path) -> list[tuple[str, int, int]]:
        found = ((path, path.lstat()) for path in sorted(context.rglob("*")))
        return [(str(path.relative_to(context)), stat.S_IMODE(is_.st_mode), int(is_.st_mtime)) for path, is_ in found]

    once = listed(_laid_out(tmp_path / "once", weights))
    weights.files[0].chmod(0o640)
    assert listed(_laid_out(tmp_path / "twice", weights)) == once
    assert {(mode, mtime) for _, mode, mtime in once} == {(0o755, EPOCH_S), (0o644, EPOCH_S), (0o777, EPOCH_S)}


@pytest.mark.parametrize("is_of_a_repository", [True, False])
def test_what_is_laid_out_is_what_verify_expects(tmp_path: Path, weights: Weights, is_of_a_repository: bool) -> None:
    """Every file of the layer is held to the rung, and a change of any one of them is named."""
    if not is_of_a_repository:
        file = replace(weights.rung.files[0], path="x.gguf")
        rung = replace(weights.rung, repo=None, revision=None, files=(file,))
        weights = Weights(rung=rung, files=weights.files[:1])
    row, labels, tree = _baked(tmp_path, weights)
    assert model.foreign(tree, labels, row) == []
    layer = [path for path, entry in tree.files.items() if path.startswith("opt/models/") and entry.kind != "folder"]
    assert len(layer) == (7 if is_of_a_repository else 1)  # files, blobs, and the branch's revision
    for path in layer:
        changed = replace(tree.files[path], sha256="0" * 64, target="/data/models/other.gguf")
        assert model.foreign(Tree(files={**tree.files, path: changed}), labels, row) == [f"foreign weights: {path}"]
        without = {each: entry for each, entry in tree.files.items() if each != path}
        assert model.foreign(Tree(files=without), labels, row) == [f"gone: {path}"]
    more = {**tree.files, "opt/models/more.gguf": replace(tree.files[layer[0]], path="opt/models/more.gguf")}
    assert model.foreign(Tree(files=more), labels, row) == ["foreign weights: opt/models/more.gguf"]


def test_weights_of_another_rung_than_the_label_says_are_foreign(tmp_path: Path, weights: Weights) -> None:
    row, labels, tree = _baked(tmp_path, weights)
    renamed = labels | {model.WEIGHTS_LABEL: "1b-q8_0"}
    assert model.foreign(tree, renamed, row) == ["not a recipe of images/models/x.yaml: opt/appliance/recipe.json"]


def test_without_weights_there_are_two_files(tmp_path: Path) -> None:
    context = _laid_out(tmp_path / "context", None)
    assert {path.name: path.read_text() for path in context.iterdir()} == TEXTS


def test_weights_are_a_layer_of_their_own_that_is_not_compressed(project: Path) -> None:
    stages = (project / model.DOCKERFILE).read_text()
    for stage, is_baked in ((model.NAMED, False), (model.BAKED, True)):
        argv = model.model_argv("cell", "tag", {"k": "v"}, Path("x.tar"), "context", epoch_s=EPOCH_S, stage=stage)
        assert f" AS {stage}\n" in stages
        assert argv[argv.index("--target") + 1] == stage
        assert ("compression=uncompressed" in argv[argv.index("--output") + 1]) is is_baked
        assert argv[-1] == "context"
        assert argv[argv.index("--label") :][:2] == ("--label", "k=v")


def test_the_identity_is_of_all_that_is_in_the_image(weights: Weights) -> None:
    named = model.labels_of(_recipe(weights), "t", "id", TEXTS, None)
    others = [
        model.labels_of(_recipe(weights), "t", "other", TEXTS, None),
        model.labels_of(_recipe(weights), "t", "id", TEXTS | {"recipe.json": "x"}, None),
        model.labels_of(_recipe(weights), "t", "id", TEXTS, weights),
    ]
    identities = {labels[model.IDENTITY_LABEL] for labels in (named, *others)}
    assert len(identities) == 4
    assert others[-1][model.WEIGHTS_LABEL] == "1b-q4_0"
    assert model.WEIGHTS_LABEL not in named


def test_room_for_weights_that_are_baked() -> None:
    needs = space.needs_baked(3 * 2**20, archives=Path("/a"), engine_data=Path("/e"))
    assert [(need.path, need.mib) for need in needs] == [(Path("/a"), 4), (Path("/e"), 16)]
    assert len(space.needs_baked(1, archives=Path("/a"), engine_data=None)) == 1


def _laid_out(context: Path, weights: Weights | None) -> Path:
    context.mkdir()
    model.lay_out(context, TEXTS, weights, epoch_s=EPOCH_S)
    return context


def _baked(tmp_path: Path, weights: Weights) -> tuple[recipe.RecipeRow, dict[str, str], Tree]:
    """The recipe's row, an image's labels, and the files of its one layer as `docker save` writes them."""
    rung = weights.rung
    row = recipe.RecipeRow.model_validate(
        {
            "name": "x", "license": "MIT", "vendors": ["org"], "default": rung.name, "sources": {"here": _CITATION},
            "models": {"1b": {"parameters_b": 1, "active_b": 1}},
            "rungs": [{
                "name": rung.name, "model": "1b", "tier": "balanced", "format": "gguf", "quantization": "Q4_0",
                "repo": rung.repo, "revision": rung.revision, "source": ["here"],
                "wheel": None if rung.repo else {"lock": "demo-model", "member": "x"},
                "files": [{"path": each.path, "bytes": each.bytes, "sha256": each.sha256} for each in rung.files],
            }],
        }
    )  # fmt: skip
    carried = recipe.carried(row, row.default_rung, is_baked=True)
    context = tmp_path / "context"
    context.mkdir()
    model.lay_out(context, {"recipe.json": dump_recipe(carried)}, weights, epoch_s=EPOCH_S)
    with tarfile.open(tmp_path / "layer.tar", "w") as layer:
        layer.add(context / "models", "opt/models")
        layer.add(context / "recipe.json", "opt/appliance/recipe.json")
    (tmp_path / "manifest.json").write_text('[{"Layers": ["layer.tar"]}]')
    with tarfile.open(tmp_path / "saved.tar", "w") as saved:
        saved.add(tmp_path / "manifest.json", "manifest.json")
        saved.add(tmp_path / "layer.tar", "layer.tar")
    labels = model.labels_of(carried, "appliance/x:llama-cpu", "id", TEXTS, weights)
    return row, labels, read_tree(tmp_path / "saved.tar")


_CITATION = {"repo": "org/x", "path": "x", "commit": REVISION, "read": "2026-11-23"}


def _recipe(weights: Weights) -> Recipe:
    return Recipe(
        name="x", license="MIT", rungs=(weights.rung,), default=weights.rung.name, chat={}, reasoning=None, tools=None,
        speculation=None, projector=None,
    )  # fmt: skip
