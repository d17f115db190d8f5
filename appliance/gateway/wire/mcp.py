"""Requests that want the server to call MCP servers, which is refused: docs/api.md says why."""

from __future__ import annotations

from appliance.documents import fields_in
from appliance.gateway.wire.api_error import ApiError


def refuse_mcp(body: bytes) -> None:
    """Raise ApiError (400) for a request with tools of an MCP server: `mcp_servers`, or a tool whose type says so."""
    if b'"mcp' not in body:
        return
    asked = fields_in(body, "tools", "mcp_servers")  # none of a body that the engine will refuse
    tools = found if isinstance(found := asked.get("tools"), list) else []
    kinds = [each.get("type") for each in tools if isinstance(each, dict)]
    if asked.get("mcp_servers") or any(isinstance(kind, str) and kind.startswith("mcp") for kind in kinds):
        detail = (
            "MCP servers are not called from here: connect to them in the client, and send their tools as functions in "
            "`tools`"
        )
        raise ApiError(400, "mcp_not_offered", detail)
