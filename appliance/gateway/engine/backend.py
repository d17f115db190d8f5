"""One model that is served, as the gateway sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute, ErrorRule, LoadGauges
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.engine_errors import EngineErrors
from appliance.gateway.engine.load import KvUse, Load, ParseKvUse
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.values import dataclass

Document = Callable[[], dict[str, Any]]
Action = Callable[[bytes], tuple[int, dict[str, Any]]]
"""Does at once what was asked for with a request's body; status and document of the answer. Raises ApiError."""


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """One model as clients are told of it. None and empty where it is not known yet: such a field is left out."""

    id: str
    phase: Phase
    aliases: tuple[str, ...] = ()  # other names that mean it
    created_s: int = 0
    context: int | None = None  # tokens that one request may use, of the plan that serves or is being loaded
    native_context: int | None = None
    input_modalities: tuple[str, ...] = ("text",)
    calls_tools: bool = False
    reasons: bool = False
    is_embedding: bool = False  # it gives no text: vectors, or scores if it is a reranker
    is_reranker: bool = False
    adapters: tuple[tuple[str, float], ...] = ()  # LoRA, with their scales
    format: str = ""
    architecture: str = ""
    quantization: str = ""
    size_bytes: int | None = None
    parameters: int | None = None
    vocabulary: int | None = None
    embedding_length: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)


class Backend:
    """Its engine's routes and socket, the requests for it, and what is shown of it.

    `documents` are served as /appliance/v1/<name>, `actions` answer a POST there. `listed` is what the list of models
    tells of it; without it no more than its name and phase. `dropped_headers` of a request, lower case, are kept from
    the engine. `slots` are how many requests the engine works on at once, 0 while none serves; `kv_use` is the engine's
    own path that tells of its KV cache, with the reader of the answer. `errors` say which errors of the engine are told
    in our words; an engine that `checks_model_name` is sent the one that it knows. `elsewhere` says, in words for
    clients, who answers in place of this host, which answers none of them.

    Every callable is called on the event loop for every request that needs it: it answers from memory, at once.
    """

    def __init__(
        self,
        *,
        name: str,
        socket_path: Path,
        routes: Iterable[EngineRoute],
        errors: Iterable[ErrorRule] = (),
        checks_model_name: bool = False,
        progress: Callable[[], Progress],
        documents: Mapping[str, Document],
        actions: Mapping[str, Action] | None = None,
        listed: Callable[[], ListedModel] | None = None,
        engine_restarts: Callable[[], int] | None = None,
        dropped_headers: frozenset[bytes] = frozenset(),
        slots: Callable[[], int] | None = None,
        kv_use: tuple[str, ParseKvUse] | None = None,
        gauges: LoadGauges = LoadGauges(),  # noqa: B008 - frozen
        elsewhere: str | None = None,
    ) -> None:
        self.name = name  # as requests name it, where there are several
        self.routes = tuple(routes)
        self.errors = EngineErrors(errors)
        self._checks_model_name = checks_model_name
        self.progress = progress
        self.documents = documents
        self.actions = actions or {}
        self.listed = listed or (lambda: ListedModel(id=name, phase=progress().phase))
        self.engine_restarts = engine_restarts
        self.traffic = Traffic()
        self.upstream = UpstreamPool(socket_path, dropped_headers)
        self.elsewhere = elsewhere
        self._slots = slots
        self._gauges = gauges
        self.kv_use = KvUse(self.upstream, *kv_use) if kv_use else None

    def engines_name(self) -> str | None:
        """What the engine calls the model, if it refuses every other name."""
        return self.listed().id if self._checks_model_name else None

    def load(self) -> Load | None:
        """None where it is not known how many requests the engine works on at once."""
        if self._slots is None:
            return None
        working = self.traffic.working
        running = min(working, self._slots()) if self.progress().is_ready else 0
        kv_use = self.kv_use.share if self.kv_use and self.progress().is_ready else None
        return Load(model=self.name, gauges=self._gauges, waiting=working - running, running=running, kv_use=kv_use)
