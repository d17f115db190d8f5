"""Which path is answered by what. FastAPI carries the routes; none of them is modelled, none is documented by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from appliance.gateway.auth import Keys, RequireKey
from appliance.gateway.engine import Engine
from appliance.gateway.forward import EngineEndpoint
from appliance.gateway.hold import TELL_EVERY_S
from appliance.gateway.metrics import Measured, Metrics
from appliance.gateway.progress import Phase, Progress
from appliance.gateway.refusal import Refusal
from appliance.gateway.routes import ENGINE_ROUTES
from appliance.gateway.traffic import Traffic

Document = Callable[[], dict[str, Any]]


def create_app(
    *,
    socket_path: Path,
    keys: Keys | None,
    progress: Callable[[], Progress],
    documents: Mapping[str, Document],
    max_body_mib: int = 64,
    engine_restarts: Callable[[], int] | None = None,
    tell_every_s: float = TELL_EVERY_S,
) -> FastAPI:
    """The gateway's application. `keys` None turns authentication off; `documents` are served as /appliance/v1/<name>.

    Every callable is called on the event loop for every request that needs it: it answers from memory, at once.
    """
    traffic = Traffic()
    engine = Engine(socket_path)
    metrics = Metrics(traffic=traffic, progress=progress, engine_restarts=engine_restarts)
    forwarded = [
        Route(
            route.path,
            EngineEndpoint(
                route,
                engine=engine,
                traffic=traffic,
                progress=progress,
                max_body_bytes=max_body_mib * 2**20,
                tell_every_s=tell_every_s,
            ),
            methods=route.methods,
        )
        for route in ENGINE_ROUTES
    ]
    routes = [*forwarded, *_own_routes(metrics, traffic, progress, documents)]
    known_paths = frozenset(route.path for route in routes)
    middleware = [Middleware(Measured, metrics, known_paths)]
    if keys is not None:
        middleware.append(Middleware(RequireKey, keys))
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        routes=list[BaseRoute](routes),
        middleware=middleware,
        lifespan=engine.lifespan,
        exception_handlers={HTTPException: _on_http_error, Exception: _on_bug},
        # Off, whatever OTEL_* variables the container was given: prompts and keys are nobody else's business.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.traffic = traffic
    app.state.engine = engine
    return app


def _own_routes(
    metrics: Metrics, traffic: Traffic, progress: Callable[[], Progress], documents: Mapping[str, Document]
) -> list[Route]:
    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        now = Progress(phase=Phase.STOPPING) if traffic.is_closed else progress()
        if now.is_held:
            # Ready, since what is sent now is answered: a load balancer that took this appliance out for the seconds of
            # a reload would refuse the very requests that are held so that nobody is refused.
            return JSONResponse({**now.document(), "status": "ready"})
        return JSONResponse({"status": "ready"}) if now.is_ready else JSONResponse(now.document(), status_code=503)

    async def scrape(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/health", ready),
        Route("/metrics", scrape),
        *(Route(f"/appliance/v1/{name}", _document(document)) for name, document in documents.items()),
    ]


def _document(document: Document) -> Callable[[Request], Any]:
    async def show(_: Request) -> Response:
        return JSONResponse(document())

    return show


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router. No `Allow` of CORS, no list of what else there is."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase
    detail = f"{phrase.lower()}: {request.method} {request.url.path[:200]}"
    headers = getattr(error, "headers", None) or {}
    return _response(Refusal(status, phrase.lower().replace(" ", "_"), detail), headers)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    """The client gets no traceback; the server logs it."""
    return _response(Refusal(500, "internal_error", "the gateway failed on this request", kind="server_error"), {})


def _response(error: Refusal, headers: Mapping[str, str]) -> Response:
    return JSONResponse(
        error.document(), status_code=error.status, headers={**headers, "x-appliance-error": error.code}
    )
