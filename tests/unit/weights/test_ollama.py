"""Ollama's folder, as Ollama writes it and as an attacker could."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.weights.stores.ollama import MANIFEST_BYTES, OllamaModel, is_store, list_ollama, parse_name
from tests.unit.weights.cache_files import layer, put_blob, put_manifest, put_ollama

LIBRARY = "registry.ollama.ai", "library"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "ollama"


def only(store: Path) -> OllamaModel:
    (model,) = list_ollama(store)
    return model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3", (*LIBRARY, "qwen3", "latest")),
        ("Qwen3:4B", (*LIBRARY, "qwen3", "4b")),
        ("me/mine:q8", ("registry.ollama.ai", "me", "mine", "q8")),
        ("ollama.com/library/qwen3:4b", (*LIBRARY, "qwen3", "4b")),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", ("hf.co", "qwen", "qwen3-8b-gguf", "q4_k_m")),
        ("localhost:5000/a/b", ("localhost:5000", "a", "b", "latest")),
        ("a/b/c/d", None),
        ("", None),
        ("../x", None),
        ("x:", None),
        ("a//b", None),
        ("a\nb", None),
        ("x" * 400, None),
    ],
)
def test_names_are_read_as_ollama_reads_them(text: str, name: tuple[str, ...] | None) -> None:
    assert parse_name(text) == name


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_none(text: str) -> None:
    parse_name(text)


def test_a_pulled_model_is_listed_with_its_weights_and_projector(store: Path) -> None:
    put_ollama(store, "library/gemma3/4b", b"GGUF weights", b"GGUF projector")
    model = only(store)
    assert is_store(store)
    assert (model.name, model.problem) == ("gemma3:4b", None)
    assert model.weights is not None
    assert model.weights.path.read_bytes() == b"GGUF weights"
    assert model.weights.sha256 == hashlib.sha256(b"GGUF weights").hexdigest()
    assert model.projector is not None
    assert model.projector.path.read_bytes() == b"GGUF projector"


def test_the_shortest_name_is_shown(store: Path) -> None:
    put_ollama(store, "library/qwen3/4b", b"1")
    put_ollama(store, "me/mine/latest", b"2")
    digest = put_blob(store, b"3")
    put_manifest(store, "Qwen/Qwen3-8B-GGUF/Q4_K_M", [layer("model", digest, 1)], host="hf.co")
    names = [model.name for model in list_ollama(store)]
    assert names == ["hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "me/mine:latest", "qwen3:4b"]
    assert [parse_name(name) for name in names] == [
        ("hf.co", "qwen", "qwen3-8b-gguf", "q4_k_m"),
        ("registry.ollama.ai", "me", "mine", "latest"),
        (*LIBRARY, "qwen3", "4b"),
    ]


def test_an_entry_of_manifests_v2_is_a_link_to_a_blob_and_wins(store: Path) -> None:
    put_ollama(store, "library/qwen3/4b", b"old")
    document = json.dumps({"layers": [layer("model", put_blob(store, b"new"), 3)]}).encode()
    blob = store / "blobs" / put_blob(store, document).replace(":", "-")
    link = store / "manifests-v2/ollama.com/library/qwen3/4b"
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    model = only(store)
    assert (model.name, model.problem) == ("qwen3:4b", None)
    assert model.weights is not None
    assert model.weights.path.read_bytes() == b"new"


@pytest.mark.parametrize("is_reference", [True, False])
def test_of_a_list_the_child_with_a_gguf_file_is_taken(store: Path, is_reference: bool) -> None:
    child: dict[str, Any] = {"layers": [layer("model", put_blob(store, b"GGUF"), 4)]}
    if is_reference:
        child = {"digest": put_blob(store, json.dumps(child).encode())}
    children = [{"runner": "mlx", "digest": "sha256:" + "0" * 64}, {"runner": "ollama", **child}]
    put_manifest(store, "library/qwen3/4b", [], mediaType=LIST, manifests=children)
    assert only(store).problem is None
    put_manifest(store, "library/qwen3/4b", [], mediaType=LIST, manifests=children[:1])
    assert only(store).problem == "it has no GGUF file, only weights for another Ollama runner"


LIST = "application/vnd.ollama.manifest.list.v2+json"
KEYS = ("mediaType", "layers", "digest", "size", "manifests", "runner", "schemaVersion")


def test_a_damaged_child_of_a_list_is_refused(store: Path) -> None:
    digest = put_blob(store, b'{"layers": []}')
    (store / "blobs" / digest.replace(":", "-")).write_bytes(b'{"layers": 1}')
    put_manifest(store, "library/qwen3/4b", [], mediaType=LIST, manifests=[{"runner": "ollama", "digest": digest}])
    assert "its manifest is damaged" in (only(store).problem or "")


@pytest.mark.parametrize(
    ("digest", "words"),
    [
        ("sha256:../../../../etc/passwd", "has an invalid digest: sha256:../../../../etc/passwd"),
        ("sha256-" + "a" * 63, "has an invalid digest"),
        ("sha512:" + "a" * 64, "has an invalid digest"),
        ("sha256:\x1b[2J", r"has an invalid digest: sha256:\x1b[2J"),
        (None, "has an invalid digest: None"),
        (["sha256:" + "a" * 64], "has an invalid digest"),
        ("sha256:" + "a" * 64, "its blob is missing: sha256-aaaa"),
    ],
)
def test_a_digest_that_names_no_blob_is_refused(store: Path, digest: Any, words: str) -> None:
    (store / "blobs").mkdir(parents=True)
    put_manifest(store, "library/m/latest", [layer("model", digest, 1)])
    model = only(store)
    assert words in (model.problem or "")
    assert model.weights is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a JSON document"),
        (b"{", "not a JSON document"),
        (b"[]", "not a JSON document"),
        (b"[" * 200_000, "not a JSON document"),
        (b'{"layers": 7}', "no list of layers"),
        (b'{"layers": [7]}', "no list of layers"),
        (b'{"layers": []}', "runs in Ollama's cloud"),
        (b" " * (MANIFEST_BYTES + 1), "larger than 1,048,576 bytes"),
        (b"\xff\xfe", "not a JSON document"),
        (b'{"mediaType": "%s", "manifests": {"a": 1}}' % LIST.encode(), "no GGUF file"),
    ],
)
def test_a_manifest_that_is_none_is_a_problem_and_no_crash(store: Path, data: bytes, words: str) -> None:
    put_ollama(store, "library/m/latest", b"GGUF").write_bytes(data)
    put_ollama(store, "library/sound/latest", b"GGUF")
    damaged, sound = list_ollama(store)
    assert words in (damaged.problem or "")
    assert sound.problem is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_a_model_or_a_problem(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    store = tmp_path_factory.mktemp("ollama")
    put_manifest(store, "library/m/latest", []).write_text(json.dumps(document))
    assert only(store).problem


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("model", "adapter"), "it has an adapter"),
        (("model", "model"), "its weights are in 2 files"),
        (("tensor", "tensor"), "it is not a GGUF file"),
    ],
)
def test_what_an_engine_could_not_serve_is_said(store: Path, kinds: tuple[str, ...], words: str) -> None:
    digest = put_blob(store, b"GGUF")
    put_manifest(store, "library/m/latest", [layer(kind, digest, 4) for kind in kinds])
    assert words in (only(store).problem or "")


def test_a_download_that_is_not_done_is_no_model(store: Path) -> None:
    put_ollama(store, "library/m/latest", b"GGUF")
    blob = next((store / "blobs").glob(f"sha256-{hashlib.sha256(b'GGUF').hexdigest()}"))
    blob.write_bytes(b"GG")
    assert "its blob has 2 bytes, and the manifest says 4" in (only(store).problem or "")
    blob.rename(blob.with_name(f"{blob.name}-partial"))
    assert only(store).problem == "its download is not finished"


def test_links_out_of_the_folder_are_refused(store: Path, tmp_path: Path) -> None:
    manifest = put_ollama(store, "library/m/latest", b"GGUF")
    blob = store / "blobs" / f"sha256-{hashlib.sha256(b'GGUF').hexdigest()}"
    (tmp_path / "other").write_bytes(b"GGUF")
    blob.unlink()
    blob.symlink_to(tmp_path / "other")
    assert "its blob is not a file in the folder" in (only(store).problem or "")
    text = manifest.read_text()
    (tmp_path / "manifest").write_text(text)
    manifest.unlink()
    manifest.symlink_to(tmp_path / "manifest")
    assert only(store).problem == "its manifest is a link to outside of the folder"
    manifest.unlink()
    os.mkfifo(manifest)
    assert only(store).problem == "its manifest is not a JSON document"
    manifest.unlink()
    (store / "manifests/registry.ollama.ai/library/loop").symlink_to(store / "manifests")
    assert list_ollama(store) == ()


def test_names_that_are_none_are_passed_over(store: Path) -> None:
    folder = put_ollama(store, "library/m/latest", b"GGUF").parent
    for name in (".manifest-1234", "a b", "e\x1b[2J", "new\nline", "-x"):
        (folder / name).write_text("{}")
    assert only(store).name == "m:latest"
