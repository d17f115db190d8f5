"""Projectors and adapters of a model, and its kind of output, from headers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import ConfigError, FatalError, ModelUnreadableError
from appliance.model import Model, check_match, only_model, read_adapter, read_model, read_projector
from appliance.model.files.find import find_projectors
from tests.shapes import SMALL, write_gguf
from tests.shapes.beside import write_adapter, write_projector

WIDTH = 256  # of SMALL["gqa"]
QUERY = {f"blk.{layer}.attn_q.weight": (512, WIDTH) for layer in range(4)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", SMALL["gqa"], quantization="Q8_0")


@pytest.fixture
def model(path: Path) -> Model:
    return read_model(path)


@pytest.mark.thorough
def test_a_projector_tells_what_it_reads_and_takes(tmp_path: Path) -> None:
    path = write_projector(
        tmp_path / "mmproj.gguf", WIDTH, layers=1, width=1152, wide=4304, heads=16, side=896, patch=14
    )
    found = read_projector(path)
    assert (found.kind, found.reads, found.length) == ("gemma3", ("image",), WIDTH)
    assert 0 <= path.stat().st_size - found.weights_bytes - found.header_bytes < 32
    # The engine's log: "reserve_compute_meta: CPU compute buffer size = 121.25 MiB". With a gate it would be more.
    assert 121.25 <= found.work_mib < 200


def test_the_projector_beside_is_the_one_whose_vectors_the_model_takes(path: Path) -> None:
    write_projector(path.with_name("mmproj-model.gguf"), 512)
    assert (found := read_model(path).projector)
    assert found.path.name == "mmproj-model.gguf"  # and a start refuses it
    write_projector(path.with_name("mmproj-F16.gguf"), WIDTH)
    assert (found := read_model(path).projector)
    assert found.path.name == "mmproj-F16.gguf"


def test_files_of_one_repository_share_its_projector(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--r/snapshots/abc"
    snapshot.mkdir(parents=True)
    for folder in (tmp_path, snapshot):
        for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"):
            (folder / name).touch()
    assert find_projectors(tmp_path / "m-Q8_0.gguf") == ()  # of which of the two models, its name does not tell
    assert find_projectors(snapshot / "m-Q8_0.gguf") == (snapshot / "mmproj-F16.gguf",)


def test_a_projector_of_another_model_is_refused(model: Model, tmp_path: Path) -> None:
    check_match(read_projector(write_projector(tmp_path / "right.gguf", WIDTH)), model, "flag --mmproj")
    wrong = read_projector(write_projector(tmp_path / "wrong.gguf", 512))
    with pytest.raises(ModelUnreadableError) as caught:
        check_match(wrong, model, "flag --mmproj")
    assert caught.value.exit_code == 30
    assert caught.value.message == (
        "projector is for another model: wrong.gguf (flag --mmproj) gives vectors of 512 values, "
        "but model.gguf takes 256"
    )
    check_match(replace(wrong, length=None), model, "")  # a kind that is not known: the engine compares


def header(path: Path, architecture: str, **keys: str | bool | int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = key.replace("__", ".")
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(name, value)  # type: ignore[operator]
    writer.add_tensor("mm.2.weight", np.zeros((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIZES: dict[str, int] = {"clip__audio__embedding_length": 1280, "clip__audio__feed_forward_length": 5120}


def test_sound_is_told_apart_from_images(tmp_path: Path) -> None:
    names: dict[str, str | bool | int] = {"clip__has_audio_encoder": True, "clip__audio__projector_type": "qwen2a"}
    found = read_projector(header(tmp_path / "m.gguf", "clip", **names, **SIZES))
    assert (found.kind, found.reads, found.length) == ("qwen2a", ("audio",), None)  # mm.a.fc.weight is not there
    assert 150 < found.work_mib < 250


@pytest.mark.parametrize(
    ("architecture", "keys", "said"),
    [
        ("llama", {}, "it is not a multimodal projector but a model of llama"),
        ("clip", {}, "it reads neither images nor audio"),
        ("clip", {"clip__has_vision_encoder": True}, "its header has no key clip.vision.embedding_length"),
        ("clip", {"clip__has_audio_encoder": True, **SIZES, "clip__audio__embedding_length": 0}, "from 1 to"),
    ],
)
def test_what_is_no_projector_says_why(
    tmp_path: Path, architecture: str, keys: dict[str, bool | int], said: str
) -> None:
    with pytest.raises(ModelUnreadableError, match=said) as caught:
        read_projector(header(tmp_path / "m.gguf", architecture, **keys))
    assert caught.value.exit_code == 30


def test_an_adapter_tells_what_it_adds_to_each_layer(model: Model, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", {**QUERY, "output.weight": (512, WIDTH)}, rank=8)
    found = read_adapter(path, 0.5, model)
    each = 2 * 8 * (512 + WIDTH)  # f16
    assert found.layer_bytes == tuple((layer, each) for layer in range(4))
    assert (found.other_bytes, found.weights_bytes, found.scale) == (each, 5 * each, 0.5)


@pytest.mark.parametrize(
    ("shapes", "architecture", "said"),
    [
        (QUERY, "qwen3", "adapter has another base: qwen3, but model.gguf is llama"),
        (
            {"blk.0.attn_q.weight": (512, 128)},
            "llama",
            "blk.0.attn_q.weight is 256 x 512 in the base and 128 x 512 in the",
        ),
        (
            {"blk.4.attn_q.weight": (512, 256)},
            "llama",
            "base than model.gguf: a.gguf: it has no blk.4.attn_q",
        ),
        ({}, "llama", "it has no tensors of a LoRA"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    model: Model, tmp_path: Path, shapes: dict[str, tuple[int, int]], architecture: str, said: str
) -> None:
    with pytest.raises(ModelUnreadableError, match=said) as caught:
        read_adapter(write_adapter(tmp_path / "a.gguf", shapes, architecture=architecture), 1.0, model)
    assert caught.value.exit_code == 30


def test_a_model_is_no_adapter(model: Model) -> None:
    with pytest.raises(ModelUnreadableError, match=r"it is not a LoRA adapter: general\.type None, adapter\.type None"):
        read_adapter(model.path, 1.0, model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(1, 2000), flip=st.integers(0, 2000))
def test_damaged_files_are_refused_in_words(tmp_path: Path, model: Model, cut: int, flip: int) -> None:
    for path in (write_adapter(tmp_path / "a.gguf", QUERY), write_projector(tmp_path / "p.gguf", WIDTH)):
        data = bytearray(path.read_bytes())
        data[flip] ^= 0xFF
        path.write_bytes(data[:-cut])
        for read in (lambda path: read_adapter(path, 1.0, model), read_projector):
            with pytest.raises(FatalError) as caught:
                read(path)
            assert caught.value.exit_code == 30


def test_what_lies_beside_a_model_is_not_among_the_models_to_choose_from(path: Path) -> None:
    write_adapter(path.with_name("style.gguf"), QUERY)
    write_projector(path.with_name("eyes.gguf"), WIDTH)
    assert only_model(path.parent) == path
    write_gguf(path.with_name("other.gguf"), SMALL["gqa"])
    with pytest.raises(ConfigError, match="no model was named and 2 are on the volume"):
        only_model(path.parent)


@pytest.mark.parametrize(
    ("number", "pooling", "gives"),
    [(None, None, "text"), (0, "none", "text"), (1, "mean", "vectors"), (3, "last", "vectors"), (4, "rank", "scores")],
)
def test_the_header_tells_what_a_model_gives(tmp_path: Path, number: int | None, pooling: str, gives: str) -> None:
    change = {} if number is None else {"pooling_type": number}
    found = read_model(write_gguf(tmp_path / "m.gguf", SMALL["gqa"].changed(**change)))
    assert (found.pooling, found.gives) == (pooling, gives)
    assert found.is_embedding_model == (gives != "text")
    assert found.is_reranker == (gives == "scores")


def test_a_pooling_type_that_is_unknown_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL["gqa"].changed(pooling_type=5))
    with pytest.raises(ModelUnreadableError, match=r"pooling_type must be a whole number from 0 to 4: 5"):
        read_model(path)


def test_a_quantization_in_a_folder_of_its_own_has_the_repositorys_projector(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--r/snapshots/abc"
    (snapshot / "Q8_0").mkdir(parents=True)
    model = write_gguf(snapshot / "Q8_0/m-Q8_0.gguf", SMALL["gqa"], quantization="Q8_0")
    write_projector(snapshot / "mmproj-F16.gguf", WIDTH)
    assert (found := read_model(model).projector)
    assert found.path == snapshot / "mmproj-F16.gguf"
