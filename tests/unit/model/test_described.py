"""Models described by shape only: same size as the published file, same facts as a real file."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest

from appliance.model import Model, read_model
from appliance.model.formats.ggml_types import GGML_TYPES
from appliance.model.formats.gguf import read_gguf
from appliance.model.shapes.described import describe_model, describe_shape, near_quantization, requantized
from appliance.model.shapes.quantize import BASES
from tests.builders import some
from tests.shapes import PUBLISHED, SMALL, Shape, write_gguf

QWEN = PUBLISHED["qwen3-8b"]
# Layers, width, rows of the feed-forward layer, heads, KV heads of each config.json; the output is tied below 8B.
QWENS = {
    "0.6b": (28, 1024, 3072, 16, 8),
    "1.7b": (28, 2048, 6144, 16, 8),
    "4b": (36, 2560, 9728, 32, 8),
    "14b": (40, 5120, 17408, 40, 8),
    "32b": (64, 5120, 25600, 64, 8),
}
# Bytes as images/models/qwen.yaml has them, and of ggml-org/gpt-oss-120b-GGUF and Qwen/Qwen3-0.6B-GGUF.
FILES = [
    ("0.6b", "Q8_0", 639_446_688),
    ("1.7b", "Q8_0", 1_834_426_016),
    ("4b", "Q4_K_M", 2_497_280_256),
    ("8b", "Q4_K_M", 5_027_783_488),
    ("14b", "Q4_K_M", 9_001_752_960),
    ("32b", "Q4_K_M", 19_762_149_024),
    ("30b-a3b", "Q4_K_M", 18_556_685_824),
    ("gpt-oss-120b", "MXFP4", 63_387_346_464),
]
PATH = Path("/data/models/m.gguf")


def shape_of(name: str) -> Shape:
    known = {"8b": QWEN, "30b-a3b": PUBLISHED["qwen3-30b-a3b"], **PUBLISHED}
    if name in known:
        return known[name]
    keys = ("block_count", "embedding_length", "feed_forward_length", "attention__head_count",
            "attention__head_count_kv")  # fmt: skip
    return replace(QWEN.changed(**dict(zip(keys, QWENS[name], strict=True))), is_tied=QWENS[name][1] < 4096)


def row_of(shape: Shape, quantization: str) -> dict[str, Any]:
    """Return the row that a recipe's rung has for this shape."""
    return {
        "architecture": shape.architecture, "vocabulary": shape.vocabulary, "is_tied": shape.is_tied,
        "metadata": dict(shape.metadata), "quantization": quantization,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "quantization", "published"), FILES)
def test_it_is_as_long_as_the_published_file(name: str, quantization: str, published: int) -> None:
    model = describe_shape(shape_of(name), PATH, quantization)
    assert model.file_bytes == pytest.approx(published, rel=0.001)
    assert model.file_type == quantization


@pytest.mark.parametrize(("name", "quantization"), some(list(product(PUBLISHED, ("Q8_0", "Q4_K_M", "MXFP4")))))
def test_it_is_the_model_that_would_be_read(tmp_path: Path, name: str, quantization: str) -> None:
    read = read_model(write_gguf(tmp_path / "m.gguf", PUBLISHED[name], quantization=quantization))
    described = describe_shape(PUBLISHED[name], tmp_path / "m.gguf", quantization)

    def plain(model: Model) -> Model:
        return replace(model, header_bytes=0, file_bytes=0, file_type=None)

    assert plain(described) == plain(read)
    assert described.file_bytes == pytest.approx(read.file_bytes, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_every_kind_of_layer_can_be_described(tmp_path: Path, name: str) -> None:
    read = read_model(write_gguf(tmp_path / "m.gguf", SMALL[name], quantization="Q8_0"))
    assert describe_shape(SMALL[name], tmp_path / "m.gguf", "Q8_0").stack == read.stack


def test_the_rung_of_a_recipe(tmp_path: Path) -> None:
    model = describe_model("qwen:8b-q4_k_m", row_of(QWEN, "Q4_K_M"), tmp_path / "q.gguf")
    assert (model.path, model.layers, model.native_context) == (tmp_path / "q.gguf", 36, 40960)
    assert (model.name, model.label, model.architecture) == ("qwen:8b-q4_k_m", "Q4_K_M", "qwen3")
    assert describe_model("q", row_of(QWEN, "Q4_K_M"), PATH, quantization="Q8_0").weights_bytes > model.weights_bytes


def test_a_file_of_known_length_is_what_it_is_scaled_to() -> None:
    usual = describe_shape(QWEN, PATH, "Q4_K_M")
    other = describe_model("q", row_of(QWEN, "UD-Q4_K_XL"), PATH, file_bytes=5_200_000_000)
    assert other.file_bytes == 5_200_000_000
    assert other.weights_bytes + other.header_bytes == pytest.approx(5_200_000_000, rel=1e-6)
    assert other.label == "UD-Q4_K_XL"
    factor = other.weights_bytes / usual.weights_bytes
    assert other.stack[3].dense_bytes / usual.stack[3].dense_bytes == pytest.approx(factor, rel=1e-6)
    assert other.parameters == usual.parameters


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Q4_K_M", "Q4_K_M"), ("q8_0", "Q8_0"), ("UD-Q4_K_XL", "Q4_K_M"), ("UD-Q8_K_XL", "Q8_0"), ("Q6_K_L", "Q6_K"),
        ("UD-Q2_K_XL", "Q2_K"), ("Q2_K_L", "Q2_K"), ("IQ3_XXS", "Q3_K_S"), ("UD-IQ2_M", "Q2_K"), ("IQ4_XS", "IQ4_XS"),
        ("Q3_K_L", "Q3_K_L"), ("UD-Q6_K_XL", "Q6_K"), ("MXFP4_MOE", "MXFP4"), ("Q5_K", "Q5_K_M"),
    ],
)  # fmt: skip
def test_the_usual_mixture_that_is_nearest(name: str, near: str) -> None:
    assert near_quantization(name) == near


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization": "WX9"}, "quantization is unknown: WX9"),
        ({"architecture": "nobody"}, "nobody"),
        ({"metadata": {"block_count": 2}}, "the shape of q has no attention.head_count, or it is 0"),
        ({"metadata": {}}, "the shape of q has no block_count"),
        ({"architecture": "glm4moe"}, "tensors of this architecture are unknown: glm4moe; known are cohere2, "),
        ({"vocabulary": None}, "the shape of q does not describe a model"),
    ],
)
def test_a_shape_that_is_none_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        describe_model("q", row_of(QWEN, "Q4_K_M") | change, PATH)


def test_every_type_of_a_mixture_has_its_size() -> None:
    names = {kind.name for kind in GGML_TYPES.values()}
    assert set(BASES.values()) <= names
    # As llama-quantize calls them; what is left out is in the module's first lines.
    assert set(BASES) == {
        "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0",
        "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "MXFP4",
    }  # fmt: skip
    sizes = {kind.name: (kind.block_size, kind.block_bytes) for kind in GGML_TYPES.values()}
    assert all(sizes[name] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in BASES.values())


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "gemma-3-12b", "qwen3.6-35b-a3b"])
def test_the_same_tensors_in_another_quantization(tmp_path: Path, name: str) -> None:
    header = read_gguf(write_gguf(tmp_path / "m.gguf", PUBLISHED[name], quantization="Q8_0"))
    other = requantized(header, "Q4_K_M")
    wanted = describe_shape(PUBLISHED[name], tmp_path / "m.gguf", "Q4_K_M")
    assert (other.weights_bytes, other.stack, other.label) == (wanted.weights_bytes, wanted.stack, "Q4_K_M")
    scaled = requantized(header, "Q4_K_M", file_bytes=other.file_bytes + 10**9)
    assert scaled.file_bytes == other.file_bytes + 10**9
    assert scaled.weights_bytes > other.weights_bytes
    with pytest.raises(ValueError, match="is unknown"):
        requantized(header, "my-own")
