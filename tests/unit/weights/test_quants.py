"""Selection of a repository's files that form one model."""

from __future__ import annotations

import pytest

from appliance.errors import ConfigError
from appliance.weights.cache.quants import GgufSet, folder_files, gguf_sets, label_of, pick, projector_of

FILES = [
    "README.md",
    "Big-imatrix.gguf",
    "BF16/Big-BF16-00001-of-00003.gguf",
    "BF16/Big-BF16-00002-of-00003.gguf",
    "BF16/Big-BF16-00003-of-00003.gguf",
    "Big-Q4_K_M.gguf",
    "Big-Q4_K_S.gguf",
    "Big-UD-Q6_K_XL.gguf",
    "Big-Q8_0-00001-of-00002.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_0.gguf", "Q4_0"),
        ("x/Qwen3-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Model.F16.gguf", "F16"),
        ("Q8_0/part.gguf", "Q8_0"),
        ("Llama-3.Q2_K-of-Q8_0.gguf", "Q8_0"),
        ("plain.gguf", ""),
        ("TQ1_0.gguf", "TQ1_0"),
    ],
)
def test_labels(path: str, label: str) -> None:
    assert label_of(path) == label


def test_sets_are_files_or_all_parts_of_one() -> None:
    sets = {each.label: each for each in gguf_sets(FILES)}
    assert sorted(sets) == ["BF16", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q6_K_XL"]
    assert sets["BF16"].paths == tuple(FILES[2:5])
    assert [label for label, each in sets.items() if each.missing] == ["Q8_0"]


@pytest.mark.parametrize(
    ("quant", "label"),
    [(None, "Q4_K_M"), ("q4_k_s", "Q4_K_S"), ("Q6_K_XL", "UD-Q6_K_XL"), ("bf16", "BF16"), ("UD-Q6_K", "UD-Q6_K_XL")],
)
def test_the_one_that_is_meant(quant: str | None, label: str) -> None:
    assert pick(gguf_sets(FILES), quant, "org/Big", lambda _: "1 GB").label == label


def test_without_the_usual_one_the_first_is_taken() -> None:
    assert pick(gguf_sets(["b.gguf", "a-Q2_K.gguf"]), None, "org/x", lambda _: "").paths == ("a-Q2_K.gguf",)


def test_a_quantization_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no such quantization in org/Big: Q5_K_M\n  BF16  7 GB\n  Q4_K_M") as caught:
        pick(gguf_sets(FILES), "Q5_K_M", "org/Big", lambda _: "7 GB")
    assert caught.value.hint == "perhaps you meant org/Big:Q4_K_M"


def test_one_that_means_several_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization Q4_K matches 2 models in org/Big") as caught:
        pick(gguf_sets(FILES), "Q4_K", "org/Big", lambda _: "")
    assert caught.value.hint == "name the file itself, as in org/Big/Big-Q4_K_M.gguf"


def test_two_of_one_label_are_listed_by_file() -> None:
    sets = gguf_sets(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf"])
    with pytest.raises(ConfigError) as caught:
        pick(sets, "Q4_K_M", "org/Two", lambda each: "1 GB")
    assert caught.value.message.splitlines()[1:] == ["  a-Q4_K_M.gguf  1 GB", "  b-Q4_K_M.gguf  1 GB", "  Q8_0  1 GB"]


def test_a_repository_without_any() -> None:
    sets: tuple[GgufSet, ...] = gguf_sets(["model.safetensors"])
    with pytest.raises(ConfigError, match="repository has no GGUF file: org/x"):
        pick(sets, None, "org/x", lambda _: "")


def test_the_projector_that_every_build_reads() -> None:
    assert projector_of(FILES) == "mmproj-F16.gguf"
    assert projector_of(["a.gguf"]) is None


@pytest.mark.parametrize("name", ["gemma-4-E4B-it-mmproj.gguf", "it/Gemma.MMPROJ-f16.gguf", "mmproj-model-f16.gguf"])
def test_a_projector_is_none_of_the_models_wherever_its_name_says_so(name: str) -> None:
    files = ["gemma-4-E4B-it-Q4_K_M.gguf", name]
    assert [each.paths for each in gguf_sets(files)] == [("gemma-4-E4B-it-Q4_K_M.gguf",)]
    assert projector_of(files) == name
    assert gguf_sets(["mmproj-folder/model.gguf"])  # the file's own name counts


def test_a_folder_of_safetensors() -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    more = ["tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    others = ["README.md", "modeling.py", "onnx/model.onnx", "original/consolidated.safetensors", "pytorch_model.bin"]
    assert folder_files(["config.json", *names, *more, *others]) == ("config.json", *sorted([*names, *more]))
    assert folder_files(["config.json", *more]) == ()
    assert folder_files(names) == ()
