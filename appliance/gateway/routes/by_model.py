"""Several models behind one gateway: chooses the model of a request, and combines their progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from appliance.console.progress import Phase, Progress
from appliance.documents import model_in
from appliance.engine_route import Dialect
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.backend import Backend
from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.documents import model_asked
from appliance.gateway.routes.forward import (
    ClientLeft,
    ResponseWriter,
    content_type_of,
    declared_length,
    read_body,
    unless_over,
)
from appliance.gateway.routes.models import Endpoint, found
from appliance.gateway.wire import api_error
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.model_name import model_in_form

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


class ByModel:
    """The ASGI application of one path: passes a request unchanged to the model that it names.

    `make` makes the endpoint of one model, once each; `reading` counts requests until their model is known. While only
    one model is here, no body is read for that.
    """

    def __init__(
        self, make: Callable[[Backend], Endpoint], roster: Roster, *, dialect: Dialect, reading: Traffic
    ) -> None:
        self._endpoint = cache(make)
        self._roster = roster
        self._dialect = dialect
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        roster = self._roster
        if len(roster) == 1 and not roster.is_strict:
            await self._endpoint(roster.first)(scope, receive, send)
            return
        try:
            with self._reading.admitted(is_work=False) as must_end:
                reading = read_body(receive, declared_length(scope))
                body = await unless_over(reading, must_end=must_end)
                endpoint = self._endpoint(await self._meant(scope, body))
        except ApiError as error:
            await ResponseWriter(send, self._dialect).refuse(error)
        except ClientLeft:
            return
        else:
            await endpoint(scope, again(body, receive), send)

    async def _meant(self, scope: Scope, body: bytes) -> Backend:
        name = model_named_in(body, content_type_of(scope)) or model_asked(scope) or None
        if name is not None and (meant := await found(name, self._roster)) is not None:
            return meant
        if not self._roster.is_strict:
            return self._roster.first
        known = [backend.name for backend in self._roster]
        raise api_error.no_model(known) if name is None else api_error.unknown_model(name, known)


_RESTS = frozenset({Phase.ASLEEP, Phase.STARTING, Phase.FETCHING, Phase.QUANTIZING, Phase.LOADING})
_FORM = re.compile(rb"\s*multipart/form-data", re.IGNORECASE)


def model_named_in(body: bytes, content_type: bytes = b"") -> str | None:
    """Return the model that the body names; None if it is neither a JSON object nor a form, or names none."""
    if _FORM.match(content_type):
        return model_in_form(body)
    return model_in(body)


def overall_progress(roster: Sequence[Backend]) -> Progress:
    """Return the progress of the whole: of the first model, unless it rests. A model that rests is loaded by the next
    request for it, so it counts as ready."""
    first, gate = roster[0].progress(), roster[0].gate
    if gate is not None and gate.waits and first.phase in _RESTS:
        return Progress(phase=Phase.READY, since=first.since)
    return first


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers the body before it continues."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received
