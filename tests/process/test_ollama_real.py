"""Ollama's API and its Python client on the real engine: the demo model, and random weights beside it."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import ollama
import pytest

from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.engine import find_model
from tests.process.stages.real import picture, real_home
from tests.shapes import SMALL, write_gguf
from tests.shapes.beside import MEAN, write_bert, write_projector

MESSAGES: Any = [{"role": "user", "content": "Say hello."}]
BRIEF: Any = {"num_predict": 12, "temperature": 0, "seed": 1, "num_ctx": 999_999}
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["city", "age"],
}


def client_of(serving: Serving) -> ollama.Client:
    headers = {"Authorization": f"Bearer {serving.home.key}"}
    return ollama.Client(host=f"http://127.0.0.1:{serving.port}", headers=headers, timeout=300)


@contextmanager
def ready(home: Home, **settings: str) -> Iterator[Serving]:
    with home.serving(**settings) as serving:
        serving.wait_ready()
        yield serving
        assert serving.terminate() < 10


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home = real_home(tmp_path_factory.mktemp("ollama") / "home")
    model = find_model()
    (home.data / "models" / model.name).symlink_to(model)
    home.calm()
    with ready(home, ctx_size="2048", parallel="1") as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[ollama.Client]:
    with client_of(serving) as client:
        yield client


@pytest.fixture
def name(client: ollama.Client) -> str:
    (model,) = client.list().models
    return str(model.model)


def test_it_is_listed_shown_and_running(client: ollama.Client, name: str) -> None:
    shown = client.show(name)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.details is not None
    assert (shown.details.format, shown.details.family) == ("gguf", "llama")
    assert "completion" in (shown.capabilities or ())
    assert [model.name for model in client.ps().models] == [name]


def test_a_stream_says_what_the_whole_answer_says(client: ollama.Client, name: str) -> None:
    whole = client.chat(name, MESSAGES, options=BRIEF)
    *parts, last = client.chat(name, MESSAGES, options=BRIEF, stream=True)
    assert whole.message.content
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    for end in (whole, last):
        assert end.done
        assert end.done_reason in ("stop", "length")
        assert end.eval_count is not None
        assert 0 < end.eval_count <= 12
        assert end.prompt_eval_count is not None
        assert end.prompt_eval_count > 5
        assert end.eval_duration is not None
        assert end.total_duration is not None
        assert 0 < end.eval_duration <= end.total_duration
    assert whole.eval_count == last.eval_count
    assert len(parts) > 3  # a line for about each token


def test_a_limit_and_a_stop_word_end_an_answer(client: ollama.Client, name: str) -> None:
    cut = client.chat(name, MESSAGES, options={**BRIEF, "num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    text = client.generate(name, "One, two, three, four,", raw=True, options={**BRIEF, "stop": [","]})
    assert (text.done_reason, "," in (text.response or "")) == ("stop", False)


def test_a_schema_and_json_are_enforced(client: ollama.Client, name: str) -> None:
    options = {**BRIEF, "num_predict": 200}
    ada = "Ada is 36 and lives in London."
    whole = [client.generate(name, ada, format=SCHEMA, options=options)]
    for parts in (whole, client.generate(name, ada, format=SCHEMA, options=options, stream=True)):
        found = json.loads("".join(part.response or "" for part in parts))
        assert set(found) == {"city", "age"}
        assert isinstance(found["age"], int)
    reply = client.chat(name, [{"role": "user", "content": "Answer in JSON: a person"}], format="json", options=options)
    assert reply.message.content is not None
    assert reply.message.content.lstrip().startswith("{")


def test_raw_prompts_skip_the_template(client: ollama.Client, name: str) -> None:
    raw = client.generate(name, "Say hello.", raw=True, options=BRIEF)
    made = client.generate(name, "Say hello.", options=BRIEF)
    assert raw.prompt_eval_count is not None
    assert made.prompt_eval_count is not None
    assert raw.prompt_eval_count < made.prompt_eval_count
    *parts, last = client.generate(name, "Say hello.", raw=True, options=BRIEF, stream=True)
    assert "".join(part.response or "" for part in parts) == raw.response
    assert last.eval_count == raw.eval_count


def test_log_probabilities(client: ollama.Client, name: str) -> None:
    options = {**BRIEF, "num_predict": 2}
    whole = client.chat(name, MESSAGES, options=options, logprobs=True, top_logprobs=3)
    first, *_ = client.chat(name, MESSAGES, options=options, logprobs=True, top_logprobs=3, stream=True)
    for reply in (whole, first):
        assert reply.logprobs
        assert reply.logprobs[0].logprob <= 0
        assert len(reply.logprobs[0].top_logprobs or ()) == 3


def test_a_conversation_with_calls_is_understood(client: ollama.Client, name: str) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_name": "add"},
    ]
    reply = client.chat(name, messages, options=BRIEF, think=False)
    assert reply.done


def test_what_the_engine_refuses_is_told_in_its_words(client: ollama.Client, name: str) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(name, [{"role": "user", "content": "a " * 5000}])
    assert caught.value.status_code == 400
    assert "context" in caught.value.error
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(name, [{"role": "user", "content": "?", "images": [base64.b64decode(picture(1, 2, 3)[22:])]}])
    assert caught.value.status_code in (400, 500)
    with pytest.raises(ollama.ResponseError) as caught:
        client.embed(name, "a")
    assert 400 <= caught.value.status_code < 600


def test_when_the_client_leaves_the_slot_is_free(serving: Serving, client: ollama.Client, name: str) -> None:
    """The appliance has one slot: a second request is answered only once the first has left it."""
    asked = client.generate(name, "Count to a million.", stream=True, options={"num_predict": 100_000})
    with closing(cast("Generator[Any, None, None]", asked)) as parts:
        next(parts)
    assert client.chat(name, MESSAGES, options=BRIEF).done
    eventually(lambda: 'ending="client_left"' in serving.ask("GET", "/metrics", key=serving.home.key)[1])


def test_vectors_of_a_real_embedding_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = real_home(tmp_path_factory.mktemp("vectors") / "home")
    write_bert(home.data / "models/model.gguf", MEAN)
    with ready(home, parallel="1") as serving, client_of(serving) as client:
        (model,) = client.list().models
        assert model.model is not None
        assert client.show(model.model).capabilities == ["embedding"]
        both = client.embed(model.model, ["a cat", "a dog"])
        assert len(both.embeddings) == 2
        assert both.embeddings[0] != both.embeddings[1]
        assert both.prompt_eval_count
        one = client.embed(model.model, "a cat")
        assert one.embeddings[0] == pytest.approx(both.embeddings[0], abs=1e-3)
        assert client.embeddings(model.model, "a cat").embedding == pytest.approx(one.embeddings[0], abs=1e-3)


def test_an_image_is_looked_at(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = real_home(tmp_path_factory.mktemp("images") / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    write_projector(home.data / "models/mmproj-model.gguf", 256)
    with ready(home, parallel="1", ctx_size="2048") as serving, client_of(serving) as client:
        (model,) = client.list().models
        assert model.model is not None
        assert "vision" in (client.show(model.model).capabilities or ())
        image = base64.b64decode(picture(255, 0, 0).partition(",")[2])
        options = {"num_predict": 2}
        seen = client.generate(model.model, "What is this?", images=[image], options=options)
        blind = client.generate(model.model, "What is this?", options=options)
        assert seen.prompt_eval_count is not None
        assert blind.prompt_eval_count is not None
        assert seen.prompt_eval_count > blind.prompt_eval_count


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_thinking_and_tools_reach_the_chat_template(tmp_path: Path) -> None:
    """Qwen3's template writes an empty thought for an answer without one, and the tools before everything else."""
    home = real_home(tmp_path / "home")
    write_gguf(home.data / "models/model.gguf", SMALL["gqa"], quantization="Q8_0", with_data=True)
    template = Path(__file__).parents[1] / "data/templates/qwen3.jinja"
    with (
        ready(home, parallel="1", ctx_size="2048", chat_template_file=str(template)) as serving,
        client_of(serving) as client,
    ):
        options = {"num_predict": 1}
        asked: tuple[dict[str, Any], ...] = ({}, {"think": True}, {"think": False}, {"tools": [add]})
        counts = [client.chat("any", MESSAGES, options=options, **more).prompt_eval_count or 0 for more in asked]
        assert counts[0] == counts[1]  # thinking is this template's default
        assert counts[0] < counts[2] < counts[3]
