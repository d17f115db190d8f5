"""Loads and unloads models on request, by the paths that clients of several models know: docs/api.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.gate import FleetDoor
from appliance.gateway.engine.roster import Roster
from appliance.gateway.routes.by_model import model_named_in
from appliance.gateway.routes.forward import ResponseWriter, declared_length, read_body, unless_over
from appliance.gateway.routes.models import Endpoint, found
from appliance.gateway.wire import api_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

BODY_BYTES_MAX = 2**20
LOAD, UNLOAD = "/models/load", "/models/unload"


def fleet_routes(roster: Roster, fleet: FleetDoor, reading: Traffic) -> dict[str, Endpoint]:
    """Return the POST routes by path. Their body is `{"model": NAME}`; they answer at once, before the work is done."""

    def endpoint(*, loads: bool) -> Endpoint:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with reading.admitted(is_work=False) as must_end:
                whole = read_body(receive, declared_length(scope), BODY_BYTES_MAX)
                body = await unless_over(whole, must_end=must_end)
                name = model_named_in(body)
                backend = None if name is None else await found(name, roster)
                if backend is None:
                    known = [each.name for each in roster]
                    raise api_error.no_model(known) if name is None else api_error.unknown_model(name, known)
                await (fleet.load if loads else fleet.unload)(backend.name)
                await ResponseWriter(send, "openai").document({"success": True, "model": backend.name})

        return answer

    return {LOAD: endpoint(loads=True), UNLOAD: endpoint(loads=False)}
