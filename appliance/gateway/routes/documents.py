"""Status documents and metrics as bare ASGI: a status is requested as soon as the appliance serves, and must not wait
for an import."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs

from appliance.gateway.engine.backend import Backend, Document
from appliance.gateway.engine.insight import Insight
from appliance.gateway.routes.forward import ResponseWriter
from appliance.gateway.routes.models import Endpoint
from appliance.gateway.wire.api_error import ApiError, unknown_model

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from appliance.gateway.routes.metrics import Metrics

T = TypeVar("T")
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def path_of(name: str) -> str:
    return f"/appliance/v1/{name}"


def document_routes(metrics: Metrics, backends: Sequence[Backend]) -> dict[str, Endpoint]:
    """Return the GET routes of documents and metrics. A document whose name is also an action is left out."""
    actions = {name for backend in backends for name in backend.actions}
    names = {name for backend in backends for name in backend.documents} - actions
    each = {name: documents_of(name, backends) for name in sorted(names)}
    insights = [backend.insight for backend in backends if backend.insight]
    shown_of = {name: _endpoint(found, insights if name == "status" else ()) for name, found in each.items()}
    return {"/metrics": _scrape(metrics, backends), **{path_of(name): found for name, found in shown_of.items()}}


def documents_of(name: str, backends: Sequence[Backend]) -> dict[str, Document]:
    return {backend.name: backend.documents[name] for backend in backends if name in backend.documents}


def shown(documents: Mapping[str, Document], model: str | None) -> dict[str, Any]:
    """Return the document of `model`, given as `?model=`. Without `model`, return the only one, or all of them by
    model."""
    if len(documents) > 1 and model is None:
        return {"models": {name: document() for name, document in documents.items()}}
    return of_model(documents, model)()


def of_model(each: Mapping[str, T], model: str | None) -> T:
    """Return the entry of `model`, or the only one. Raises ApiError if the model is unknown, or missing while there are
    several."""
    if len(each) == 1:
        return next(iter(each.values()))
    if model is None:
        message = "several models are served: name one with ?model=NAME"
        raise ApiError(400, "model_required", message)
    if model not in each:
        raise unknown_model(model, each)
    return each[model]


def model_asked(scope: Scope) -> str | None:
    """Return the model that a request names as `?model=`; None if it names none."""
    asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return asked["model"][-1] if "model" in asked else None


def _endpoint(documents: Mapping[str, Document], insights: Sequence[Insight] = ()) -> Endpoint:
    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        if insights:
            await asyncio.gather(*(each.refresh() for each in insights))
        await ResponseWriter(send, "openai").document(shown(documents, model_asked(scope)))

    return answer


def _scrape(metrics: Metrics, backends: Sequence[Backend]) -> Endpoint:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        told = (backend.kv_use for backend in backends if backend.kv_use and backend.progress().is_ready)
        insights = (backend.insight for backend in backends if backend.insight)
        await asyncio.gather(*(each.refresh() for each in told), *(each.refresh() for each in insights))
        body = metrics.text()
        headers = [(b"content-type", _TEXT), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
