"""Ollama's API: a request becomes one of our own API inside of this process, and its answer comes back translated.

The endpoint of our own path does all else: the model of the request, waiting, limits, errors of the engine, the log of
requests. Imported with the first request for one of Ollama's paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.gateway.clients.connections import LEFT, WRITE_NOW
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend, ListedModel
from appliance.gateway.engine.gate import FleetDoor
from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.by_model import again
from appliance.gateway.routes.forward import (
    ClientLeft,
    ResponseWriter,
    declared_length,
    read_body,
    seconds_to_keep,
    unless_over,
)
from appliance.gateway.routes.metrics import FAILED
from appliance.gateway.routes.models import SERVES, Endpoint, find, found, listed_models
from appliance.gateway.wire import api_error
from appliance.gateway.wire import ollama_paths as paths
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.ollama import listing, requests
from appliance.gateway.wire.ollama.answers import AnswerError, Lines, Writer, error_text, line_of, whole

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from appliance.gateway.wire.headers import RawHeaders

OURS = (requests.OUR_CHAT, requests.OUR_TEXT, requests.OUR_VECTORS)
_LATEST = ":latest"
_STORE = (
    "models are not pulled, pushed, created, copied or deleted over the network: use `appliance models pull NAME`, "
    "`appliance models list` and `appliance models remove NAME` in the container"
)
_REPLACED = frozenset({b"content-type", b"content-length", b"transfer-encoding", b"x-accel-buffering"})
_NDJSON = ((b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no"))
_INCOMPLETE = "the engine ended while it worked on this request"


class OllamaApi:
    """The ASGI application of all paths of Ollama's API. `endpoints` are those of our own paths."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        roster: Roster,
        reading: Traffic,
        fleet: FleetDoor | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._roster = roster
        self._reading = reading
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseWriter(send, "ollama")
        try:
            if scope["path"] in paths.WORK:
                await self._work(scope, receive, send, reply)
            else:
                await self._show(scope, receive, reply)
        except ApiError as error:
            await reply.refuse(error)
        except ClientLeft:
            return

    async def _show(self, scope: Scope, receive: Receive, reply: ResponseWriter) -> None:
        path = scope["path"]
        if path == paths.VERSION_PATH:
            await reply.document({"version": paths.VERSION})
        elif path == paths.TAGS:
            await self._roster.look()
            await reply.document({"models": [listing.tag(model) for model in listed_models(self._roster)]})
        elif path == paths.PS:
            loaded = [model for model in listed_models(self._roster) if model.phase in SERVES]
            await reply.document({"models": [listing.running(model) for model in loaded]})
        elif path == paths.SHOW:
            name = requests.name_of(requests.parse(await self._read(scope, receive)))
            await reply.document(listing.shown(self._listed(await self._found(name, is_exact=True))))
        else:
            raise ApiError(501, "store_not_offered", _STORE)

    async def _work(self, scope: Scope, receive: Receive, send: Send, reply: ResponseWriter) -> None:
        asked = requests.translate(scope["path"], await self._read(scope, receive))
        is_one = len(self._roster) == 1 and not self._roster.is_strict
        backend = self._roster.first if is_one else await self._found(asked.model)
        writer = Writer(asked.kind, asked.model or backend.name)
        if asked.path is None:
            with self._reading.admitted(is_work=False) as must_end:
                done = await unless_over(self._keep(backend, asked), must_end=must_end, left=scope.get(LEFT))
            await reply.document(writer.nothing(done))
            return
        if (endpoint := self._endpoints.get(asked.path)) is None:
            raise ApiError(501, "not_offered", f"the engine of this appliance has no {asked.path}")
        # With one model every name means it, so the client's own goes on.
        body = asked.encoded(asked.model if is_one else backend.name)
        translated = _Translated(send, asked.kind, writer)
        inner = _inner_scope(scope, len(body))
        await endpoint(inner, again(body, receive), translated)
        left = scope.get(LEFT)
        await translated.close(has_client=left is None or not left.done())
        if translated.has_failed or FAILED in inner:
            scope[FAILED] = inner.get(FAILED, "502")

    async def _keep(self, backend: Backend, asked: requests.Asked) -> str:
        """Load or unload the model for a request without a prompt; return what the answer says happened. Raises
        ApiError if it cannot be loaded."""
        if asked.unloads and self._fleet is not None:
            await self._fleet.unload(backend.name)
            return "unload"
        if backend.gate is not None and backend.gate.waits:
            seconds = None if asked.keep_alive is None else seconds_to_keep("keep_alive", asked.keep_alive)
            async with backend.gate.held(None, seconds):
                return "load"
        progress = backend.progress()
        if not (progress.is_ready or progress.is_held):
            raise api_error.not_ready(progress)
        return "unload" if asked.unloads else "load"

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        with self._reading.admitted(is_work=False) as must_end:
            return await unless_over(read_body(receive, declared_length(scope)), must_end=must_end)

    async def _found(self, name: str, *, is_exact: bool = False) -> Backend:
        """Return the model of that name, with or without `:latest`; else the first one, unless `is_exact`, where that
        answers unknown names. Raises ApiError."""
        if not name:
            raise ApiError(400, "model_required", "model is required")
        meant = find(name, self._roster) or await found(name.removesuffix(_LATEST), self._roster)
        meant = meant or find(name, self._roster)  # a model that has come may have the whole name
        if meant is None and not (is_exact or self._roster.is_strict):
            return self._roster.first
        if meant is None:
            raise ApiError(404, "model_not_found", f"model '{name[:200]}' not found")
        return meant

    def _listed(self, backend: Backend) -> ListedModel:
        return listed_models(self._roster)[list(self._roster).index(backend)]


def _inner_scope(scope: Scope, length: int) -> Scope:
    """Return the scope of the request to our own API. The path stays, so that the log of requests shows it."""
    kept = [(name, value) for name, value in scope["headers"] if name not in _REPLACED]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
    # Without WRITE_NOW every piece comes through `send`, which translates it.
    return {**{name: value for name, value in scope.items() if name != WRITE_NOW}, "headers": headers}


class _Translated:
    """A `send` that takes an answer of our own API and sends Ollama's: a stream line by line, another answer once it is
    whole."""

    def __init__(self, send: Send, kind: str, writer: Writer) -> None:
        self._send = send
        self._kind = kind
        self._writer = writer
        self._status = 200
        self._headers: list[tuple[bytes, bytes]] = []
        self._lines: Lines | None = None
        self._body = bytearray()
        self._is_whole = False

    @property
    def has_failed(self) -> bool:
        return self._lines is not None and self._lines.has_failed

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message["status"], message.get("headers", ()))
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._lines is not None:
            lines = self._lines.feed(body) + (self._lines.end() if is_last else b"")
            if lines or is_last:
                await self._send({"type": "http.response.body", "body": lines, "more_body": not is_last})
        else:
            self._body += body
            if is_last:
                await self._send_whole()
        self._is_whole = self._is_whole or is_last

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self._status = status
        self._headers = [(name, value) for name, value in headers if name not in _REPLACED]
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if status < 400 and kind.startswith(b"text/event-stream"):
            self._lines = Lines(self._writer)
            await self._send({"type": "http.response.start", "status": status, "headers": [*_NDJSON, *self._headers]})

    async def _send_whole(self) -> None:
        document: dict[str, Any]
        if self._status >= 400:
            document = {"error": error_text(bytes(self._body), self._status)}
        else:
            try:
                document = whole(self._writer, self._kind, bytes(self._body))
            except AnswerError as error:
                self._status, document = 502, {"error": str(error)}
        await self._send_document(document)

    async def _send_document(self, document: dict[str, Any]) -> None:
        body = json.dumps(document, separators=(",", ":")).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self._headers]
        await self._send({"type": "http.response.start", "status": self._status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def close(self, *, has_client: bool) -> None:
        """Tell the client of an answer that was left incomplete."""
        if self._is_whole or not has_client:
            return
        if self._lines is None:
            self._status = 502
            await self._send_document({"error": _INCOMPLETE})
        else:
            await self._send({"type": "http.response.body", "body": line_of({"error": _INCOMPLETE})})
