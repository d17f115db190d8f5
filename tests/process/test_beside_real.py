"""Projectors, LoRA adapters, rerankers and own arguments on the real engine, through the gateway. Weights are random: a
file that the engine loads and answers from is what is shown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving
from tests.process.stages.real import listed, picture, post, real_home, sound
from tests.shapes import SMALL, write_gguf
from tests.shapes.beside import MEAN, RANK, write_adapter, write_bert, write_ears, write_projector

WIDTH = 256  # of SMALL["gqa"]
PATCHES = (64 // 8 // 4) ** 2  # tokens of an image
QUERY = {f"blk.{layer}.attn_q.weight": (512, WIDTH) for layer in range(4)}
ONE = {"parallel": "1", "ctx_size": "2048"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = real_home(tmp_path / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    return home


def ask(serving: Serving, *images: str) -> tuple[int, Any]:
    parts = [{"type": "text", "text": "What is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": image}} for image in images]  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return post(serving, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 5})


def logprobs(answer: Any) -> list[float]:
    return [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


def test_an_image_is_read_by_the_projector_beside_the_model(home: Home) -> None:
    write_projector(home.data / "models/mmproj-model.gguf", WIDTH)
    with home.serving(**ONE) as serving:
        serving.wait_ready()
        assert listed(serving)["architecture"]["input_modalities"] == ["text", "image"]
        assert serving.document("status")["projector"] == "mmproj-model.gguf"
        status, without = ask(serving)
        assert status == 200
        answers = [ask(serving, picture(*color)) for color in ((255, 0, 0), (0, 0, 255))]
        assert [status for status, _ in answers] == [200, 200], answers
        first, second = (answer for _, answer in answers)
        assert first["usage"]["prompt_tokens"] >= without["usage"]["prompt_tokens"] + PATCHES
        assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
        assert logprobs(first) != logprobs(second)  # it was looked at
        assert serving.terminate() < 10


def test_sound_is_heard_by_a_projector_that_is_named(home: Home) -> None:
    ears = write_ears(home.data / "models/ears.gguf", WIDTH)

    def hear(serving: Serving, hertz: float) -> tuple[int, Any]:
        part = {"type": "input_audio", "input_audio": {"data": sound(hertz), "format": "wav"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}
        asked = {**body, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
        return post(serving, "/v1/chat/completions", asked)

    with home.serving(mmproj=str(ears), **ONE) as serving:
        serving.wait_ready()
        assert listed(serving)["architecture"]["input_modalities"] == ["text", "audio"]
        answers = [hear(serving, hertz) for hertz in (220.0, 3000.0)]
        assert [status for status, _ in answers] == [200, 200], answers
        assert logprobs(answers[0][1]) != logprobs(answers[1][1])


def test_a_projector_that_is_off_leaves_a_model_of_text(home: Home) -> None:
    write_projector(home.data / "models/mmproj-model.gguf", WIDTH)
    with home.serving(mmproj="off", **ONE) as serving:
        serving.wait_ready()
        assert listed(serving)["architecture"]["input_modalities"] == ["text"]
        assert ask(serving)[0] == 200
        status, answer = ask(serving, picture(1, 2, 3))
        assert status == 400
        assert "image" in answer["error"]["message"]


def test_a_projector_of_another_model_ends_the_start(home: Home) -> None:
    write_projector(home.data / "models/mmproj-model.gguf", 128)
    for verb in ("plan", "serve"):
        done = home.command(verb)
        assert done.returncode == 30
        assert (
            "mmproj-model.gguf (beside the model) gives vectors of 128 values, but model.gguf takes 256" in done.stderr
        )
    assert home.command("doctor").returncode == 30
    assert home.command("plan", mmproj="off").returncode == 0
    other = write_projector(home.folder / "elsewhere.gguf", WIDTH)
    assert f"--mmproj {other}" in home.command("plan", "--dry-run", mmproj=str(other)).stdout


def test_an_adapter_changes_what_the_model_says(home: Home) -> None:
    write_adapter(home.data / "models/style.gguf", QUERY, rank=8)
    with home.serving(**ONE) as serving:
        serving.wait_ready()
        assert "adapters" not in listed(serving)
        plain = logprobs(ask(serving)[1])
    with home.serving(lora="style:50", **ONE) as serving:
        serving.wait_ready()
        assert listed(serving)["adapters"] == [{"name": "style.gguf", "scale": 50.0}]
        assert serving.document("status")["adapters"] == [{"name": "style.gguf", "scale": 50.0}]
        status, answer = ask(serving)
        assert status == 200
        assert logprobs(answer) != plain
    with home.serving(lora="style:0", **ONE) as serving:
        serving.wait_ready()
        assert logprobs(ask(serving)[1]) == pytest.approx(plain, abs=1e-3)


def test_an_adapter_for_another_base_ends_the_start(home: Home) -> None:
    write_adapter(home.data / "models/style.gguf", {"blk.0.attn_q.weight": (512, 128)})
    done = home.command("serve", lora="style")
    assert done.returncode == 30
    assert "adapter has another base than model.gguf: style.gguf: blk.0.attn_q.weight is 256 x 512" in done.stderr


def test_a_draft_model_of_another_model_ends_the_start(home: Home) -> None:
    write_gguf(home.data / "models/draft.gguf", replace(SMALL["gqa"], vocabulary=1024), with_data=True)
    done = home.command("serve", model="model", speculation="draft", draft_model="draft")
    assert done.returncode == 30
    assert "draft model has other tokens than model.gguf: draft.gguf" in done.stderr


def test_arguments_template_and_thoughts_reach_the_engine(home: Home, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<think>{{ m.content }}</think>{% endfor %}")
    settings = {"chat_template_file": str(template), "reasoning_format": "none"}
    with home.serving(engine_arg="--temp 0 --seed 7 --no-warmup", **settings, **ONE) as serving:
        serving.wait_ready()
        assert listed(serving)["capabilities"] == ["reasoning"]
        status, answer = post(serving, "/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
        assert (status, answer["prompt"]) == (200, "<think>hi</think>")
        body = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        said = {post(serving, "/v1/completions", body)[1]["choices"][0]["text"] for _ in range(2)}
        assert len(said) == 1  # of a sampler without chance
        assert "--temp 0 --seed 7 --no-warmup" in serving.document("plan")["choices"][-1]["value"]


def rank(serving: Serving, *documents: str) -> tuple[int, Any]:
    return post(serving, "/v1/rerank", {"query": "what is a cat?", "documents": list(documents)})


def test_a_reranker_scores_documents_and_gives_no_vectors(tmp_path: Path) -> None:
    home = real_home(tmp_path / "home")
    write_bert(home.data / "models/rank.gguf", RANK)
    with home.serving() as serving:
        serving.wait_ready()
        model = listed(serving)
        assert model["architecture"]["output_modalities"] == ["rerank"]
        status, answer = rank(serving, "a cat is an animal.", "stocks fell.", "cats")
        assert status == 200, answer
        scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert sorted(scores) == [0, 1, 2]
        assert all(math.isfinite(score) for score in scores.values())
        assert len(set(scores.values())) == 3
        for path in ("/v1/embeddings", "/embeddings", "/api/v0/embeddings"):
            status, refused = post(serving, path, {"input": "a cat"})
            assert (status, refused["error"]["code"]) == (400, "model_is_reranker")
            assert "use /v1/rerank" in refused["error"]["message"]


def test_an_embedder_gives_vectors_and_no_scores(tmp_path: Path) -> None:
    home = real_home(tmp_path / "home")
    write_bert(home.data / "models/embed.gguf", MEAN, context=1024)
    with home.serving() as serving:
        serving.wait_ready()
        assert listed(serving)["architecture"]["output_modalities"] == ["embedding"]
        status, answer = post(serving, "/v1/embeddings", {"input": ["a cat", "a dog"]})
        assert status == 200
        assert [len(each["embedding"]) for each in answer["data"]] == [64, 64]
        assert rank(serving, "x")[0] == 400
        assert post(serving, "/v1/embeddings", {"input": "a " * 1000})[0] == 200  # longer than the usual batch


def test_a_model_of_text_gives_vectors_where_it_is_asked_to(home: Home) -> None:
    with home.serving(pooling="last", **ONE) as serving:
        serving.wait_ready()
        status, answer = post(serving, "/v1/embeddings", {"input": "abc"})
        assert status == 200
        assert len(answer["data"][0]["embedding"]) == WIDTH
        assert listed(serving)["architecture"]["output_modalities"] == ["embedding"]
