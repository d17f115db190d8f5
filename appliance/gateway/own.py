"""Our own routes, with FastAPI: what is shown of the appliance, and what can be asked of it.

None of them is modelled, none is documented by FastAPI. Imported when one of them is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from appliance.gateway.api_error import ApiError, internal_error, unknown_model
from appliance.gateway.backend import Backend
from appliance.gateway.metrics import Metrics

T = TypeVar("T")
Document = Callable[[], dict[str, Any]]
Action = Callable[[], tuple[int, dict[str, Any]]]
"""Does at once what was asked for; status and document of the answer. Raises ApiError."""


def create_own_app(metrics: Metrics, backends: Sequence[Backend]) -> FastAPI:
    async def scrape(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [Route("/metrics", scrape)]
    for name in dict.fromkeys(name for backend in backends for name in (*backend.documents, *backend.actions)):
        documents = {backend.name: backend.documents[name] for backend in backends if name in backend.documents}
        actions = {backend.name: backend.actions[name] for backend in backends if name in backend.actions}
        methods = [method for method, there in (("GET", documents), ("POST", actions)) if there]
        routes.append(Route(f"/appliance/v1/{name}", _endpoint(documents, actions), methods=methods))
    return FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        routes=list[BaseRoute](routes),
        exception_handlers={ApiError: _on_refusal, HTTPException: _on_http_error, Exception: _on_bug},
        # Off, whatever OTEL_* variables the container was given: prompts and keys are nobody else's business.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )


def _endpoint(documents: Mapping[str, Document], actions: Mapping[str, Action]) -> Callable[[Request], Any]:
    """By the name of the model, which a request gives as `?model=` where there are several."""

    async def answer(request: Request) -> Response:
        if request.method == "POST":
            status, found = _of_model(actions, request)()
            return JSONResponse(found, status_code=status)
        if len(documents) > 1 and "model" not in request.query_params:
            return JSONResponse({"models": {name: document() for name, document in documents.items()}})
        return JSONResponse(_of_model(documents, request)())

    return answer


def _of_model(each: Mapping[str, T], request: Request) -> T:
    if len(each) == 1:
        return next(iter(each.values()))
    name = request.query_params.get("model")
    if name is None:
        message = "several models are served: say which with ?model=NAME"
        raise ApiError(400, "model_required", message)
    if name not in each:
        raise unknown_model(name, each)
    return each[name]


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router. No `Allow` of CORS, no list of what else there is."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase.lower()}: {request.method} {request.url.path[:200]}"
    api_error = ApiError(status, phrase.lower().replace(" ", "_"), detail)
    return _refused(api_error, getattr(error, "headers", None) or {})


async def _on_refusal(_request: Request, error: Exception) -> Response:
    return _refused(error if isinstance(error, ApiError) else internal_error())


async def _on_bug(_request: Request, _error: Exception) -> Response:
    """The client gets no traceback; the server logs it."""
    return _refused(internal_error())


def _refused(error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    headers = {**headers, "x-appliance-error": error.code}
    return JSONResponse(error.document(), status_code=error.status, headers=headers)
