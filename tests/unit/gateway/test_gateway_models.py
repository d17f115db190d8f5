"""The list of models as each client reads it: the readers below do what the client's source does, which README.md of
the gateway names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from appliance.console.progress import Phase
from appliance.engine_route import EngineRoute
from appliance.engines.llama.api.routes import ROUTES
from appliance.gateway.app import create_app
from appliance.gateway.engine.backend import ListedModel
from appliance.gateway.routes.models import find
from tests.unit.gateway.listed import CONTEXT, NATIVE, QWEN, backend

PLAIN = replace(QWEN, id="small", aliases=(), input_modalities=("text",), calls_tools=False, reasons=False)
FETCHED = ListedModel(id="Qwen3-8B-Q4_K_M", phase=Phase.FETCHING, context=CONTEXT)
VECTORS = replace(PLAIN, id="vectors", is_embedding=True)
SCORES = replace(VECTORS, id="scores", is_reranker=True)


def ask(path: str, *listed: ListedModel, method: str = "GET", routes: tuple[EngineRoute, ...] = ()) -> tuple[int, Any]:
    app = create_app([backend(model, routes) for model in listed], keys=None)
    sent: list[Mapping[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    headers = [(b"host", b"a")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def models(*listed: ListedModel, path: str = "/v1/models") -> Any:
    status, document = ask(path, *listed)
    assert status == 200
    return document


def first_number(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


# One reader a client.


def ids(document: Any) -> list[str]:
    """Read the list like cline, codex, continue, open-webui, one-api, new-api and page-assist."""
    return [model["id"] for model in document["data"]]


def opencode(document: Any) -> int | None:
    model = document["data"][0]
    return first_number(model.get("context_length"), model.get("max_context_length"))


def open_claw(document: Any) -> int | None:
    model = document["data"][0]
    return first_number(
        model.get("meta", {}).get("n_ctx_train"), *(model.get(f"context_{end}") for end in ("length", "window", "size"))
    )


HERMES = (
    "context_length", "context_window", "context_size", "max_context_length", "max_position_embeddings",
    "max_model_len", "max_input_tokens", "max_sequence_length", "max_seq_len", "n_ctx_train", "n_ctx", "ctx_size",
)  # fmt: skip


def hermes(document: Any) -> int | None:
    model = document["data"][0]
    return first_number(*(model.get(key) for key in HERMES))


def aider(document: Any) -> int | None:
    model = document["data"][0]
    return model.get("top_provider", {}).get("context_length") or model.get("context_length") or None


def of_vllm(document: Any) -> int | None:
    return first_number(document["data"][0].get("max_model_len"))


def of_llama_server(document: Any) -> int | None:
    meta = document["data"][0].get("meta") or {}
    return first_number(meta.get("n_ctx"), meta.get("n_ctx_train"))


CONTEXTS: Mapping[str, Callable[[Any], int | None]] = {
    "opencode": opencode,
    "hermes": hermes,
    "aider": aider,
    "clients of vLLM": of_vllm,
    "clients of llama-server": of_llama_server,
}


@pytest.mark.parametrize("reader", CONTEXTS.values(), ids=CONTEXTS.keys())
@pytest.mark.parametrize("model", [QWEN, FETCHED, replace(QWEN, phase=Phase.LOADING)], ids=lambda m: str(m.phase))
def test_each_client_finds_the_context_that_a_request_may_use(
    reader: Callable[[Any], int | None], model: ListedModel
) -> None:
    assert reader(models(model)) == CONTEXT


def test_a_client_that_prefers_the_native_context_finds_that() -> None:
    assert open_claw(models(QWEN)) == NATIVE


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/api/v0/models"])
def test_clients_that_list_names(path: str) -> None:
    assert ids(models(QWEN, PLAIN, path=path)) == ["Qwen3-8B-Q4_K_M", "small"]


def roo(document: Any) -> dict[str, Any]:
    """Read the list like Roo: its zod schema of an OpenRouter model wants name as a string and context_length as a
    number."""
    model = document["data"][0]
    assert isinstance(model["id"], str)
    assert isinstance(model["name"], str)
    assert isinstance(model["context_length"], int)
    architecture, parameters = model["architecture"], model["supported_parameters"]
    assert all(isinstance(word, str) for word in (*parameters, *architecture["input_modalities"]))
    return {
        "skipped": "image" in architecture["output_modalities"],
        "images": "image" in architecture["input_modalities"],
        "reasoning": "reasoning" in parameters,
        "tools": "tools" in parameters,
    }


def test_roo_finds_images_tools_and_reasoning() -> None:
    assert roo(models(QWEN)) == {"skipped": False, "images": True, "reasoning": True, "tools": True}
    assert roo(models(PLAIN)) == {"skipped": False, "images": False, "reasoning": False, "tools": False}


def zed(document: Any) -> dict[str, Any]:
    """Read the list like Zed: an unknown word in an enum of its serde types refuses the whole list."""
    model = document["data"][0]
    assert all(isinstance(model[name], str) for name in ("id", "object", "publisher"))
    assert model["type"] in ("llm", "embeddings", "vlm")
    assert model["compatibility_type"] in ("gguf", "mlx")
    assert model["state"] in ("loaded", "loading", "not-loaded")
    assert all(isinstance(model.get(name), str | None) for name in ("arch", "quantization"))
    capabilities = model.get("capabilities", [])
    return {
        "max_tokens": first_number(model.get("loaded_context_length"), model.get("max_context_length")),
        "tools": "tool_use" in capabilities,
        "images": "vision" in capabilities,
    }


@pytest.mark.parametrize("phase", list(Phase))
def test_zed_reads_the_list_of_lm_studio_in_every_phase(phase: Phase) -> None:
    assert zed(models(replace(FETCHED, phase=phase), path="/api/v0/models"))["tools"] is False


def test_zed_finds_context_tools_and_images() -> None:
    document = models(QWEN, path="/api/v0/models")
    assert zed(document) == {"max_tokens": CONTEXT, "tools": True, "images": True}
    assert (document["data"][0]["type"], document["data"][0]["state"]) == ("vlm", "loaded")
    (loading,) = models(replace(QWEN, phase=Phase.LOADING), path="/api/v0/models")["data"]
    assert (loading["state"], "loaded_context_length" in loading) == ("loading", False)
    (fetched,) = models(FETCHED, path="/api/v0/models")["data"]
    assert fetched["state"] == "not-loaded"
    assert models(VECTORS, path="/api/v0/models")["data"][0]["type"] == "embeddings"


def test_the_page_of_llama_server_finds_its_meta_and_capabilities() -> None:
    document = models(QWEN)
    assert document["data"][0]["aliases"] == ["qwen", "qwen:8b-q4_k_m"]
    assert document["data"][0]["meta"] == {
        "n_ctx": CONTEXT, "n_ctx_train": NATIVE, "n_embd": 4096, "n_params": 8_190_735_360, "n_vocab": 151936,
        "size": 5_027_783_488,
    }  # fmt: skip
    (shown,) = document["models"]
    assert (shown["name"], shown["model"], shown["type"]) == ("Qwen3-8B-Q4_K_M", "Qwen3-8B-Q4_K_M", "model")
    assert "multimodal" in shown["capabilities"]
    assert shown["details"]["parameter_size"] == "8.2B"
    assert models(VECTORS)["models"][0]["capabilities"] == ["embedding"]


def test_the_state_is_the_phase() -> None:
    for phase in Phase:
        (model,) = models(replace(QWEN, phase=phase))["data"]
        assert model["state"] == phase
        assert ("loaded_context_length" in model) == (phase in (Phase.READY, Phase.HELD))


def test_what_is_not_known_is_left_out_and_never_null() -> None:
    for path in ("/v1/models", "/api/v0/models"):
        (model,) = models(ListedModel(id="soon", phase=Phase.FETCHING), path=path)["data"]
        assert None not in model.values()
        assert "max_model_len" not in model


@pytest.mark.parametrize("name", ["Qwen3-8B-Q4_K_M", "qwen3-8b-q4_k_m", "qwen", "QWEN", "qwen:8b-q4", "qwen:8b"])
@pytest.mark.parametrize("path", ["/v1/models/", "/models/", "/api/v0/models/"])
def test_one_model_by_each_of_its_names(path: str, name: str) -> None:
    status, model = ask(path + name, PLAIN, QWEN)
    assert (status, model["id"]) == (200, "Qwen3-8B-Q4_K_M")
    assert model == models(PLAIN, QWEN, path=path.rstrip("/"))["data"][1]


@pytest.mark.parametrize("name", ["other", "qwe", "", "qwen:4b", "../../slots", "qwen/"])
def test_a_name_that_is_none_is_refused_in_openais_form(name: str) -> None:
    status, document = ask(f"/v1/models/{name}", PLAIN, QWEN)
    assert (status, document["error"]["code"]) == (404, "model_not_found")
    assert "`small`" in document["error"]["message"]


def test_a_name_that_could_mean_two_models_means_none() -> None:
    large = replace(QWEN, id="Qwen3-30B", aliases=("qwen", "qwen:30b-q4_k_m"))
    backends = [backend(QWEN), backend(large)]
    assert find("qwen", backends) is None
    assert find("qwen:", backends) is None
    assert find("qwen:30b", backends) is backends[1]
    assert find("Qwen3-30B", backends) is backends[1]


def test_a_name_goes_before_another_models_alias() -> None:
    named = replace(PLAIN, id="qwen")
    backends = [backend(QWEN), backend(named)]
    assert find("qwen", backends) is backends[1]


def test_a_reranker_is_listed_as_one_and_asked_for_no_vectors() -> None:
    document = models(SCORES)
    assert document["data"][0]["architecture"] == {
        "modality": "text->rerank", "input_modalities": ["text"], "output_modalities": ["rerank"],
    }  # fmt: skip
    assert document["models"][0]["capabilities"] == ["rerank"]
    paths = [route.path for route in ROUTES if route.not_for_rerankers]
    assert paths == ["/v1/embeddings", "/embeddings", "/api/v0/embeddings"]
    for path in paths:
        status, refused = ask(path, SCORES, method="POST", routes=ROUTES)
        assert (status, refused["error"]["code"]) == (400, "model_is_reranker")


def test_adapters_are_listed_with_their_scales() -> None:
    (found,) = models(replace(PLAIN, adapters=(("style.gguf", 0.5),)))["data"]
    assert found["adapters"] == [{"name": "style.gguf", "scale": 0.5}]
    assert "adapters" not in models(PLAIN)["data"][0]


def test_sound_and_images_are_told_apart() -> None:
    (found,) = models(replace(PLAIN, input_modalities=("text", "image", "audio")))["data"]
    assert found["architecture"]["modality"] == "text+image+audio->text"
    assert models(replace(PLAIN, input_modalities=("text", "audio")))["data"][0]["capabilities"] == []
