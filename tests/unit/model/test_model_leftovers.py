"""Files that cannot be served as they are: their messages and hints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from appliance.errors import ConfigError, FatalError, ModelUnreadableError
from appliance.model import only_model, read_model, resolve_model, why_nothing
from appliance.model.files.leftovers import piece_of
from appliance.model.formats.gguf import read_gguf
from tests.shapes import SMALL, write_gguf
from tests.unit.model.gguf_files import write_model

REPORTS = Path(__file__).parents[2] / "data/reports"
SPLIT = REPORTS / "gguf-second-part-missing-and-none-named"
FIRST, THIRD = "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"
WHOLE = b"GGUF"  # nobody looks into it


def put(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(WHOLE)
    return folder


def refused(request: str | None, folder: Path) -> FatalError:
    with pytest.raises(FatalError) as caught:
        read_model(resolve_model(request, folder))
    assert caught.value.hint
    return caught.value


def test_parts_that_were_joined_with_cat_are_told_as_such(tmp_path: Path) -> None:
    error = refused(None, REPORTS / "gguf-parts-joined-with-cat")
    assert error.exit_code == 30
    assert "its 3 parts were put into one file by bytes, as with cat" in error.message
    assert "llama-gguf-split --merge" in (error.hint or "")
    merged = (REPORTS / "gguf-parts-joined-with-cat/merged.gguf").read_bytes()
    (tmp_path / FIRST).write_bytes(merged)
    assert "by bytes, as with cat" in refused(FIRST, tmp_path).message, "with the first part's name as well"


def test_a_file_that_ends_behind_its_last_tensor_is_not_joined(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL["gqa"])
    assert not read_gguf(path).is_joined
    with path.open("ab") as file:
        file.write(b"\0" * 64)
    assert not read_gguf(path).is_joined
    assert not read_gguf(SPLIT / FIRST).is_joined


@pytest.mark.parametrize("request_", [None, "m", FIRST])
@pytest.mark.parametrize(("there", "missing"), [((FIRST, THIRD), 2), ((THIRD,), 1)])
def test_a_part_that_is_missing_is_named(
    tmp_path: Path, there: tuple[str, ...], missing: int, request_: str | None
) -> None:
    for name in there:
        shutil.copy(SPLIT / name, tmp_path)
    error = refused(request_, tmp_path)
    assert (type(error), error.exit_code) == (ModelUnreadableError, 30)
    assert f"a part is missing: m-0000{missing}-of-00003.gguf" in error.message


def test_a_later_part_names_the_first(tmp_path: Path) -> None:
    shutil.copy(SPLIT / THIRD, tmp_path)
    error = refused(THIRD, tmp_path)
    assert f"it is part 3 of 3, and the first is {FIRST}" in error.message
    assert "it is missing: fetch it" in (error.hint or "")
    shutil.copy(SPLIT / FIRST, tmp_path)
    assert refused(THIRD, tmp_path).hint == f"give {FIRST}"


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (("x.gguf.part1of2", "x.gguf.part2of2"), "cat x.gguf.part1of2 x.gguf.part2of2 > x.gguf"),
        (("x.part1of2.gguf", "x.part2of2.gguf"), "cat x.part1of2.gguf x.part2of2.gguf > x.gguf"),
        (("x.gguf-part-1-of-2", "x.gguf-part-2-of-2"), "cat x.gguf-part-1-of-2 x.gguf-part-2-of-2 > x.gguf"),
        (("x.gguf-split-b", "x.gguf-split-a"), "cat x.gguf-split-a x.gguf-split-b > x.gguf"),
        (("x.gguf.001", "x.gguf.002"), "cat x.gguf.001 x.gguf.002 > x.gguf"),
        (("x.gguf.aa", "x.gguf.ab"), "cat x.gguf.aa x.gguf.ab > x.gguf"),
        (("x.gguf.part9", "x.gguf.part10"), "cat x.gguf.part9 x.gguf.part10 > x.gguf"),
    ],
)
def test_pieces_cut_by_bytes_are_to_be_joined(tmp_path: Path, names: tuple[str, ...], joined: str) -> None:
    put(tmp_path, *names)
    for request in (None, "x.gguf", "x", names[0]):
        error = refused(request, tmp_path)
        assert (error.exit_code, error.message) == (
            30,
            f"model is cut into pieces by bytes: {tmp_path}/x.gguf: found {len(names)}",
        )
        assert joined in (error.hint or "")
    (tmp_path / names[0]).unlink()
    if "of2" in names[0]:
        assert refused(None, tmp_path).message.endswith("found 1 of 2")


@pytest.mark.parametrize(
    "name", ["x.gguf", "x-Q4_K_M.gguf", "x.gguf.1", "x-00001-of-00002.gguf", "part1of2.txt", "x.gguf.txt"]
)
def test_other_names_are_no_pieces(name: str) -> None:
    assert piece_of(Path(name)) is None


def test_a_whole_model_beside_leftovers_is_served(tmp_path: Path) -> None:
    put(tmp_path, "y.gguf.part1of2", "z-00002-of-00002.gguf", "q.gguf.crdownload")
    model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"])
    assert only_model(tmp_path) == model


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (("m.gguf.part",), ModelUnreadableError, "download is not finished"),
        (("m.gguf.crdownload",), ModelUnreadableError, "download is not finished"),
        (("org/repo/m.gguf.aria2",), ModelUnreadableError, "download is not finished"),
        (("mmproj-F16.gguf",), ConfigError, "folder has only a multimodal projector and no model"),
        (("notes.txt",), ConfigError, "these files are not models of this image"),
        ((), ConfigError, "none is on the volume"),
    ],
)
def test_what_else_lies_there(tmp_path: Path, names: tuple[str, ...], kind: type[FatalError], words: str) -> None:
    error = refused(None, put(tmp_path, *names))
    assert type(error) is kind
    assert words in error.message


@pytest.mark.parametrize("request_", [None, "such.gguf", "such", "/"])
def test_an_empty_folder_with_a_files_name_was_made_by_docker(tmp_path: Path, request_: str | None) -> None:
    folder = tmp_path / "such.gguf"
    folder.mkdir()
    error = refused(str(folder) if request_ == "/" else request_, tmp_path)
    assert (error.exit_code, error.message) == (30, f"model is an empty folder with a file's name: {folder}")
    assert "Docker makes such a folder" in (error.hint or "")
    other = tmp_path / "Qwen3-8B"
    other.mkdir()
    told = refused("Qwen3-8B", tmp_path)
    assert (told.message, told.hint) == (f"model is an empty folder: {other}", error.hint)
    (folder / "real.gguf").write_bytes(WHOLE)
    assert "Docker" not in (refused("such.gguf", tmp_path).hint or "")


@pytest.mark.parametrize("request_", [None, "f"])
def test_an_index_without_its_files_names_them(tmp_path: Path, request_: str | None) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    error = refused(request_, tmp_path)
    assert "model-00001-of-00001.safetensors missing" in error.message
    assert "git lfs pull" in (error.hint or "")


def test_an_image_model_is_no_language_model() -> None:
    error = refused(None, REPORTS / "gguf-of-an-image-model")
    assert error.exit_code == 30
    assert "it is a model for images or video, not a language model: architecture qwen_image" in error.message
    assert "this file cannot be converted into one" in (error.hint or "")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("flux", "it is a model for images or video"),
        ("newpaint", "its architecture newpaint is unknown to the engine, and it has no keys of a language model"),
    ],
)
def test_other_programs_files_are_told_by_their_architecture(tmp_path: Path, architecture: str, words: str) -> None:
    path = write_model(tmp_path / "m.gguf", architecture=architecture, metadata={})
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(path)
    assert words in caught.value.message
    assert "convert the original" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("data", "words", "hint"),
    [
        (b"<!DOCTYPE html>", "a web page", "resolve/main"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer", "git lfs pull"),
        (b"Entry not found", "text, as an answer of a server that was kept: 'Entry not found'", "fetch the file again"),
        (
            b'{"error": "Invalid username or password."}',
            "JSON, as an answer of a server",
            "with a token if it is gated",
        ),
        (b"\x89PNG\r\n\x1a\n", "a PNG image", "give it one"),
    ],
)
def test_what_a_failed_download_leaves_leads_to_another(tmp_path: Path, data: bytes, words: str, hint: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    error = refused(None, tmp_path)
    assert words in error.message
    assert hint in (error.hint or "")


def test_nothing_is_said_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert why_nothing(tmp_path / "nowhere") is None
    assert why_nothing(put(tmp_path, ".hidden.gguf.part", "models--a--b/x.gguf.part")) is None
