"""README's example on the real engine: chat beside embeddings beside a reranker, of one file of settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.process.stages.boot import Serving
from tests.process.stages.real import post, real_home
from tests.shapes.beside import MEAN, RANK, write_bert

ROOT = Path(__file__).parents[2]
CHAT = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = """tune: off
models:
  chat: {model: chat.gguf, ctx_size: 2048}
  embed: {model: embed.gguf, pin: on}
  rerank: {model: rank.gguf, pin: on}
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    if not CHAT.exists():
        pytest.skip("the demo model is not here: make model")
    home = real_home(tmp_path_factory.mktemp("home"))
    shutil.copy(CHAT, home.data / "models/chat.gguf")
    write_bert(home.data / "models/embed.gguf", MEAN, context=1024)
    write_bert(home.data / "models/rank.gguf", RANK)
    (home.data / "appliance.yaml").write_text(FILE)
    with home.serving() as front:
        front.wait_ready()
        yield front


def fleet(serving: Serving) -> dict[str, dict[str, Any]]:
    status, document = serving.ask("GET", "/appliance/v1/fleet", key=serving.home.key)
    assert status == 200
    return {row["name"]: row for row in document["models"]}


def test_all_three_answer_beside_each_other(serving: Serving) -> None:
    status, answer = post(
        serving,
        "/v1/chat/completions",
        {"model": "chat", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]},
    )
    assert (status, answer["model"]) == (200, "chat")
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{serving.port}/v1", api_key=serving.home.key, max_retries=0, timeout=120
    ) as client:
        vectors = client.embeddings.create(model="embed", input=["a lighthouse", "a cat"]).data
        assert len(vectors) == 2
        assert len(vectors[0].embedding) == len(vectors[1].embedding) > 0
    status, scores = post(
        serving, "/v1/rerank", {"model": "rerank", "query": "what is a cat?", "documents": ["a", "b c"]}
    )
    assert status == 200
    assert {row["index"] for row in scores["results"]} == {0, 1}
    rows = fleet(serving)
    assert [row["is_loaded"] for row in rows.values()] == [True] * 3
    assert [row["is_pinned"] for row in rows.values()] == [False, True, True]
    assert sum(row["evictions"] for row in rows.values()) == 0


def test_each_is_asked_only_what_it_can(serving: Serving) -> None:
    status, refused = post(serving, "/v1/embeddings", {"model": "chat", "input": "a"})
    assert (status, refused["error"]["code"]) == (400, "model_gives_text")
    status, refused = post(serving, "/v1/embeddings", {"model": "rerank", "input": "a"})
    assert (status, refused["error"]["code"]) == (400, "model_is_reranker")
    status, refused = post(serving, "/v1/chat/completions", {"model": "poem", "messages": []})
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    assert "`chat`, `embed`, `rerank`" in refused["error"]["message"]


def test_pinned_ones_stay_when_the_chat_model_is_unloaded_and_comes_back(serving: Serving) -> None:
    status, _ = post(serving, "/models/unload", {"model": "chat"})
    assert status == 200
    body = {"model": "chat", "max_tokens": 2, "keep_alive": "10m", "messages": [{"role": "user", "content": "hi"}]}
    assert post(serving, "/v1/chat/completions", body)[0] == 200
    rows = fleet(serving)
    assert rows["chat"]["loads"] == 2
    assert rows["chat"]["keep_alive_s"] == 600
    assert (rows["embed"]["loads"], rows["rerank"]["loads"]) == (1, 1)
