"""What images/models says of real models: every fact cited, and sizes that fit the shape and the quantization."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from appliance.image_facts import Rung
from appliance.model import read_model
from appliance.model.shapes.quantize import size_bytes, tensor_type
from appliance.model.shapes.tensors import tensors
from images.recipes import recipe
from images.recipes.recipe import ModelRow, RecipeRow, RungRow, ShapeRow
from images.rows import PROJECT
from tests.shapes import QUANTIZATIONS, Shape, write_gguf

NAMES = recipe.names(PROJECT)
ROWS = {name: recipe.load(PROJECT, name) for name in NAMES}
RUNGS = [(row, rung) for row in ROWS.values() for rung in row.rungs]
GGUF = [(row, rung) for row, rung in RUNGS if rung.format == "gguf"]
SHAPES = [(f"{row.name}:{name}", model) for row in ROWS.values() for name, model in row.models.items() if model.shape]
WITHOUT_EXCEPTIONS = {
    "Q8_0",
    "Q6_K",
    "Q4_K_M",
    "Q4_0",
    "MXFP4",
}  # of llama.cpp's rules for which matrix gets which type
# Who publishes these gives some matrices more bits than llama.cpp does by itself: the new models of Unsloth, and
# Google's E4B with its large embeddings.
OWN_MIXES = {"3.5-0.8b", "3.5-2b", "3.5-4b", "3.6-35b-a3b", "e2b", "e4b"}


def test_the_recipes_that_users_ask_for() -> None:
    assert {"demo", "gemma", "gpt-oss", "qwen"} <= set(NAMES)
    sizes = ROWS["qwen"].models.keys()
    assert {"0.6b", "1.7b", "4b", "8b", "14b", "30b-a3b", "32b", "30b-a3b-2507", "3.5-9b", "3.8-27b"} <= sizes
    assert {"e2b", "e4b", "12b", "26b-a4b", "31b", "3-27b"} <= ROWS["gemma"].models.keys()
    assert {"20b", "120b"} == ROWS["gpt-oss"].models.keys()


@pytest.mark.parametrize(("row", "rung"), RUNGS, ids=lambda each: each.name)
def test_sizes_hashes_and_origin_are_cited(row: RecipeRow, rung: RungRow) -> None:
    assert rung.wheel or rung.source or row.rung(rung.made_of or "").wheel
    for source in rung.source:
        cited = row.sources[source]
        assert len(cited.commit) == 40
        assert cited.repo.count("/") == 1
        assert str(cited) == f"{cited.repo} {cited.path} at {cited.commit}, read {cited.read}"
    if rung.loss:
        assert rung.loss.source


def test_one_hash_is_one_file() -> None:
    """A hash has the same size and path in every rung. A file of a repository's revision has only one hash."""
    known: dict[str, tuple[int, str]] = {}
    for _, rung in RUNGS:
        for file in rung.files:
            assert known.setdefault(file.sha256, (file.bytes, file.path)) == (file.bytes, file.path)
    places = {(rung.repo, rung.revision, file.path, file.sha256) for _, rung in RUNGS for file in rung.files}
    assert len(places) == len({place[:3] for place in places})


def test_every_model_has_a_tier_for_most_and_names_are_made_of_model_and_quantization() -> None:
    for row, rung in RUNGS:
        assert rung.name.startswith(rung.model)
        assert rung.name.endswith(rung.quantization.lower())
        tiers = {each.tier for each in row.rungs if each.model == rung.model}
        assert tiers & {"balanced", "quality"}
    assert {rung.tier for _, rung in RUNGS} == {"compact", "balanced", "quality"}


def test_the_sizes_of_a_rung_add_up() -> None:
    large: Rung = recipe.as_recipe(ROWS["gpt-oss"]).find("120b")[0]
    assert large.bytes == sum(file.bytes for file in large.files) == 63_387_346_464
    assert len(large.weights) == 3
    seeing: Rung = recipe.as_recipe(ROWS["gemma"]).find("e4b-qat")[0]
    assert seeing.projector
    assert seeing.bytes == seeing.weights[0].bytes + seeing.projector.bytes


@pytest.mark.parametrize(("row", "rung"), GGUF, ids=lambda each: each.name)
def test_bytes_are_what_shape_and_quantization_make(row: RecipeRow, rung: RungRow) -> None:
    """Within 3 %; a mixture of the publisher's own is up to 15 % larger, and never smaller."""
    kind, shape = rung.quantization.removeprefix("UD-").replace("_XL", "_M"), row.models[rung.model].shape
    if shape is None or kind not in QUANTIZATIONS:
        pytest.skip("no shape, or a type whose rules are not in tests/shapes")
    known = _shape(shape)
    reckoned = sum(size_bytes(size, tensor_type(name, size, known, kind)) for name, size in tensors(known))
    weights = sum(file.bytes for file in rung.files if "mmproj" not in file.path)
    is_plain = kind in WITHOUT_EXCEPTIONS and rung.model not in OWN_MIXES
    least = -0.03 if is_plain else -0.15
    assert least <= reckoned / weights - 1 <= 0.03


@pytest.mark.parametrize(("name", "model"), SHAPES, ids=[name for name, _ in SHAPES])
def test_parameters_are_those_of_the_shape(name: str, model: ModelRow) -> None:
    """Active are those that are read for a token: experts by share, and of an embedding of its own one row."""
    assert model.shape, name
    known = _shape(model.shape)
    sizes = {tensor: math.prod(size) for tensor, size in tensors(known)}
    share = known.get("expert_used_count") / known.get("expert_count", 1)
    looked_up = {"per_layer_token_embd.weight", *(() if known.is_tied else ("token_embd.weight",))}
    active = sum(size * (share if "_exps" in tensor else tensor not in looked_up) for tensor, size in sizes.items())
    assert model.parameters_b == pytest.approx(sum(sizes.values()) / 1e9, rel=0.001)
    assert model.active_b == pytest.approx(active / 1e9, rel=0.001)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "model"), SHAPES, ids=[name for name, _ in SHAPES])
def test_the_product_knows_what_a_file_of_each_shape_takes(name: str, model: ModelRow, tmp_path: Path) -> None:
    """A rung is chosen by its layers, their caches and the longest context, before the file is fetched."""
    assert model.shape, name
    found = read_model(write_gguf(tmp_path / "x.gguf", _shape(model.shape), quantization="Q4_0"))
    keys = model.shape.metadata
    blocks = next(value for key, value in keys.items() if key.endswith("block_count"))
    assert found.cache_reason is None
    assert found.architecture == model.shape.architecture
    assert len(found.stack) == blocks
    assert found.native_context == next(value for key, value in keys.items() if key.endswith("context_length"))
    assert any(layer.k_elements for layer in found.stack)
    assert any(layer.expert_bytes for layer in found.stack) is ("-a" in name or "gpt-oss" in name)


def test_a_safetensors_ladder_has_all_that_an_engine_reads() -> None:
    ladder = [rung for rung in ROWS["qwen"].rungs if rung.format == "safetensors"]
    assert len(ladder) >= 3
    for rung in ladder:
        paths = [Path(file.path).name for file in rung.files]
        assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"} <= set(paths)
        assert paths[0].startswith("model-00001-of-")


def _shape(row: ShapeRow) -> Shape:
    return Shape(
        name="x",
        architecture=row.architecture,
        metadata=row.metadata,
        vocabulary=row.vocabulary,
        is_tied=row.is_tied,
        source="x",
    )
