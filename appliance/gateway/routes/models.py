"""The list of models, in the fields that each client reads: README.md says which client reads which.

The gateway answers it, not the engine, so that it is the same for every engine and is available before the engine is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase
from appliance.engine_route import EngineRoute
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend, ListedModel
from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.forward import ResponseWriter
from appliance.gateway.wire.api_error import ApiError, unknown_model
from appliance.values import dataclass

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

SERVES = frozenset({Phase.READY, Phase.HELD})
_COMES = frozenset({Phase.STARTING, Phase.QUANTIZING, Phase.LOADING, Phase.TUNING, Phase.RESTARTING})
# Request parameters that every engine accepts, in OpenRouter's terms.
_PARAMETERS = (
    "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "presence_penalty", "response_format", "seed", "stop",
    "structured_outputs", "temperature", "top_k", "top_logprobs", "top_p",
)  # fmt: skip


LIST_PATHS = ("/v1/models", "/models", "/api/v0/models")
Endpoint = Callable[["Scope", "Receive", "Send"], Awaitable[None]]
Entry = Callable[[ListedModel], Mapping[str, Any]]


def find(name: str, backends: Sequence[Backend]) -> Backend | None:
    """Return the model that a request means: by its name, by an alias, or by the beginning of a name with a colon
    (`qwen:8b`).

    None if the name is unknown, or if it could mean several.
    """
    for backend in backends:
        if name == backend.name:
            return backend
    wanted = name.casefold()
    found = [each for each in backends if wanted in map(str.casefold, each.listed().names)]
    if not found and ":" in name:
        found = [each for each in backends if any(n.casefold().startswith(wanted) for n in each.listed().names)]
    return found[0] if len(found) == 1 else None


async def found(name: str, roster: Roster) -> Backend | None:
    """Return the model as `find` does, after a look for models that have come if none is known by this name."""
    known = find(name, roster)
    if known is None:
        await roster.look()
        known = find(name, roster)
    return known


def listed_models(backends: Sequence[Backend]) -> list[ListedModel]:
    """Return the entries of all models, each only with the aliases that mean no other model here."""
    listed = [backend.listed() for backend in backends]
    count = Counter(name for model in listed for name in {*map(str.casefold, model.names)})
    return [
        replace(model, aliases=tuple(alias for alias in model.aliases if count[alias.casefold()] == 1))
        for model in listed
    ]


class ForSomeModels:
    """The ASGI application of a route that some models cannot answer. Raises ApiError (400) if the model is one of
    them."""

    def __init__(self, endpoint: Endpoint, route: EngineRoute, listed: Callable[[], ListedModel]) -> None:
        self._endpoint = endpoint
        self._route = route
        self._listed = listed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._listed()
        if model.is_reranker and self._route.not_for_rerankers:
            detail = (
                f"{model.id} is a reranker, which returns scores and cannot answer {self._route.path}: use /v1/rerank"
            )
            raise ApiError(400, "model_is_reranker", detail)
        if self._route.only_for_embedders and not model.is_embedding and model.phase in SERVES:
            detail = f"{model.id} is a text model, which cannot answer {self._route.path}: serve an embedding model"
            raise ApiError(400, "model_gives_text", detail)
        await self._endpoint(scope, receive, send)


class ModelList:
    """The ASGI application of the list, with the entries of one dialect."""

    def __init__(self, backends: Roster, reading: Traffic, entry: Entry) -> None:
        self._backends = backends
        self._reading = reading
        self._entry = entry

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        with self._reading.admitted(is_work=False):
            await self._backends.look()
            listed = listed_models(self._backends)
            document: dict[str, Any] = {"object": "list", "data": [self._entry(model) for model in listed]}
            if self._entry is entry:
                document["models"] = [detailed(model) for model in listed]
            await ResponseWriter(send, "openai").document(document)


class OneModel:
    """The ASGI application of one model's entry: `prefix` followed by its name. Raises ApiError (404) for an unknown
    model."""

    def __init__(self, backends: Roster, reading: Traffic, entry: Entry, prefix: str) -> None:
        self._backends = backends
        self._reading = reading
        self._entry = entry
        self._prefix = prefix

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(self._prefix)
        with self._reading.admitted(is_work=False):
            backend = find(name, self._backends)
            if backend is None:
                raise unknown_model(name, (each.name for each in self._backends))
            listed = listed_models(self._backends)[list(self._backends).index(backend)]
            await ResponseWriter(send, "openai").document(dict(self._entry(listed)))


def entry(model: ListedModel) -> dict[str, Any]:
    """Return a model's entry in /v1/models: the fields of OpenAI, OpenRouter, LM Studio and the engines' own servers
    together.

    `max_context_length` is the native one, as in LM Studio; every other context field is the length that one request
    may use now.
    """
    context = model.context
    return _known({
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": "appliance",
        "name": model.id,
        "aliases": list(model.aliases),
        "state": str(model.phase),
        "status": {"value": _router_state(model)},
        "context_length": context,
        "context_window": context,
        "max_model_len": context,
        "loaded_context_length": context if model.phase in SERVES else None,
        "max_context_length": model.native_context,
        "meta": _known({
            "n_ctx": context,
            "n_ctx_train": model.native_context,
            "n_embd": model.embedding_length,
            "n_params": model.parameters,
            "n_vocab": model.vocabulary,
            "size": model.size_bytes,
        }),
        "architecture": _architecture(model),
        "top_provider": _known({"context_length": context}),
        "supported_parameters": _supported_parameters(model),
        "capabilities": _capabilities(model),
        "arch": model.architecture,
        "quantization": model.quantization,
        "format": model.format,
        "adapters": [{"name": name, "scale": scale} for name, scale in model.adapters] or None,
        "abilities": dict(model.abilities),
    })  # fmt: skip


_ROUTER_STATES = {Phase.FETCHING: "downloading", Phase.READY: "loaded", Phase.HELD: "loaded", Phase.FAILED: "failed"}


def _router_state(model: ListedModel) -> str:
    """Return the state in the words of the router dialect."""
    return _ROUTER_STATES.get(model.phase, "loading" if model.phase in _COMES else "unloaded")


def lm_studio_entry(model: ListedModel) -> dict[str, Any]:
    """Return a model's entry in /api/v0/models. Clients of LM Studio parse it strictly: exactly these fields, and these
    words for the state."""
    state = "loaded" if model.phase in SERVES else "loading" if model.phase in _COMES else "not-loaded"
    # LM Studio has no word for a reranker, and its clients refuse a list with an unknown word.
    kind = "embeddings" if model.is_embedding else "vlm" if "image" in model.input_modalities else "llm"
    return _known({
        "id": model.id,
        "object": "model",
        "type": kind,
        "publisher": "appliance",
        "arch": model.architecture,
        "compatibility_type": "gguf",  # one of LM Studio's two values; `format` in /v1/models has the real one
        "quantization": model.quantization,
        "state": state,
        "max_context_length": model.native_context,
        "loaded_context_length": model.context if state == "loaded" else None,
        "capabilities": _capabilities(model),
    })  # fmt: skip


def detailed(model: ListedModel) -> dict[str, Any]:
    """Return a model's entry in `models`, next to `data`, which clients of Ollama read."""
    billions = f"{model.parameters / 1e9:.1f}B" if model.parameters else ""
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": "",
        "size": model.size_bytes or "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": _ollama_capabilities(model),
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": model.format,
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": billions,
            "quantization_level": model.quantization,
        },
    }


def _architecture(model: ListedModel) -> dict[str, Any]:
    made = "rerank" if model.is_reranker else "embedding" if model.is_embedding else "text"
    read = "+".join(model.input_modalities)
    modalities = {"input_modalities": list(model.input_modalities), "output_modalities": [made]}
    return {"modality": f"{read}->{made}", **modalities}


def _supported_parameters(model: ListedModel) -> list[str]:
    if model.is_embedding:
        return []
    tools = ("tools", "tool_choice") if model.calls_tools else ()
    reasoning = ("reasoning", "include_reasoning") if model.reasons else ()
    return sorted((*_PARAMETERS, *tools, *reasoning))


def _capabilities(model: ListedModel) -> list[str]:
    vision = ["vision"] if "image" in model.input_modalities else []
    return [*(["tool_use"] if model.calls_tools else []), *vision, *(["reasoning"] if model.reasons else [])]


def _ollama_capabilities(model: ListedModel) -> list[str]:
    if model.is_embedding:
        return ["rerank" if model.is_reranker else "embedding"]
    others = (
        ("tools", model.calls_tools),
        ("thinking", model.reasons),
        ("multimodal", len(model.input_modalities) > 1),
    )
    return ["completion", *(name for name, is_there in others if is_there)]


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields whose value is not known: a client whose schema has a number refuses the whole list for a null."""
    return {name: value for name, value in fields.items() if value is not None and value not in ("", {})}


@dataclass(frozen=True, kw_only=True)
class ListRoute:
    path: str
    all: Endpoint
    one: Endpoint  # answers `path`, a slash and a name


def list_routes(backends: Roster, reading: Traffic) -> tuple[ListRoute, ...]:
    """Return the routes of the list. `reading` counts these requests, which are no inference."""
    return tuple(
        ListRoute(
            path=path,
            all=ModelList(backends, reading, dialect),
            one=OneModel(backends, reading, dialect, f"{path}/"),
        )
        for path, dialect in zip(LIST_PATHS, (entry, entry, lm_studio_entry), strict=True)
    )
