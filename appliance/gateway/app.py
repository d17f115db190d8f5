"""Which path is answered by what: the data path and the health routes here, as bare ASGI, all else by FastAPI.

FastAPI, with pydantic, takes as long to import as a small model takes to load. What the first token does not need is
imported with the first request for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine_route import EngineRoute
from appliance.gateway.auth import Keys, RequireKey
from appliance.gateway.forward import EngineEndpoint, Reply
from appliance.gateway.hold import TELL_EVERY_S
from appliance.gateway.metrics import Measured, Metrics
from appliance.gateway.refusal import Refusal, internal_error
from appliance.gateway.traffic import Traffic
from appliance.gateway.upstream_pool import UpstreamPool
from appliance.progress import Phase, Progress

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.gateway.own import Action, Document

Endpoint = Callable[["Scope", "Receive", "Send"], Awaitable[None]]


class App:
    """The gateway's ASGI application, and what moves in it."""

    def __init__(self, asgi: ASGIApp, traffic: Traffic, engine: UpstreamPool) -> None:
        self._asgi = asgi
        self.traffic = traffic
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)


def create_app(
    *,
    socket_path: Path,
    engine_routes: Iterable[EngineRoute],
    keys: Keys | None,
    progress: Callable[[], Progress],
    documents: Mapping[str, Document],
    actions: Mapping[str, Action] | None = None,
    models: Document | None = None,
    max_body_mib: int = 64,
    engine_restarts: Callable[[], int] | None = None,
    tell_every_s: float = TELL_EVERY_S,
    dropped_headers: frozenset[bytes] = frozenset(),
) -> App:
    """`keys` None turns authentication off. `documents` are served as /appliance/v1/<name>, `actions` answer a POST
    there. `models` is the list of models while the engine does not give its own. `dropped_headers` of a request, lower
    case, are kept from the engine.

    Every callable is called on the event loop for every request that needs it: it answers from memory, at once.
    """
    traffic = Traffic()
    engine = UpstreamPool(socket_path, dropped_headers)
    metrics = Metrics(traffic=traffic, progress=progress, engine_restarts=engine_restarts)
    routes: dict[str, tuple[tuple[str, ...], Endpoint]] = {}
    for route in engine_routes:
        endpoint = EngineEndpoint(
            route,
            engine=engine,
            traffic=traffic,
            progress=progress,
            max_body_bytes=max_body_mib * 2**20,
            stand_in=models if route.upstream == "/v1/models" else None,
            tell_every_s=tell_every_s,
        )
        routes[route.path] = (route.methods, endpoint)
    routes |= _health_routes(traffic, progress)
    rest = _Rest(metrics, documents, actions or {})
    door: ASGIApp = _Door(routes, rest)
    if keys is not None:
        door = RequireKey(door, keys)
    return App(Measured(door, metrics, frozenset({*routes, *rest.paths})), traffic, engine)


class _Door:
    """Paths that are known here go to their endpoint, all others to the rest of the gateway."""

    def __init__(self, routes: Mapping[str, tuple[tuple[str, ...], Endpoint]], rest: _Rest) -> None:
        self._routes = routes
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        is_started = False

        async def noted(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        except Refusal as error:
            await error.send(send)
        except Exception:
            if not is_started:  # the client gets no traceback; the server logs it
                await internal_error().send(send)
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._routes.get(scope["path"])
        if known is None:
            await (await self._rest.loaded())(scope, receive, send)
            return
        methods, endpoint = known
        allowed = _with_head(methods)
        if scope["method"] not in allowed:
            detail = f"method not allowed: {scope['method']} {scope['path'][:200]}"
            raise Refusal(405, "method_not_allowed", detail, headers=((b"allow", ", ".join(allowed).encode()),))
        await endpoint(scope, receive, send)


def _with_head(methods: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*methods, "HEAD"} if "GET" in methods else methods))


class _Rest:
    """Our own routes, made with FastAPI when the first of them is asked for."""

    def __init__(self, metrics: Metrics, documents: Mapping[str, Document], actions: Mapping[str, Action]) -> None:
        self._metrics = metrics
        self._documents = documents
        self._actions = actions
        self._loading: asyncio.Task[ASGIApp] | None = None
        self.paths = frozenset({"/metrics", *(f"/appliance/v1/{name}" for name in (*documents, *actions))})

    async def loaded(self) -> ASGIApp:
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        # A client that leaves must not end it for the others.
        return await asyncio.shield(self._loading)

    async def _load(self) -> ASGIApp:
        # In a thread: streams go on meanwhile.
        return await asyncio.to_thread(self._make)

    def _make(self) -> ASGIApp:
        from appliance.gateway.own import create_own_app  # here: the first token after a start does not wait for it

        return create_own_app(self._metrics, self._documents, self._actions)


def _health_routes(traffic: Traffic, progress: Callable[[], Progress]) -> dict[str, tuple[tuple[str, ...], Endpoint]]:
    async def live(_scope: Scope, _receive: Receive, send: Send) -> None:
        await Reply(send, "openai").document({"status": "live"})

    async def ready(_scope: Scope, _receive: Receive, send: Send) -> None:
        now = Progress(phase=Phase.STOPPING) if traffic.is_closed else progress()
        # Held is ready, since what is sent now is answered: a load balancer that took this appliance out for the
        # seconds of a reload would refuse the very requests that are held so that nobody is refused.
        status = 200 if now.is_ready or now.is_held else 503
        document = {"status": "ready"} if now.is_ready else now.document()
        await Reply(send, "openai").document({**document, "status": "ready"} if now.is_held else document, status)

    return {"/health/live": (("GET",), live), "/health/ready": (("GET",), ready), "/health": (("GET",), ready)}
