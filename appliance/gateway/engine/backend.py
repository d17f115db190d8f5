"""One served model as the gateway sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute, ErrorRule, MetricAlias
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.engine_errors import EngineErrors
from appliance.gateway.engine.gate import Gate
from appliance.gateway.engine.insight import Insight
from appliance.gateway.engine.load import EngineFigure, Load, ParseCounts, ParseKvUse
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.values import dataclass

Document = Callable[[], dict[str, Any]]
Action = Callable[[bytes], tuple[int, dict[str, Any]]]
"""Takes a request's body, acts at once, and returns status and document of the answer. Raises ApiError."""


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """One model as clients see it in the list. A field that is None or empty is not known yet and is left out."""

    id: str
    phase: Phase
    aliases: tuple[str, ...] = ()  # other names for it
    created_s: int = 0
    context: int | None = None  # tokens that one request may use, by the plan that serves or is being loaded
    native_context: int | None = None
    input_modalities: tuple[str, ...] = ("text",)
    calls_tools: bool = False
    reasons: bool = False
    is_embedding: bool = False  # True: it returns vectors, or scores if it is a reranker, and no text
    is_reranker: bool = False
    adapters: tuple[tuple[str, float], ...] = ()  # LoRA adapters with their scales
    format: str = ""
    architecture: str = ""
    quantization: str = ""
    size_bytes: int | None = None
    parameters: int | None = None
    vocabulary: int | None = None
    embedding_length: int | None = None
    abilities: tuple[tuple[str, str], ...] = ()  # checked ones with their results

    @property
    def names(self) -> tuple[str, ...]:
        return (self.id, *self.aliases)


class Backend:
    """One model: its engine's routes and socket, its requests, and what is shown of it.

    `documents` are served as /appliance/v1/<name>; `actions` answer a POST there. `listed` returns the model's entry in
    the list; without it the entry has only name and phase. `shown_name` returns the entry's name alone, which each
    request needs. `dropped_headers`, in lower case, are not sent to the
    engine. `slots` returns how many requests the engine works on in parallel; 0 while none serves. `kv_use` is the
    engine's path that reports its KV cache, with the parser of that answer, and `counts` the one that counts prompts
    on disk and uses of experts. `errors` replace the engine's own messages.
    `aliases` are second names of metrics. If the engine `checks_model_name`, it is sent the name that it knows.
    `elsewhere`, if set, refuses every request and tells the client in words which host answers. `gate` brings the model
    up for a request; without one the model is always on.

    Every callable is called on the event loop for every request that needs it, so it must answer at once, from memory.
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
        shown_name: Callable[[], str] | None = None,
        engine_restarts: Callable[[], int] | None = None,
        dropped_headers: frozenset[bytes] = frozenset(),
        slots: Callable[[], int] | None = None,
        kv_use: tuple[str, ParseKvUse] | None = None,
        counts: tuple[str, ParseCounts] | None = None,
        aliases: Iterable[MetricAlias] = (),
        elsewhere: str | None = None,
        insight: Insight | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.name = name  # the name in requests, if there are several models
        self.routes = tuple(routes)
        self.errors = EngineErrors(errors)
        self._checks_model_name = checks_model_name
        self.progress = progress
        self.documents = documents
        self.actions = actions or {}
        self.listed = listed or (lambda: ListedModel(id=name, phase=progress().phase))
        self.shown_name = shown_name or (lambda: self.listed().id)
        self.engine_restarts = engine_restarts
        self.traffic = Traffic()
        self.upstream = UpstreamPool(socket_path, dropped_headers)
        self.elsewhere = elsewhere
        self.insight = insight
        self.gate = gate
        self._slots = slots
        self.aliases = tuple(aliases)
        self.kv_use = EngineFigure(self.upstream, *kv_use) if kv_use else None
        self.counts = EngineFigure(self.upstream, *counts) if counts else None

    def engines_name(self) -> str | None:
        """Return the engine's name of the model if the engine refuses every other name, else None."""
        return self.shown_name() if self._checks_model_name else None

    def load(self) -> Load | None:
        """Return the current load; None if the number of parallel requests is unknown."""
        if self._slots is None:
            return None
        working = self.traffic.working
        running = min(working, self._slots()) if self.progress().is_ready else 0
        kv_use = self.kv_use.value if self.kv_use and self.progress().is_ready else None
        return Load(model=self.name, waiting=working - running, running=running, kv_use=kv_use)
