"""The gateway's routing: engine routes, health and documents are bare ASGI; everything else is FastAPI.

FastAPI, with pydantic, takes as long to import as a small model takes to load. It is not needed for the first token and
is imported with the first request that needs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Phase, Progress
from appliance.engine_route import EngineRoute
from appliance.gateway.accounts.accounts import Accounts
from appliance.gateway.accounts.door import NamedDoor
from appliance.gateway.accounts.usage import Usage, UsageEndpoint
from appliance.gateway.clients.auth import Keys, RequireKey, is_open
from appliance.gateway.clients.connections import BUSY, KNOWN, Counts
from appliance.gateway.clients.request_log import RequestLog
from appliance.gateway.clients.request_queue import TELL_EVERY_S
from appliance.gateway.clients.session import Sessions
from appliance.gateway.clients.traces import Traces
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend, Document
from appliance.gateway.engine.gate import FleetDoor
from appliance.gateway.engine.roster import Roster, roster_of
from appliance.gateway.face.feed import Feed, feed_endpoint
from appliance.gateway.face.pages import login_routes, page_routes
from appliance.gateway.routes.by_model import ByModel, overall_progress
from appliance.gateway.routes.documents import document_routes, model_asked, of_model, path_of
from appliance.gateway.routes.fleet import LOAD, UNLOAD, fleet_routes
from appliance.gateway.routes.forward import EngineEndpoint, ResponseWriter
from appliance.gateway.routes.metrics import Measured, Metrics
from appliance.gateway.routes.models import LIST_PATHS, Endpoint, ForSomeModels, list_routes
from appliance.gateway.wire import ollama_paths
from appliance.gateway.wire.api_error import ApiError, dialect_of, internal_error, lacking, too_busy
from appliance.gateway.wire.http_answers import CheckHttp
from appliance.system.detached import detached
from appliance.system.lack import is_lack, tell

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

Routes = dict[str, tuple[tuple[str, ...], Endpoint]]
"""Methods and endpoint of each path."""


class App:
    """The gateway's ASGI application, and the models behind it."""

    def __init__(
        self, asgi: ASGIApp, backends: Roster, reading: Traffic, connection_counts: Counts, requests: RequestLog
    ) -> None:
        self._asgi = asgi
        self._reading = reading
        self.requests = requests
        self.connection_counts = connection_counts  # counts kept by the server of this application
        self.backends = backends

    @property
    def traffics(self) -> list[Traffic]:
        """One per model, and one for requests whose model is not known yet."""
        return [*(backend.traffic for backend in self.backends), self._reading]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._asgi(scope, receive, send)


def create_app(
    backends: Sequence[Backend] | Roster,
    *,
    keys: Keys | None,
    tell_every_s: float = TELL_EVERY_S,
    recent: Callable[[], list[dict[str, Any]]] = list,
    doctor: Document | None = None,
    libraries: Path = Path("/opt/appliance/web"),
    accounts: Accounts | None = None,
    usage: Usage | None = None,
    traces: Traces | None = None,
    fleet: FleetDoor | None = None,
) -> App:
    """Return the application. `keys` None turns authentication off; `accounts` are further keys, `usage` counts what
    is used with each, and `traces` sends a span of each request. With several backends, a request goes to the one that
    it names as `model`; `fleet` decides which of them are loaded. Raises ConfigError if two backends have one name.

    For the pages, `recent` returns the log's latest lines, `doctor` looks at the machine, and `libraries` is the folder
    of the image with the scripts that others wrote.
    """
    roster = roster_of(backends)
    requests = RequestLog()
    reading = Traffic()
    progress = partial(overall_progress, roster)
    connections = Counts()
    metrics = Metrics(
        connections=connections,
        running=lambda: reading.running + sum(backend.traffic.running for backend in roster),
        events_per_s=lambda: sum(backend.traffic.rate.per_s for backend in roster),
        progress=progress,
        engine_restarts=_engine_restarts(roster),
        engine_hangs=lambda: sum(backend.upstream.hangs for backend in roster),
        loads=lambda: (load for backend in roster if (load := backend.load())),
        aliases=(alias for backend in roster for alias in backend.aliases),
        insights=lambda: {backend.name: backend.insight for backend in roster if backend.insight},
        engine_counts=partial(_engine_counts, roster),
        fleet=fleet,
    )
    requests.listen(metrics.finished)
    lists = list_routes(roster, reading)
    documents = document_routes(metrics, roster, fleet)
    sessions = Sessions(keys.first) if keys else None
    pages, files = page_routes(libraries)
    # One for each model, made when the first page looks at it.
    feed_of = cache(partial(Feed, requests=requests, recent=recent, doctor=doctor, fleet=fleet))
    routes: Routes = {
        **_engine_routes(roster, reading, tell_every_s, requests),
        **{route.path: (("GET",), route.all) for route in lists},
        **{path: (("GET",), endpoint) for path, endpoint in documents.items()},
        **_health_routes(reading, progress),
        **{path: (("GET",), endpoint) for path, endpoint in pages.items()},
        **{path: (("POST",), endpoint) for path, endpoint in login_routes(keys, sessions, reading).items()},
        path_of("events"): (("GET",), feed_endpoint(lambda scope: feed_of(of_model(model_asked(scope), roster)))),
    }
    if fleet is not None:
        routes |= {path: (("POST",), endpoint) for path, endpoint in fleet_routes(roster, fleet, reading).items()}
    if traces:
        requests.listen(traces.note)
    if usage:
        requests.listen(usage.note)
        routes[path_of("usage")] = (("GET",), UsageEndpoint(usage))
    ollama = _Ollama({path: endpoint for path, (_, endpoint) in routes.items()}, roster, reading, fleet)
    routes |= {path: (methods, ollama) for path, methods in ollama_paths.METHODS.items()}
    rest = _Rest(roster)
    below: Routes = {path: (("GET",), endpoint) for path, endpoint in files.items()}
    below |= {f"{route.path}/": (("GET",), route.one) for route in lists}
    below[ollama_paths.BLOBS] = (("GET", "POST"), ollama)
    door: ASGIApp = _Door(routes, below, rest)
    if keys is not None:
        door = RequireKey(door, keys, sessions, _named_door(door, accounts, roster, requests) if accounts else None)
    door = CheckHttp(door)
    return App(Measured(door, metrics, frozenset({*routes, *rest.paths})), roster, reading, connections, requests)


def _named_door(app: ASGIApp, accounts: Accounts, backends: Sequence[Backend], requests: RequestLog) -> NamedDoor:
    requests.listen(accounts.note)
    routes = [route for backend in backends for route in backend.routes]
    return NamedDoor(
        app,
        accounts,
        work=frozenset({*ollama_paths.WORK, *(route.path for route in routes if route.needs_model)}),
        free=frozenset({*LIST_PATHS, *ollama_paths.FREE, *(route.path for route in routes if not route.needs_model)}),
        below=tuple(f"{path}/" for path in LIST_PATHS),
        for_admins=frozenset({LOAD, UNLOAD}),  # no request, so no limit of a key would hold for them
    )


def _engine_restarts(roster: Roster) -> Callable[[], int] | None:
    if all(backend.engine_restarts is None for backend in roster):
        return None
    return lambda: sum(backend.engine_restarts() for backend in roster if backend.engine_restarts is not None)


def _engine_counts(roster: Roster) -> dict[str, Mapping[str, float]]:
    """Return what the engines that serve count of prompts on disk and of experts, by model."""
    told = ((backend, backend.counts.value) for backend in roster if backend.counts)
    return {backend.name: counts for backend, counts in told if counts and backend.progress().is_ready}


def _engine_routes(roster: Roster, reading: Traffic, tell_every_s: float, requests: RequestLog) -> Routes:
    """Return the routes of the engine. All models of a gateway are served by one engine, so all have the same ones."""

    def endpoint_of(route: EngineRoute, backend: Backend) -> Endpoint:
        if backend.elsewhere is not None:
            return _elsewhere(backend.elsewhere)
        endpoint: Endpoint = EngineEndpoint(
            route,
            engine=backend.upstream,
            traffic=backend.traffic,
            progress=backend.progress,
            errors=backend.errors,
            engines_name=backend.engines_name,
            tell_every_s=tell_every_s,
            model=backend.shown_name,
            requests=requests,
            insight=backend.insight,
            gate=backend.gate,
        )
        if route.not_for_rerankers or route.only_for_embedders:
            return ForSomeModels(endpoint, route, backend.listed)
        return endpoint

    return {
        route.path: (
            route.methods,
            ByModel(partial(endpoint_of, route), roster, dialect=route.dialect, reading=reading),
        )
        for route in roster.first.routes
    }


def _elsewhere(words: str) -> Endpoint:
    async def answer(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ApiError(421, "asked_elsewhere", words)

    return answer


class _Door:
    """Routes requests: a known path to its endpoint, a path below one of the `prefixes` to the endpoint of that prefix
    if it has the method, every other request to the rest of the gateway."""

    def __init__(self, routes: Routes, prefixes: Routes, rest: _Rest) -> None:
        self._routes = routes
        self._prefixes = prefixes
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
        except ApiError as error:
            await error.send(send, dialect_of(scope["path"]))
        except Exception as error:
            if not is_started and is_lack(error):
                tell("answering a request", error)
                await lacking().send(send, dialect_of(scope["path"]))
                return
            if not is_started:  # no traceback for the client; the server logs it
                await internal_error().send(send, dialect_of(scope["path"]))
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_open(scope["path"]):
            self._look_at_connection(scope)
        known = self._routes.get(scope["path"])
        if known is None:
            await (self._below(scope) or await self._rest.loaded())(scope, receive, send)
            return
        methods, endpoint = known
        allowed = _with_head(methods)
        if scope["method"] not in allowed:
            detail = f"method not allowed: {scope['method']} {scope['path'][:200]}"
            raise ApiError(405, "method_not_allowed", detail, headers=((b"allow", ", ".join(allowed).encode()),))
        await endpoint(scope, receive, send)

    def _look_at_connection(self, scope: Scope) -> None:
        """Mark the connection as one that has a valid key or needs none. Raises ApiError if there are too many
        requests."""
        if KNOWN in scope:
            scope[KNOWN]()
        if BUSY in scope and scope[BUSY]():
            raise too_busy()

    def _below(self, scope: Scope) -> Endpoint | None:
        for prefix, (methods, endpoint) in self._prefixes.items():
            if scope["path"].startswith(prefix) and scope["method"] in _with_head(methods):
                return endpoint
        return None


def _with_head(methods: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*methods, "HEAD"} if "GET" in methods else methods))


class _Rest:
    """Our own routes that change something. They are made with FastAPI when one of them is first requested."""

    def __init__(self, backends: Roster) -> None:
        self._backends = backends
        self._loading: asyncio.Task[ASGIApp] | None = None
        self.paths = frozenset(path_of(name) for backend in backends for name in backend.actions)

    async def loaded(self) -> ASGIApp:
        # A failed load is retried: a lack of open files is temporary.
        if self._loading is None or (self._loading.done() and self._loading.exception()):
            self._loading = asyncio.create_task(self._load())
        # A client that disconnects must not cancel the load for others.
        return await asyncio.shield(self._loading)

    async def _load(self) -> ASGIApp:
        # In a thread, so that streams continue meanwhile.
        return await detached(self._make)

    def _make(self) -> ASGIApp:
        from appliance.gateway.routes.own import (
            create_own_app,  # imported here, so that the first token after a start does not wait for it
        )

        return create_own_app(self._backends)


class _Ollama:
    """Ollama's API, made when one of its paths is first requested. `endpoints` are those of all other paths."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        roster: Roster,
        reading: Traffic,
        fleet: FleetDoor | None,
    ) -> None:
        self._parts = (endpoints, roster, reading, fleet)
        self._made: Endpoint | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            # Imported here, so that a start does not wait for it. It takes about 10 ms, and a failed import is retried
            # with the next request.
            from appliance.gateway.routes.ollama import OllamaApi

            self._made = OllamaApi(*self._parts)
        await self._made(scope, receive, send)


def _health_routes(traffic: Traffic, progress: Callable[[], Progress]) -> Routes:
    async def live(_scope: Scope, _receive: Receive, send: Send) -> None:
        await ResponseWriter(send, "openai").document({"status": "live"})

    async def ready(_scope: Scope, _receive: Receive, send: Send) -> None:
        now = Progress(phase=Phase.STOPPING) if traffic.is_closed else progress()
        # "Held" counts as ready, because requests sent now are answered. If a load balancer took this appliance out for
        # the seconds of a reload, it would refuse the very requests that are held so that none is refused.
        status = 200 if now.is_ready or now.is_held else 503
        document = {"status": "ready"} if now.is_ready else now.document()
        await ResponseWriter(send, "openai").document(
            {**document, "status": "ready"} if now.is_held else document, status
        )

    return {"/health/live": (("GET",), live), "/health/ready": (("GET",), ready), "/health": (("GET",), ready)}
