"""Choice of the served file, and its digest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.errors import ConfigError, FatalError, ModelUnreadableError
from appliance.model import digest, find_model, list_models, plain_name, read_model, resolve_model
from appliance.model.files.find import find_projector, is_folder_model, only_model
from appliance.model.formats.digest import SAMPLE_BYTES, SAMPLES


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def put(models: Path, *names: str) -> None:
    for name in names:
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_bytes(b"x")


def refusal(kind: type[FatalError], request: str | None, models: Path) -> tuple[str, str]:
    with pytest.raises(kind) as caught:
        resolve_model(request, models)
    assert caught.value.hint
    return caught.value.message, caught.value.hint


def test_lists_what_could_be_served(models: Path) -> None:
    put(models, "b.gguf", "a/b/A.GGUF", "a/b/c/too-deep.gguf", "mmproj-b.gguf", "b.safetensors", ".part/c.gguf")
    put(models, "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "lost+found/x.gguf")
    names = [str(path.relative_to(models)) for path in list_models(models)]
    assert names == ["a/b/A.GGUF", "b.gguf", "big-00001-of-00002.gguf"]
    assert list_models(models / "missing") == ()


def test_the_only_model_is_served(models: Path) -> None:
    put(models, "one.gguf")
    assert resolve_model(None, models) == models / "one.gguf"
    assert resolve_model("", models) == models / "one.gguf"


def test_the_only_model_is_a_link_that_leads_nowhere(models: Path) -> None:
    models.mkdir(exist_ok=True)
    (models / "one.gguf").symlink_to("/mnt/gone/one.gguf")
    assert resolve_model(None, models) == models / "one.gguf"
    with pytest.raises(ModelUnreadableError, match=r"is a link to a missing file: .*/one\.gguf -> /mnt/gone/one\.gguf"):
        read_model(models / "one.gguf")
    put(models, "two.gguf")
    assert resolve_model(None, models) == models / "two.gguf"


def test_what_is_not_here_is_found_nowhere(models: Path) -> None:
    put(models, "one.gguf", "org/two.gguf")
    assert find_model("two", models) == models / "org/two.gguf"
    assert find_model("three", models) is None
    assert find_model(str(models / "three.gguf"), models) is None


@pytest.mark.parametrize("request_text", ["Two-Q4", "two-q4.gguf", "org/two-Q4.gguf"])
def test_a_request_is_a_stem_a_name_or_a_path(models: Path, request_text: str) -> None:
    put(models, "one.gguf", "org/two-Q4.gguf")
    assert resolve_model(request_text, models) == models / "org/two-Q4.gguf"
    assert resolve_model(str(models / "org/two-Q4.gguf"), models) == models / "org/two-Q4.gguf"


def test_nothing_there(models: Path) -> None:
    message, hint = refusal(ConfigError, None, models)
    assert message == f"no model was named and none is on the volume: {models}"
    assert "APPLIANCE_MODEL" in hint


def test_what_is_there_and_no_model_is_named(models: Path) -> None:
    put(models, "forgot-its-ending", "folder/README.md")
    message, _ = refusal(ConfigError, None, models)
    assert message.endswith(
        f"these files are not models of this image:\n  {models}/folder\n  {models}/forgot-its-ending"
    )


def test_several_there(models: Path) -> None:
    put(models, *(f"{number:02}.gguf" for number in range(23)))
    message, hint = refusal(ConfigError, None, models)
    assert message.startswith(f"no model was named and 23 are on the volume: {models}\n  {models}/00.gguf\n")
    assert message.endswith("19.gguf\n  and 3 more")
    assert hint.endswith("for instance 00")


def test_a_near_miss_is_named(models: Path) -> None:
    put(models, "SmolLM2-135M-Instruct.Q4_1.gguf")
    message, hint = refusal(ConfigError, "smollm-135m-instruct.q4_1", models)
    assert message.startswith("no model of that name is on the volume: smollm-135m-instruct.q4_1\n")
    assert hint == "perhaps you meant SmolLM2-135M-Instruct.Q4_1"
    assert "put the file into" in refusal(ConfigError, "something else", models)[1]


def test_a_name_that_means_two(models: Path) -> None:
    put(models, "a/m.gguf", "b/m.gguf")
    message, _ = refusal(ConfigError, "m", models)
    assert message == f"model name m matches 2 files on the volume\n  {models}/a/m.gguf\n  {models}/b/m.gguf"


def test_a_missing_path(models: Path) -> None:
    message, _ = refusal(ModelUnreadableError, "/nowhere/m.gguf", models)
    assert message == "model cannot be opened: /nowhere/m.gguf: no such file"


def test_a_link_whose_target_was_not_mounted(models: Path) -> None:
    """A snapshot of a hub cache without its blobs: as the only model, by name, and by path."""
    link = models / "m-Q4_K_M.gguf"
    link.symlink_to("../../blobs/deadbeef")
    for name in (str(link), link.name, link.stem, None):
        with pytest.raises(ModelUnreadableError) as caught:
            read_model(resolve_model(name, models) if name else only_model(models) or models)
        assert caught.value.message == f"model is a link to a missing file: {link} -> ../../blobs/deadbeef"
        assert "both the link and its target, for a Hugging Face" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["x\0y", "x" * 5000, "../../nowhere"])
def test_a_name_that_cannot_be_a_file(models: Path, name: str) -> None:
    assert "no model of that name" in refusal(ConfigError, name, models)[0]


def test_a_folder_is_refused_with_what_is_in_it(models: Path) -> None:
    put(models, "gguf/m.gguf", "hf/model.safetensors", "other/readme")
    assert (
        refusal(ModelUnreadableError, "gguf", models)[1] == f"name the file itself, for instance {models}/gguf/m.gguf"
    )
    assert "its config.json is missing" in refusal(ModelUnreadableError, "hf", models)[1]
    assert refusal(ModelUnreadableError, "other", models)[0] == f"model is a folder: {models}/other"


def test_folders_of_safetensors_are_models(models: Path) -> None:
    put(models, "m.gguf", "org/Qwen2.5-7B/config.json", "org/Qwen2.5-7B/model.safetensors", "org/Qwen2.5-7B/q4.gguf")
    folder = models / "org/Qwen2.5-7B"
    assert list_models(models) == (models / "m.gguf", folder, folder / "q4.gguf")
    assert resolve_model("org/Qwen2.5-7B", models) == resolve_model("qwen2.5-7b", models) == folder
    assert resolve_model(None, models, serves="safetensors") == folder
    assert plain_name(folder) == "Qwen2.5-7B"
    (folder / "q4.gguf").unlink()
    assert resolve_model(None, models) == models / "m.gguf"  # an image of the other engine serves the other


def test_an_image_names_what_it_needs(models: Path) -> None:
    put(models, "m.gguf")
    with pytest.raises(ConfigError) as caught:
        resolve_model(None, models, serves="safetensors")
    assert "put a folder of safetensors into" in (caught.value.hint or "")


def test_the_projector_beside_a_model_is_found(models: Path) -> None:
    put(models, "a/gemma-3-12b-Q4_K_M.gguf", "a/mmproj-gemma-3-12b-F16.gguf", "a/mmproj-other.gguf", "b/m.gguf")
    assert find_projector(models / "a/gemma-3-12b-Q4_K_M.gguf") == models / "a/mmproj-gemma-3-12b-F16.gguf"
    assert find_projector(models / "b/m.gguf") is None
    put(models, "c/gemma-4-E4B_q4_0-it.gguf", "c/gemma-4-E4B-it-mmproj.gguf", "c/other.gguf", "c/other-mmproj.gguf")
    assert find_projector(models / "c/gemma-4-E4B_q4_0-it.gguf") == models / "c/gemma-4-E4B-it-mmproj.gguf"
    assert not [path for path in list_models(models) if "mmproj" in path.name]
    put(models, "b/mmproj-F16.gguf")
    assert find_projector(models / "b/m.gguf") == models / "b/mmproj-F16.gguf"


def test_a_projector_of_another_model_is_left_alone(models: Path) -> None:
    put(models, "gemma-3-4b.gguf", "SmolLM2.gguf", "mmproj-F16.gguf", "mmproj-model-f16.gguf", "mmproj-gemma-3-4b.gguf")
    assert find_projector(models / "SmolLM2.gguf") is None
    assert find_projector(models / "gemma-3-4b.gguf") == models / "mmproj-gemma-3-4b.gguf"


def test_of_a_split_file_the_first_part_is_found(models: Path) -> None:
    put(models, "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf")
    assert resolve_model(None, models).name == "m-00001-of-00003.gguf"


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(models: Path) -> None:
    put(models, "a/m.gguf")
    (models / "a").chmod(0)
    try:
        assert "permission denied" in refusal(ModelUnreadableError, None, models)[0]
    finally:
        (models / "a").chmod(0o755)


@pytest.mark.parametrize("size", [1, SAMPLES * SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES + 1, 9_000_000])
def test_a_digest_sees_header_ends_and_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(size))
    first = digest((path,), 100)
    assert digest((path,), 100) == first
    assert len(first.key) == 16
    keys = {first.key}
    for offset in {0, size // 2 if size <= SAMPLES * SAMPLE_BYTES else 0, size - 1}:
        data = bytearray(size)
        data[offset] = 1
        path.write_bytes(data)
        keys.add(digest((path,), 100).key)
    path.write_bytes(bytes(size + 1))
    keys.add(digest((path,), 100).key)
    assert len(keys) == (3 if size == 1 else 4 if size > SAMPLES * SAMPLE_BYTES else 5)


def test_a_digest_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadableError, match="No such file"):
        digest((tmp_path / "missing",), 10)


def test_a_folder_whose_kind_may_not_be_asked_for_is_passed_over() -> None:
    """Another user's mount and another process's link refuse to tell their kind."""
    assert not is_folder_model(Path("/proc/1/cwd/nothing"))
    with pytest.raises(ModelUnreadableError, match=r"model is a folder: /$"):
        resolve_model("/", Path("/nowhere"))
