"""Models on the volume in the layout of huggingface_hub's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError, ModelUnreadableError
from appliance.model import list_models, plain_name, resolve_model
from appliance.model.files.find import find_model
from appliance.model.files.hub_cache import find_cached, list_cached
from tests.unit.weights.cache_files import OTHER_COMMIT, put_cached


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def refusal(kind: type[Exception], request: str | None, models: Path) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(request, models)
    return str(caught.value)


def test_snapshots_are_listed_and_blobs_and_locks_are_not(models: Path) -> None:
    link = put_cached(models, "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf")
    put_cached(models, "Qwen/Qwen3-8B-GGUF", "mmproj-F16.gguf", b"projector")
    put_cached(models, "Qwen/Qwen3-8B-GGUF", "README.md", b"words")
    (link.parents[2] / "blobs" / ("c" * 64 + ".incomplete")).write_bytes(b"GG")
    (models / "flat.gguf").write_bytes(b"x")
    assert list_models(models) == (models / "flat.gguf", link)


@pytest.mark.parametrize(
    "request_text",
    [
        "Qwen/Qwen3-8B-GGUF",
        "qwen/qwen3-8b-gguf",
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "Qwen/Qwen3-8B-GGUF:q4_k_m",
        "Qwen/Qwen3-8B-GGUF@main",
        "Qwen/Qwen3-8B-GGUF@aaaaaaa:Q4_K_M",
        "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf",
        "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M",
        "Qwen3-8B-Q4_K_M",
        "qwen3-8b-q4_k_m.gguf",
    ],
)
def test_every_name_of_it_finds_it(models: Path, request_text: str) -> None:
    link = put_cached(models, "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf")
    put_cached(models, "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q4_K_M.gguf")
    assert resolve_model(request_text, models) == link


@pytest.mark.parametrize("request_text", ["Qwen/Qwen3-8B-GGUF:Q4_K", "Qwen/Qwen3-8B-GGUF:Q8_0", "Qwen/Other", "a/b/c"])
def test_what_is_another_name_finds_nothing(models: Path, request_text: str) -> None:
    put_cached(models, "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf")
    assert find_model(request_text, models) is None
    assert "no model of that name is on the volume" in refusal(ConfigError, request_text, models)


def test_several_quantizations_ask_which(models: Path) -> None:
    first = put_cached(models, "org/m", "m-Q4_K_M.gguf")
    second = put_cached(models, "org/m", "m-Q8_0.gguf", b"GGUF8")
    said = refusal(ConfigError, "org/m", models)
    assert f"matches 2 files on the volume\n  {first}\n  {second}" in said
    assert find_model("org/m", models) is None  # another stage may choose
    assert resolve_model("org/m:Q8_0", models) == second


def test_an_update_hides_the_older_file_of_the_same_name_and_keeps_the_others(models: Path) -> None:
    put_cached(models, "org/m", "m-Q4_K_M.gguf", b"old")
    kept = put_cached(models, "org/m", "m-Q8_0.gguf", b"old8")
    new = put_cached(models, "org/m", "m-Q4_K_M.gguf", b"new", commit=OTHER_COMMIT)
    assert list_models(models) == tuple(sorted([kept, new]))
    assert resolve_model("org/m@aaaa:Q4_K_M", models).read_bytes() == b"old"


def test_an_update_that_is_not_whole_leaves_the_older_one(models: Path) -> None:
    old = put_cached(models, "org/m", "m-Q4_K_M.gguf", b"old")
    new = put_cached(models, "org/m", "m-Q4_K_M.gguf", b"new", commit=OTHER_COMMIT)
    new.resolve().unlink()
    assert resolve_model("org/m", models) == old


def test_a_broken_link_is_no_model_and_is_said(models: Path) -> None:
    link = put_cached(models, "org/m", "m-Q4_K_M.gguf")
    link.resolve().unlink()
    assert list_models(models) == ()
    assert find_model("org/m", models) is None
    with pytest.raises(ModelUnreadableError) as caught:
        resolve_model("org/m", models)
    assert caught.value.message == "model on the volume is incomplete: org/m/m-Q4_K_M.gguf: its blob is missing"
    assert caught.value.hint == "fetch it again: appliance models pull org/m"


def test_a_link_to_an_unfinished_blob_is_no_model(models: Path) -> None:
    link = put_cached(models, "org/m", "m.gguf")
    partial = link.resolve().rename(f"{link.resolve()}.incomplete")
    link.unlink()
    link.symlink_to(os.path.relpath(partial, link.parent))
    assert "its download is not finished" in refusal(ModelUnreadableError, "org/m", models)


def test_a_link_out_of_the_cache_is_no_model(models: Path) -> None:
    (models.parent / "secret.gguf").write_bytes(b"GGUF")
    link = models / "models--org--m/snapshots/main/m.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../../secret.gguf")
    assert list_models(models) == ()
    assert "it links out of its folder" in refusal(ModelUnreadableError, "org/m", models)
    link.unlink()
    link.symlink_to(link)
    assert "is incomplete" in refusal(ModelUnreadableError, "org/m", models)


def test_a_blob_of_the_store_that_repositories_share_is_one(models: Path) -> None:
    """huggingface_hub 2.4 keeps `blobs/<2 hex>/<hash>` for all repositories and links their blobs to it."""
    link = put_cached(models, "org/m", "m.gguf")
    blob = link.resolve()
    shared = models / "blobs/ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert list_models(models) == (link,)


def test_a_split_file_needs_all_its_parts(models: Path) -> None:
    parts = [put_cached(models, "org/m", f"Q4/m-0000{n}-of-00003.gguf", bytes([n])) for n in (1, 2, 3)]
    assert list_models(models) == (parts[0],)
    for request in ("org/m:Q4", "org/m/Q4/m", "m", "org/m/Q4/m-00001-of-00003.gguf"):
        assert resolve_model(request, models) == parts[0]
    parts[2].unlink()
    assert list_models(models) == ()
    assert "org/m/Q4/m-00001-of-00003.gguf: part 3 of 3 is missing" in refusal(ModelUnreadableError, "org/m", models)
    parts[0].unlink()
    assert [model.problem for model in list_cached(models / "models--org--m")] == ["part 1 of 3 is missing"]


def test_a_snapshot_of_safetensors_is_a_folder_with_the_name_of_its_repository(models: Path) -> None:
    put_cached(models, "Qwen/Qwen2.5-7B", "config.json", b"{}")
    first = put_cached(models, "Qwen/Qwen2.5-7B", "model-00001-of-00002.safetensors", b"1")
    second = put_cached(models, "Qwen/Qwen2.5-7B", "model-00002-of-00002.safetensors", b"2")
    assert list_models(models) == (first.parent,)
    assert resolve_model("Qwen/Qwen2.5-7B", models) == resolve_model("qwen2.5-7b", models) == first.parent
    assert plain_name(first.parent) == "Qwen2.5-7B"
    second.unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(ModelUnreadableError, "Qwen/Qwen2.5-7B", models)


def test_a_file_that_came_from_a_url_is_found_by_it_and_by_its_stem(models: Path) -> None:
    url = "https://example.org/files/m.gguf"
    link = put_cached(models, f"url--example.org--{hashlib.sha256(url.encode()).hexdigest()[:12]}", "m.gguf")
    assert resolve_model(url, models) == resolve_model("m", models) == link
    (model,) = list_cached(link.parents[2])
    assert model.name == "m.gguf"  # what is listed can be asked for


def test_what_a_name_holds_is_never_printed_raw(models: Path) -> None:
    (models / "a\x1b[2J\nb.gguf").write_bytes(b"x")
    put_cached(models, "org/m", "e\x1b]0;title\x07.gguf")
    said = refusal(ConfigError, None, models) + refusal(ConfigError, "nothing", models)
    assert "\x1b" not in said
    assert r"a\x1b[2J\nb.gguf" in said
    assert r"e\x1b]0;title\x07.gguf" in said


def test_a_volume_of_an_older_version_is_served_as_before(models: Path) -> None:
    (models / "org").mkdir()
    (models / "org/m-Q4_K_M.gguf").write_bytes(b"x")
    assert resolve_model(None, models) == resolve_model("m-q4_k_m", models) == models / "org/m-Q4_K_M.gguf"


def test_a_start_without_such_folders_imports_nothing_for_them(models: Path) -> None:
    (models / "m.gguf").write_bytes(b"x")
    code = (
        "import sys; from pathlib import Path; from appliance.model import resolve_model\n"
        f"resolve_model(None, Path({str(models)!r})); resolve_model('m', Path({str(models)!r}))\n"
        "print([name for name in sys.modules if 'hub_cache' in name or name.startswith('appliance.weights')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_none(text: str) -> None:
    assert find_cached(text, Path("/nowhere")) == ()
