"""Folders of other tools: recognised, listed, and served from."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.errors import ConfigError, FatalError, ModelUnreadableError
from appliance.model import read_model
from appliance.reference import refuse_artifact
from appliance.selection.request import which_model
from appliance.settings import HubSettings, Settings, resolve_settings
from appliance.start.inputs import Located, read_draft_model
from appliance.weights.stores.stores import (
    Store,
    StoredModel,
    Tool,
    find_elsewhere,
    find_stored,
    list_store,
    other_stores,
)
from tests.shapes.beside import write_projector
from tests.unit.model.gguf_files import write_model
from tests.unit.weights.cache_files import let_others_in, put_blob, put_cached, put_manifest, put_ollama


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "models").mkdir(parents=True)
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return write_model(tmp_path / "weights").read_bytes()


def settings_of(data: Path, *folders: Path, model: str | None = None) -> Settings:
    flags = {"data_dir": str(data), "model_dirs": ",".join(map(str, folders)) or "none"}
    return resolve_settings(flags | ({"model": model} if model else {}), {})


def names(store: Store) -> list[str]:
    return [model.name for model in list_store(store).models]


def served(settings: Settings) -> Located:
    """Return the model that a start would serve."""
    found = which_model(settings, None, "gguf", HubSettings)
    assert isinstance(found, Located)
    return found


def refusal(kind: type[FatalError], settings: Settings) -> tuple[str, str]:
    with pytest.raises(kind) as caught:
        served(settings)
    return caught.value.message, caught.value.hint or ""


def test_folders_are_told_apart_by_what_is_in_them(tmp_path: Path, data: Path) -> None:
    put_ollama(tmp_path / "o/models", "library/m/latest", b"GGUF")
    put_cached(tmp_path / "h/hub", "org/m", "m.gguf")
    for folder in (tmp_path / "l/.internal", tmp_path / "l/models", tmp_path / "plain"):
        folder.mkdir(parents=True)
    folders = [tmp_path / name for name in ("o", "o/models", "h", "h/hub", "l", "plain")]
    assert other_stores(settings_of(data, *folders)) == (
        Store(tool="Ollama", folder=tmp_path / "o/models"),
        Store(tool="Hugging Face", folder=tmp_path / "h/hub"),
        Store(tool="LM Studio", folder=tmp_path / "l/models"),
        Store(tool="folder", folder=tmp_path / "plain"),
    )


def test_the_usual_mount_points_are_looked_at_by_default(tmp_path: Path, data: Path) -> None:
    put_cached(tmp_path / ".cache/huggingface/hub", "org/m", "m.gguf")
    put_ollama(tmp_path / ".ollama/models", "library/m/latest", b"GGUF")
    (tmp_path / ".lmstudio/models").mkdir(parents=True)
    put_ollama(tmp_path / "elsewhere", "library/m/latest", b"GGUF")
    environment = {"HOME": str(tmp_path), "OLLAMA_MODELS": str(tmp_path / "elsewhere")}
    found = other_stores(resolve_settings({"data_dir": str(data)}, environment))
    assert [(store.tool, store.folder.relative_to(tmp_path).as_posix()) for store in found] == [
        ("Ollama", "elsewhere"),
        ("Hugging Face", ".cache/huggingface/hub"),
        ("Ollama", ".ollama/models"),
        ("LM Studio", ".lmstudio/models"),
    ]


def test_a_folder_that_was_asked_for_must_be_there(data: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        other_stores(settings_of(data, Path("/nowhere/at/all")))
    assert "folder of setting model_dirs cannot be read: /nowhere/at/all (flag --model-dirs)" in caught.value.message
    assert "-v ~/.ollama:/nowhere/at/all:ro" in (caught.value.hint or "")
    for text in ("models", "/a,,/b", ""):
        with pytest.raises(ConfigError, match="setting model_dirs"):
            resolve_settings({"model_dirs": text}, {})


def test_a_model_of_ollama_is_served_by_its_name_there(tmp_path: Path, data: Path, weights: bytes) -> None:
    store = tmp_path / "ollama"
    put_ollama(store, "library/qwen3/4b", weights)
    put_ollama(store, "library/other/latest", weights + b"x")
    model = served(settings_of(data, store, model="Qwen3:4b"))
    assert model.called == "qwen3:4b"
    assert model.path.parent == store / "blobs"


def test_a_models_projector_comes_with_it(tmp_path: Path, data: Path, weights: bytes) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", 64).read_bytes()
    put_ollama(tmp_path / "ollama", "library/m/latest", weights, projector)
    model = served(settings_of(data, tmp_path / "ollama", model="m"))
    assert model.projector is not None
    assert model.projector.read_bytes() == projector


@pytest.mark.parametrize("request_text", ["hf.co/org/m-GGUF:Q4_K_M", "org/m-GGUF:Q4_K_M"])
def test_what_ollama_pulled_from_the_hub_has_its_name_there(tmp_path: Path, request_text: str) -> None:
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": put_blob(tmp_path, b"GGUF"), "size": 4},
    ]
    put_manifest(tmp_path, "org/m-GGUF/Q4_K_M", layers, host="hf.co")
    assert len(find_stored(request_text, (Store(tool="Ollama", folder=tmp_path),))) == 1
    assert find_stored("org/m-GGUF:Q8_0", (Store(tool="Ollama", folder=tmp_path),)) == ()


@pytest.mark.parametrize(
    "request_text",
    ["org/m-GGUF/m-Q4_K_M.gguf", "org/m-GGUF/m-Q4_K_M", "m-q4_k_m", "m-Q4_K_M.gguf", "org/m-GGUF:q4_k_m", "ORG/m-gguf"],
)
def test_a_model_of_lm_studio_is_found_by_every_name(tmp_path: Path, data: Path, request_text: str) -> None:
    path = tmp_path / "lmstudio/org/m-GGUF/m-Q4_K_M.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    (tmp_path / "lmstudio/org/other").mkdir()
    (tmp_path / "lmstudio/org/other/o.gguf").write_bytes(b"GGUF")
    found = find_elsewhere(request_text, settings_of(data, tmp_path / "lmstudio"), "gguf")
    assert found is not None
    assert (found.path, found.store.tool) == (path, "LM Studio")


def test_a_cache_of_hugging_face_is_found_by_its_references(tmp_path: Path, data: Path) -> None:
    link = put_cached(tmp_path / "hub", "org/m", "m-Q4_K_M.gguf")
    put_cached(tmp_path / "hub", "org/m", "m-Q8_0.gguf", b"GGUF8")
    found = find_elsewhere("org/m:Q4_K_M", settings_of(data, tmp_path / "hub"), "gguf")
    assert found is not None
    assert (found.path, found.name) == (link, "org/m/m-Q4_K_M.gguf")
    with pytest.raises(ConfigError, match="model name org/m matches 2 in mounted folders"):
        find_elsewhere("org/m", settings_of(data, tmp_path / "hub"), "gguf")


def test_the_first_folder_that_has_it_gives_it(tmp_path: Path, data: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.gguf").write_bytes(b"GGUF")
    found = find_elsewhere("m", settings_of(data, tmp_path / "b", tmp_path / "a"), "gguf")
    assert found is not None
    assert found.path == tmp_path / "b/m.gguf"


def test_the_only_model_in_mounted_folders_is_served_without_a_name(tmp_path: Path, data: Path, weights: bytes) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    put_manifest(tmp_path / "ollama", "library/cloud/latest", [])
    assert served(settings_of(data, tmp_path / "ollama")).called == "qwen3:4b"
    put_ollama(tmp_path / "ollama", "library/qwen3/8b", weights + b"x")
    message, hint = refusal(ConfigError, settings_of(data, tmp_path / "ollama"))
    assert "2 in mounted folders\n  qwen3:4b (Ollama)\n  qwen3:8b (Ollama)" in message
    assert hint == "name one with APPLIANCE_MODEL, for instance qwen3:4b"


def test_a_draft_model_may_lie_there_too(tmp_path: Path, data: Path, weights: bytes) -> None:
    put_ollama(tmp_path / "ollama", "library/draft/latest", weights)
    (data / "models/m.gguf").write_bytes(weights)
    flags = {"data_dir": str(data), "model_dirs": str(tmp_path / "ollama"), "speculation": "draft"}
    settings = resolve_settings(flags | {"draft_model": "draft"}, {})
    draft = read_draft_model(settings, read_model(data / "models/m.gguf"))
    assert draft is not None
    assert draft.path.parent == tmp_path / "ollama/blobs"


def test_a_file_of_the_images_recipe_is_found_in_a_folder_of_its_repository(
    tmp_path: Path, data: Path, weights: bytes
) -> None:
    link = put_cached(tmp_path / "baked", "org/m", "Q4/m-Q4_K_M.gguf", weights)
    found = find_elsewhere("Q4/m-Q4_K_M.gguf", settings_of(data, tmp_path / "baked"), "gguf")
    assert found is not None
    assert found.path == link


def test_a_near_miss_in_a_mounted_folder_is_named(tmp_path: Path, data: Path) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", b"GGUF")
    message, hint = refusal(ConfigError, settings_of(data, tmp_path / "ollama", model="qwen3:4c"))
    assert message == ("no model of that name is on the volume: qwen3:4c\n  in mounted folders:\n  qwen3:4b (Ollama)")
    assert hint == "perhaps you meant qwen3:4b"


def test_a_model_that_is_not_whole_there_is_said(tmp_path: Path, data: Path) -> None:
    put_cached(tmp_path / "hub", "org/m", "m.gguf").resolve().unlink()
    settings = settings_of(data, tmp_path / "hub", model="m.gguf")
    assert find_elsewhere("m.gguf", settings, "gguf") is None
    message, _ = refusal(ModelUnreadableError, settings)
    assert message.endswith(f"Hugging Face's folder {tmp_path}/hub cannot be served: org/m/m.gguf: its blob is missing")


def test_without_mounted_folders_the_words_are_those_of_the_volume(data: Path) -> None:
    assert refusal(ConfigError, settings_of(data))[0] == f"no model was named and none is on the volume: {data}/models"


@pytest.mark.parametrize(
    "reference",
    [
        "ghcr.io/org/m:latest",
        "localhost:5000/m",
        "docker.io/ai/m",
        "10.0.0.1:5000/m",
    ],
)
def test_a_registry_is_only_asked_if_a_scheme_says_so(data: Path, reference: str) -> None:
    message, hint = refusal(ConfigError, settings_of(data, model=reference))
    assert message == f"address of a container registry has no scheme: {reference}"
    assert hint == f"write oci://{reference}"


@pytest.mark.parametrize(
    "reference",
    ["org/m:Q4_K_M", "m", "qwen3:4b", "hf.co/org/m", "org/m-1.5/a.b.gguf", "a.gguf", "my.models/a.gguf", "Qwen2.5/m"],
)
def test_other_names_are_no_artifacts_unless_a_registry_stands_before_them(reference: str) -> None:
    refuse_artifact(reference)
    refuse_artifact(f"oci://ghcr.io/{reference}")
    with pytest.raises(ConfigError, match="address of a container registry has no scheme"):
        refuse_artifact(f"ghcr.io/{reference.removesuffix('.gguf')}")


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[None]:
    """Become another user, who may enter the test's folders."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    let_others_in(tmp_path)
    os.seteuid(12345)
    yield
    os.seteuid(0)


def test_a_file_that_may_not_be_read_is_named_with_what_to_do(
    tmp_path: Path, data: Path, request: pytest.FixtureRequest
) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", b"GGUF")
    for blob in (tmp_path / "ollama/blobs").iterdir():
        blob.chmod(0o600)
    request.getfixturevalue("stranger")
    (model,) = list_store(Store(tool="Ollama", folder=tmp_path / "ollama")).models
    assert "it is not readable: sha256-" in (model.problem or "")
    assert "make it readable for user 12345, or start the container with `--user` of its owner" in (model.problem or "")


@pytest.mark.parametrize("tool", ["folder", "Ollama", "Hugging Face"])
def test_a_folder_that_may_not_be_read_is_a_problem_of_the_list(
    tmp_path: Path, tool: Tool, request: pytest.FixtureRequest
) -> None:
    closed = {
        "folder": tmp_path / "org",
        "Ollama": tmp_path / "manifests/registry.ollama.ai/library",
        "Hugging Face": tmp_path / "models--org--m/snapshots",
    }[tool]
    closed.mkdir(parents=True)
    closed.chmod(0)
    request.getfixturevalue("stranger")
    listing = list_store(Store(tool=tool, folder=tmp_path))
    assert listing.models == ()
    assert f"folder {'of models ' if tool != 'Ollama' else ''}cannot be read: {closed}: permission denied" in (
        listing.problem or ""
    )


def test_names_are_never_printed_raw(tmp_path: Path, data: Path) -> None:
    (tmp_path / "f").mkdir()
    for name in ("a\x1b[2J\n.gguf", "b\udcff.gguf"):
        (tmp_path / "f" / name).write_bytes(b"GGUF")
    said = "".join(refusal(ConfigError, settings_of(data, tmp_path / "f")))
    assert "\x1b" not in said
    assert said.isascii()


def test_weights_in_a_read_only_mount_beside_a_writable_volume(tmp_path: Path, data: Path, weights: bytes) -> None:
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    mount = ["mount", "--bind", "-o", "ro", str(tmp_path / "ollama"), str(tmp_path / "ollama")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        model = served(settings_of(data, tmp_path / "ollama", model="qwen3:4b"))
        assert read_model(model.path).file_bytes == len(weights)
    finally:
        subprocess.run(["umount", str(tmp_path / "ollama")], check=True)


def test_where_it_lies_is_said_for_a_person(tmp_path: Path) -> None:
    put_ollama(tmp_path, "library/qwen3/4b", b"GGUF")
    (model,) = find_stored("qwen3:4b", (Store(tool="Ollama", folder=tmp_path),))
    assert isinstance(model, StoredModel)
    assert model.where == f"Ollama's folder {tmp_path}"
