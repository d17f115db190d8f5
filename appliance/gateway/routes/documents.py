"""Status documents and metrics as bare ASGI: a status is requested as soon as the appliance serves, and must not wait
for an import."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from appliance.gateway.engine.backend import Backend
from appliance.gateway.engine.gate import FleetDoor
from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.forward import ResponseWriter
from appliance.gateway.routes.models import Endpoint
from appliance.gateway.wire.api_error import unknown_model

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from appliance.gateway.routes.metrics import Metrics

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def path_of(name: str) -> str:
    return f"/appliance/v1/{name}"


def document_routes(metrics: Metrics, roster: Roster, fleet: FleetDoor | None = None) -> dict[str, Endpoint]:
    """Return the GET routes of documents and metrics. A document whose name is also an action is left out."""
    first = roster.first
    names = sorted(set(first.documents) - set(first.actions))
    routes = {path_of(name): _endpoint(name, roster, fleet) for name in names}
    if fleet is not None:
        routes[path_of("fleet")] = _fleet(fleet)
    return {"/metrics": _scrape(metrics, roster), **routes}


def of_model(model: str | None, roster: Roster) -> Backend:
    """Return the model that `?model=` names, or the first one. Raises ApiError (404) if the model is unknown."""
    found = roster.first if model is None else roster.named(model)
    if found is None:
        raise unknown_model(model or "", (backend.name for backend in roster))
    return found


def model_asked(scope: Scope) -> str | None:
    """Return the model that a request names as `?model=`; None if it names none."""
    asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return asked["model"][-1] if "model" in asked else None


def _endpoint(name: str, roster: Roster, fleet: FleetDoor | None) -> Endpoint:
    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        backend = of_model(model_asked(scope), roster)
        if name == "status" and backend.insight:
            await backend.insight.refresh()
        document = backend.documents[name]()
        if name == "status" and fleet is not None:
            document = {**document, "volume_problem": fleet.volume_problem or None}
            if len(roster) > 1:
                document["fleet"] = fleet.document()
        await ResponseWriter(send, "openai").document(document)

    return answer


def _fleet(fleet: FleetDoor) -> Endpoint:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await ResponseWriter(send, "openai").document(dict(fleet.document()))

    return answer


def _scrape(metrics: Metrics, backends: Roster) -> Endpoint:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        ready = [backend for backend in backends if backend.progress().is_ready]
        told = (figure for backend in ready for figure in (backend.kv_use, backend.counts) if figure)
        insights = (backend.insight for backend in backends if backend.insight)
        await asyncio.gather(*(each.refresh() for each in told), *(each.refresh() for each in insights))
        body = metrics.text()
        headers = [(b"content-type", _TEXT), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
