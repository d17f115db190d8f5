from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest

from images import __main__ as command
from images.errors import BuildError, UsageError
from images.recipes import convert, recipe
from images.recipes.recipe import RungRow


def rung(project: Path, name: str) -> RungRow:
    return recipe.load(project, name).rungs[0]


def test_the_container_has_what_it_needs_and_no_network(tmp_path: Path) -> None:
    gguf = tmp_path / "m-Q4_1.gguf"
    argv = convert.run_argv(tmp_path, gguf, tmp_path / "readers", tmp_path / "made", "appliance:vllm-cpu")
    words = " ".join(argv)
    assert "--network none --read-only --tmpfs /tmp" in words
    assert "--pull never" in words, "nobody here owns that name on a public registry"
    assert f"--volume {gguf}:/in/m-Q4_1.gguf:ro" in words
    assert f"--volume {tmp_path / 'made'}:/out " in words
    assert argv[-4:] == ("/convert.py", "/in/m-Q4_1.gguf", "/out", "/readers")


def test_a_folder_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    made = convert.to_safetensors(tmp_path, tmp_path / "m.gguf", ca_bundle=None, image="no-such-image")
    assert made == tmp_path / "m"


def test_what_was_converted_is_held_to_its_hashes(project: Path, tmp_path: Path) -> None:
    made = next(each for each in recipe.load(project, "demo").rungs if each.made_of)
    file = next(each for each in made.files if each.path.endswith("/tokenizer_config.json"))
    one = made.model_copy(update={"files": (file,)})
    with pytest.raises(BuildError, match="sha256 that is not there") as absent:
        convert.check(tmp_path, one)
    assert str(tmp_path) in (absent.value.hint or "")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(BuildError, match=r"are not what was announced: .*sha256 44136fa355b3"):
        convert.check(tmp_path, one)
    right = file.model_copy(update={"sha256": hashlib.sha256(b"{}").hexdigest()})
    found = convert.check(tmp_path, made.model_copy(update={"files": (right,)}))
    assert found == (tmp_path / "tokenizer_config.json",)


def test_a_dry_run_says_where_a_rung_that_is_made_would_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "demo", "--rung", "135m-bf16", "--dry-run", "--json", "--to", str(tmp_path)]) == 0
    said = json.load(io.StringIO(capsys.readouterr().out))
    folder = tmp_path / "SmolLM2-135M-Instruct.Q4_1"
    assert {Path(each["file"]).parent for each in said["files"]} == {folder}
    assert {Path(each["file"]).name for each in said["files"]} >= {"model.safetensors", "config.json", "tokenizer.json"}


def test_only_one_file_of_gguf_is_converted(project: Path) -> None:
    convert.refuse_other(rung(project, "demo"))
    rows = [each for name in ("qwen", "gemma") for each in recipe.load(project, name).rungs]
    others = [each for each in rows if each.format == "safetensors" or len(each.files) > 1]
    assert others
    for other in others:
        with pytest.raises(UsageError, match=r"--safetensors converts one GGUF file") as caught:
            convert.refuse_other(other)
        assert (caught.value.exit_code, "--rung" in (caught.value.hint or "")) == (2, True)


def test_a_dry_run_says_which_folder_it_would_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fetch", "demo", "--safetensors", "--dry-run", "--json", "--to", str(tmp_path)]) == 0
    said = json.load(io.StringIO(capsys.readouterr().out))
    assert said["folder"] == str(tmp_path / "SmolLM2-135M-Instruct.Q4_1")
    assert said["file"].endswith("/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert not list(tmp_path.iterdir())
