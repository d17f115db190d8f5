"""What a user may call a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import ConfigError, ModelUnreadableError, UsageError
from appliance.host.docker.inventory import recipes_here
from appliance.host.docker.launch import Bind
from appliance.host.start.model_argument import understand
from appliance.reference import parse_reference


@pytest.mark.parametrize(
    ("called", "name", "setting", "recipe"),
    [
        ("qwen", "qwen", None, "qwen"),
        ("qwen:8b-q4", "qwen:8b-q4", "qwen:8b-q4", "qwen"),
        ("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-GGUF", "Qwen/Qwen3-8B-GGUF", None),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B-GGUF:Q4_K_M", None),
        ("org/repo@a1b2", "repo", "org/repo@a1b2", None),
        ("org/repo/sub/file.gguf", "repo/sub/file", "org/repo/sub/file.gguf", None),
        ("hf.co/org/repo:Q8_0", "repo:Q8_0", "hf.co/org/repo:Q8_0", None),
        ("hf://org/repo", "repo", "hf://org/repo", None),
        ("https://huggingface.co/org/repo", "repo", "https://huggingface.co/org/repo", None),
        ("QWEN:8b", "QWEN:8b", "QWEN:8b", "qwen"),
        ("https://example.org/x/m.gguf?download=1", "m", "https://example.org/x/m.gguf?download=1", None),
    ],
)
def test_what_is_not_a_file_here(called: str, name: str, setting: str | None, recipe: str | None) -> None:
    found = understand(called)
    assert (found.name, found.setting, found.recipe, found.binds) == (name, setting, recipe, ())
    assert not found.is_here


@pytest.mark.parametrize(
    ("called", "name", "setting", "note"),
    [
        ("qwen", "qwen", None, None),
        ("qwen:8b", "qwen:8b", "qwen:8b", None),
        (
            "Qwen3-30B-A3B", "Qwen3-30B-A3B", "qwen:30b-a3b-q4_k_m",
            "Qwen3-30B-A3B is read as the recipe qwen:30b-a3b-q4_k_m",
        ),
        (
            "qwen/qwen3-8b", "qwen3-8b", "qwen:8b",
            "qwen/qwen3-8b is read as the recipe qwen:8b; the repository of this name is hf.co/qwen/qwen3-8b",
        ),
    ],
)  # fmt: skip
def test_a_model_of_a_recipe_by_any_name(called: str, name: str, setting: str | None, note: str | None) -> None:
    found = understand(called, "", recipes_here())
    assert (found.name, found.setting, found.recipe, found.note) == (name, setting, "qwen", note)


@pytest.mark.parametrize(
    ("called", "offered"),
    [
        ("Qwen3.6-27B", "perhaps you meant Qwen3.8-27B or "),
        ("qwen:99b", "the recipes are demo, gemma, gpt-oss, qwen; any other model by its repository: org/repo"),
    ],
)
def test_a_name_of_no_recipe_is_answered_with_the_nearest(called: str, offered: str) -> None:
    with pytest.raises(ConfigError, match=f"^no recipe has a model of this name: {called}$") as caught:
        understand(called, "", recipes_here())
    assert offered in str(caught.value.hint)


def test_a_repository_stays_one_where_a_recipe_has_its_model() -> None:
    assert understand("Qwen/Qwen3-8B-GGUF:Q4_K_M", "", recipes_here()).recipe is None
    assert understand("somebody/Qwen3-8B", "", recipes_here()).setting == "somebody/Qwen3-8B"


def test_a_file_is_bound_beside_the_volume(tmp_path: Path) -> None:
    path = tmp_path / "My Model.gguf"
    path.write_bytes(b"GGUF")
    found = understand(str(path))
    assert found.binds == (Bind(source=str(path), target="/models/My Model.gguf"),)
    assert (found.name, found.setting) == ("My Model", "/models/My Model.gguf")


@pytest.mark.parametrize("called", ["qwen", "qwen:8b-q4"])
def test_a_recipe_goes_before_a_folder_of_its_name_and_says_so(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert understand(called).note is None
    Path(called).mkdir()
    found = understand(called)
    assert (found.recipe, found.is_here) == ("qwen", False)
    assert found.note == f"{called} is read as a recipe; the file or folder of this name is ./{called}"
    typed = understand(f"./{called}")
    assert (typed.recipe, typed.is_here, typed.note) == (None, True, None)


def test_a_path_that_exists_goes_before_a_repository_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not understand("org/repo").is_here
    Path("org/repo").mkdir(parents=True)
    found = understand("org/repo")
    assert found.is_here
    assert found.note == "org/repo is read as a path; the repository of this name is hf.co/org/repo"
    assert understand("hf.co/org/repo").setting == "hf.co/org/repo"


@pytest.mark.parametrize(
    ("called", "name", "note"),
    [
        ("oci://ghcr.io/team/tiny:q4", "tiny:q4", None),
        ("docker://ai/smollm2", "smollm2:latest", None),
        (f"oci://ghcr.io/team/tiny@sha256:{'0' * 64}", "tiny", None),
        ("oci://localhost:5000/tiny:q4", "tiny:q4", "localhost:5000 is asked from within the container"),
    ],
)
def test_an_artifact_of_a_registry_is_fetched_by_the_container(called: str, name: str, note: str | None) -> None:
    found = understand(called)
    assert (found.name, found.setting, found.note, found.is_here) == (name, called, note, False)


@pytest.mark.parametrize(
    "called",
    [
        "https://me:secret@host/m.gguf",
        "https://secret@host/m.gguf",
        "http://me:se@secret@host:80/m.gguf?x=/@",
        "ftp://me:secret@host/m.gguf",
        "oci://me:secret@host/m",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(called: str) -> None:
    with pytest.raises(ConfigError, match="a password in a URL ends in logs") as caught:
        understand(called)
    assert "secret" not in caught.value.message


def test_a_link_is_bound_by_its_content_under_its_own_name(tmp_path: Path) -> None:
    """The hub's cache links the name of a file to a blob."""
    blob, link = tmp_path / "blob", tmp_path / "m.gguf"
    blob.write_bytes(b"GGUF")
    link.symlink_to(blob)
    assert understand(str(link)).binds == (Bind(source=str(blob), target="/models/m.gguf"),)


def test_a_model_that_is_split_is_bound_with_all_parts(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    found = understand(str(tmp_path / names[1]))
    assert [bind.target for bind in found.binds] == [f"/models/{name}" for name in names]
    assert (found.name, found.setting) == ("m", f"/models/{names[0]}")
    (tmp_path / names[2]).unlink()
    with pytest.raises(ModelUnreadableError, match=f"no such model file: .*{names[2]}"):
        understand(str(tmp_path / names[1]))


def test_a_folder_is_bound_whole(tmp_path: Path) -> None:
    assert understand(str(tmp_path)).binds == (Bind(source=str(tmp_path), target=f"/models/{tmp_path.name}"),)


@pytest.mark.parametrize("called", ["./none.gguf", "/none/at/all", "~/none.gguf", "none.gguf", "folder/none.gguf"])
def test_a_missing_file_is_not_taken_for_a_repository(
    called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnreadableError, match="no such model file"):
        understand(called)


@pytest.mark.parametrize("called", ["", "a b", "qwen:", "-x"])
def test_what_is_nothing_is_usage(called: str) -> None:
    with pytest.raises(UsageError) as caught:
        understand(called)
    assert caught.value.hint


@pytest.mark.parametrize("called", ["org/", "org/repo:a:b", "ftp://x/y", "org/re--po", "https://host/", "oci://h/m:"])
def test_references_are_refused_as_the_appliance_refuses_them(called: str) -> None:
    with pytest.raises(ConfigError) as caught:
        understand(called)
    with pytest.raises(ConfigError) as of_appliance:
        parse_reference(called)
    assert (caught.value.message, caught.value.hint) == (of_appliance.value.message, of_appliance.value.hint)
