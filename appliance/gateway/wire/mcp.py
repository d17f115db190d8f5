"""Requests that want the server to call MCP servers, which is refused: docs/api.md says why."""

from __future__ import annotations

import codecs

import msgspec

from appliance.gateway.wire.api_error import ApiError


class _Asked(msgspec.Struct):
    tools: object = None
    mcp_servers: object = None


_ASKED = msgspec.json.Decoder(_Asked)


def refuse_mcp(body: bytes) -> None:
    """Raise ApiError (400) for a request with tools of an MCP server: `mcp_servers`, or a tool whose type says so."""
    if b'"mcp' not in body:
        return
    try:
        asked = _ASKED.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return  # for the engine to refuse
    tools = asked.tools if isinstance(asked.tools, list) else []
    kinds = [each.get("type") for each in tools if isinstance(each, dict)]
    if asked.mcp_servers or any(isinstance(kind, str) and kind.startswith("mcp") for kind in kinds):
        detail = (
            "MCP servers are not called from here: connect to them in the client, and send their tools as functions in "
            "`tools`"
        )
        raise ApiError(400, "mcp_not_offered", detail)
