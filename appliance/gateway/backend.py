"""One model that is served, as the gateway sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine_route import EngineRoute
from appliance.gateway.models import ListedModel
from appliance.gateway.traffic import Traffic
from appliance.gateway.upstream_pool import UpstreamPool
from appliance.progress import Progress

if TYPE_CHECKING:
    from appliance.gateway.documents import Document
    from appliance.gateway.own import Action


class Backend:
    """Its engine's routes and socket, the requests for it, and what is shown of it.

    `documents` are served as /appliance/v1/<name>, `actions` answer a POST there. `listed` is what the list of models
    tells of it; without it no more than its name and phase. `dropped_headers` of a request, lower case, are kept from
    the engine.

    Every callable is called on the event loop for every request that needs it: it answers from memory, at once.
    """

    def __init__(
        self,
        *,
        name: str,
        socket_path: Path,
        routes: Iterable[EngineRoute],
        progress: Callable[[], Progress],
        documents: Mapping[str, Document],
        actions: Mapping[str, Action] | None = None,
        listed: Callable[[], ListedModel] | None = None,
        engine_restarts: Callable[[], int] | None = None,
        dropped_headers: frozenset[bytes] = frozenset(),
    ) -> None:
        self.name = name  # as requests name it, where there are several
        self.routes = tuple(routes)
        self.progress = progress
        self.documents = documents
        self.actions = actions or {}
        self.listed = listed or (lambda: ListedModel(id=name, phase=progress().phase))
        self.engine_restarts = engine_restarts
        self.traffic = Traffic()
        self.upstream = UpstreamPool(socket_path, dropped_headers)
