"""Our own routes that change something, with FastAPI, and the answer to unknown paths.

FastAPI neither models nor documents them. Imported when one of them is first requested; routes that only show something
are in documents.py and do not need this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.documents import of_model, path_of
from appliance.gateway.wire.api_error import ApiError, body_too_large, dialect_of, internal_error

BODY_MOST_BYTES = 2**20


def create_own_app(roster: Roster) -> FastAPI:
    first = roster.first
    routes = [
        Route(path_of(name), _endpoint(name, roster), methods=["GET", "POST"] if name in first.documents else ["POST"])
        for name in first.actions
    ]
    return FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        routes=list[BaseRoute](routes),
        exception_handlers={ApiError: _on_refusal, HTTPException: _on_http_error, Exception: _on_bug},
        # Off, whatever OTEL_* variables the container has: prompts and keys must not be sent to a third party.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )


def _endpoint(name: str, roster: Roster) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        backend = of_model(request.query_params.get("model"), roster)
        if request.method == "POST":
            status, found = backend.actions[name](await _body(request))
            return JSONResponse(found, status_code=status)
        return JSONResponse(backend.documents[name]())

    return answer


async def _body(request: Request) -> bytes:
    found = b""
    try:
        async for piece in request.stream():
            found += piece
            if len(found) > BODY_MOST_BYTES:
                raise body_too_large(BODY_MOST_BYTES)
    except ClientDisconnect as error:
        raise ApiError(400, "incomplete_request", "the client left before its whole body arrived") from error
    return found


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer the router's 404 and 405, without a CORS `Allow` header or a list of other routes."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase.lower()}: {request.method} {request.url.path[:200]}"
    api_error = ApiError(status, phrase.lower().replace(" ", "_"), detail)
    return _refused(request, api_error, getattr(error, "headers", None) or {})


async def _on_refusal(request: Request, error: Exception) -> Response:
    return _refused(request, error if isinstance(error, ApiError) else internal_error())


async def _on_bug(request: Request, _error: Exception) -> Response:
    """Answer without a traceback; the server logs it."""
    return _refused(request, internal_error())


def _refused(request: Request, error: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    headers = {**headers, "x-appliance-error": error.code}
    return JSONResponse(error.document(dialect_of(request.url.path)), status_code=error.status, headers=headers)
