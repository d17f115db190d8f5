"""JSON asked of an engine through its unix socket: what the clients of engines share."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import aiohttp

from appliance.command import Command
from appliance.errors import EngineNotReadyError


class JsonSocket:
    """A context manager. `doing` says in errors what it was for."""

    def __init__(self, command: Command, *, doing: str) -> None:
        connector = aiohttp.UnixConnector(path=str(command.socket_path), limit=0)
        # However long an answer takes: whether the engine works at all is for others to watch.
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._doing = doing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises EngineNotReadyError (43) when the engine refuses, breaks off, or answers with no object."""
        try:
            async with self._session.post(f"http://engine{route}", json=body) as reply:
                data = await reply.json()
                if reply.status != 200:
                    message = f"engine refused {route} while {self._doing}: {reply.status}: {data}"
                    raise EngineNotReadyError(message)
        except (aiohttp.ClientError, ValueError) as error:
            message = f"engine broke off {route} while {self._doing}: {type(error).__name__}: {error}"
            raise EngineNotReadyError(message) from error
        if not isinstance(data, dict):
            message = f"engine answered {route} with no object while {self._doing}: {data!r:.200}"
            raise EngineNotReadyError(message)
        return data
