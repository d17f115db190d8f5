"""Files that settings name beside the model: found, matched, or refused with the code of what is wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import FatalError
from appliance.model import Model, read_model, read_projector
from appliance.model.attachments import projector
from appliance.settings import resolve_settings
from appliance.start.attachments import TEMPLATE_LIMIT_BYTES, attachment_sizes, with_attachments
from tests.shapes import SMALL, write_gguf
from tests.shapes.beside import MEAN, RANK, write_adapter, write_bert, write_projector

WIDTH = 256
QUERY = {"blk.0.attn_q.weight": (512, WIDTH)}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "models").mkdir()
    return read_model(write_gguf(tmp_path / "models/model.gguf", SMALL["gqa"], quantization="Q8_0"))


def beside(model: Model, **flags: str | list[str]) -> Model:
    data_dir = next(folder.parent for folder in model.path.parents if folder.name == "models")
    return with_attachments(model, resolve_settings({"data_dir": str(data_dir), **flags}, {}))


def refusal(model: Model, **flags: str | list[str]) -> tuple[int, str, str]:
    with pytest.raises(FatalError) as caught:
        beside(model, **flags)
    return caught.value.exit_code, caught.value.message, caught.value.hint or ""


@pytest.mark.parametrize("where", ["volume", "beside", "path"])
def test_a_projector_is_found_by_name_or_path(model: Model, tmp_path: Path, where: str) -> None:
    deep = replace(model, path=tmp_path / "models/org/repo/model.gguf")
    places = {"volume": tmp_path / "models", "beside": deep.path.parent, "path": tmp_path}
    places[where].mkdir(parents=True, exist_ok=True)
    path = write_projector(places[where] / "eyes.gguf", WIDTH)
    found = beside(deep, mmproj=str(path) if where == "path" else "eyes.gguf")
    assert found.projector
    assert found.projector.path == path
    assert beside(found, mmproj="off").projector is None


def test_a_projector_that_is_missing_or_wrong_is_refused(model: Model, tmp_path: Path) -> None:
    code, message, hint = refusal(model, mmproj="eyes.gguf")
    assert (code, message) == (10, "setting mmproj names no file: 'eyes.gguf' (flag --mmproj)")
    assert f"into {tmp_path}/models" in hint
    wrong = write_projector(tmp_path / "wrong.gguf", 512)
    assert refusal(model, mmproj=str(wrong))[:2] == (
        30,
        "projector is for another model: wrong.gguf (flag --mmproj) gives vectors of 512 values, "
        "but model.gguf takes 256",
    )
    code, message, _ = refusal(model, mmproj=str(model.path))
    assert (code, message.endswith("it is not a multimodal projector but a model of llama")) == (30, True)


@pytest.mark.parametrize("request_", ["\0", "a" * 300, "x\x1b[31m"])
def test_what_no_file_is_called_is_refused_without_control_sequences(model: Model, request_: str) -> None:
    code, message, _ = refusal(model, mmproj=request_)
    assert code == 10
    assert message.isprintable()


def test_adapters_are_found_with_their_scales(model: Model, tmp_path: Path) -> None:
    write_adapter(tmp_path / "models/Style.gguf", QUERY)
    elsewhere = write_adapter(tmp_path / "b.gguf", QUERY)
    found = beside(model, lora=["style", f"{elsewhere}:-0.5"])
    assert [(adapter.path.name, adapter.scale) for adapter in found.adapters] == [("Style.gguf", 1.0), ("b.gguf", -0.5)]
    assert attachment_sizes(found) == {"adapters": [2 * 4 * (512 + WIDTH)] * 2}
    assert attachment_sizes(model) == {}


def test_adapters_that_cannot_be_loaded_are_refused(model: Model, tmp_path: Path) -> None:
    write_adapter(tmp_path / "models/style.gguf", QUERY)
    assert refusal(model, lora="stile") == (
        10,
        "setting lora names no file: 'stile' (flag --lora)",
        "perhaps you meant style",
    )
    assert refusal(model, lora=["style", "style:2"])[:2] == (
        10,
        f"setting lora names one adapter twice: {tmp_path}/models/style.gguf (flag --lora)",
    )
    (tmp_path / "a'b\"c").mkdir()
    odd = write_adapter(tmp_path / "a'b\"c/x.gguf", QUERY)
    assert refusal(model, lora=str(odd))[0] == 10
    other = write_adapter(tmp_path / "other.gguf", {"blk.9.attn_q.weight": (512, WIDTH)})
    assert refusal(model, lora=str(other))[0] == 30
    assert refusal(model, lora="model")[0] == 30


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("", "holds an empty name"),
        ("a,,b", "holds an empty name"),
        (":2", "holds an empty name"),
        ("a:x", "has a scale that is not a number: 'x'"),
        ("a:inf", "has a scale that is not a number: 'inf'"),
        ("a:101", "has a scale outside -100 to 100"),
        ("a\nb", "holds a character that no file's name should have"),
    ],
)
def test_what_is_no_name_and_scale_is_refused(model: Model, word: str, said: str) -> None:
    code, message, _ = refusal(model, lora=word)
    assert (code, said in message, message.isprintable()) == (10, True, True)


def test_the_template_that_is_used_tells_what_the_model_can_do(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% if tools %}{{ tools }}{% endif %}<think>")
    found = beside(model, chat_template_file=str(path))
    assert (found.calls_tools, found.reasons) == (True, True)
    path.write_text("plain")
    found = beside(replace(model, calls_tools=True, reasons=True), chat_template_file=str(path))
    assert (found.calls_tools, found.reasons) == (False, False)


def test_a_template_that_cannot_be_read_is_refused(model: Model, tmp_path: Path) -> None:
    long, pipe, bytes_ = tmp_path / "long", tmp_path / "pipe", tmp_path / "bytes"
    with long.open("wb") as file:
        file.truncate(TEMPLATE_LIMIT_BYTES + 1)
    os.mkfifo(pipe)
    bytes_.write_bytes(b"\xff\xfe")
    said = {
        str(tmp_path / "none"): "no such file",
        str(tmp_path): "it is a folder",
        str(pipe): "it is no file",
        str(long): "it is longer than 1,048,576 bytes",
        str(bytes_): "it is no UTF-8",
        "\0": "no such file",
    }
    for path, why in said.items():
        code, message, _ = refusal(model, chat_template_file=path)
        assert (code, message.split(": ")[-1]) == (10, why)


def test_how_vectors_are_made_may_be_set(model: Model) -> None:
    assert beside(model).gives == "text"
    assert beside(model, pooling="mean").gives == "vectors"
    assert beside(replace(model, can_rank=True), pooling="rank").gives == "scores"


@pytest.mark.parametrize(
    ("kind", "architecture", "fits"),
    [
        ("qwen2.5vl_merger", "qwen2vl", True),
        ("qwen2.5vl_merger", "qwen2", False),  # Qwen2.5-VL's beside Qwen2.5, of the same width
        ("qwen3vl_merger", "qwen35moe", True),
        ("gemma4v", "qwen3vl", False),
        ("mlp", "llama", True),  # of many families, and so of none
        ("made-up", "llama", True),
    ],
)
def test_a_projector_of_another_family_is_refused(model: Model, kind: str, architecture: str, *, fits: bool) -> None:
    eyes = read_projector(write_projector(model.path.parent / "eyes.gguf", WIDTH))
    seeing = replace(model, architecture=architecture, projector=replace(eyes, kind=kind))
    assert projector.fits(replace(eyes, kind=kind), seeing) is fits  # of several beside it, one that does is taken
    if fits:
        assert beside(seeing).projector
        return
    code, message, hint = refusal(seeing)
    assert (code, f"but model.gguf is {architecture}" in message) == (30, True)
    assert f"eyes.gguf (beside the model), of kind {kind}, is for " in message
    assert "--mmproj off" in hint


def test_a_reranker_is_no_embedder_and_what_has_no_head_no_reranker(model: Model, tmp_path: Path) -> None:
    ranks = read_model(write_bert(tmp_path / "models/rank.gguf", RANK))
    embeds = read_model(write_bert(tmp_path / "models/embed.gguf", MEAN))
    assert beside(ranks, pooling="rank").gives == "scores"
    assert refusal(ranks, pooling="mean") == (
        10,
        "model is a reranker, whose vectors are one score each: pooling 'mean' (flag --pooling), rank.gguf",
        "take --pooling out, and ask for /v1/rerank; vectors take an embedding model",
    )
    for none in (model, embeds):
        code, message, hint = refusal(none, pooling="rank")
        assert (code, message.partition(":")[0]) == (
            10,
            "model has no head that scores (cls.weight or cls.output.weight)",
        )
        assert f"pooling 'rank' (flag --pooling), {none.path.name}" in message
        assert "give a reranker" in hint
