"""Several models behind one gateway: chooses the model of a request, and combines their progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appliance.console.progress import Progress
from appliance.engine_route import Dialect
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend
from appliance.gateway.routes.forward import ClientLeft, ResponseWriter, declared_length, read_body, unless_over
from appliance.gateway.routes.models import Endpoint, find
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


class ByModel:
    """The ASGI application of one path: passes a request unchanged to the model that its JSON names.

    `endpoints` are those of the models whose engines have the path; `reading` counts requests until their model is
    known.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        backends: Sequence[Backend],
        *,
        dialect: Dialect,
        reading: Traffic,
    ) -> None:
        self._endpoints = endpoints
        self._backends = [backend for backend in backends if backend.name in endpoints]
        self._dialect = dialect
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._reading.admitted(is_work=False) as must_end:
                reading = read_body(receive, declared_length(scope))
                body = await unless_over(reading, must_end=must_end)
            endpoint = self._endpoint_for(body)
        except ApiError as error:
            await ResponseWriter(send, self._dialect).refuse(error)
        except ClientLeft:
            return
        else:
            await endpoint(scope, _again(body, receive), send)

    def _endpoint_for(self, body: bytes) -> Endpoint:
        name = model_named_in(body)
        if name is None:
            raise api_error.no_model(self._endpoints)
        backend = find(name, self._backends)
        if backend is None:
            raise api_error.unknown_model(name, self._endpoints)
        return self._endpoints[backend.name]


def model_named_in(body: bytes) -> str | None:
    """Return the model that the body names; None if it is not a JSON object or names none."""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = document.get("model") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def overall_progress(backends: Sequence[Backend]) -> Progress:
    """Return the progress of the first model that does not serve, else of the first held one, else of the first."""
    found = [backend.progress() for backend in backends]
    return min(found, key=lambda progress: 2 * progress.is_ready + progress.is_held)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers the body again before it continues."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received
