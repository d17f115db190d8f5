"""JSON requests through an engine's unix socket, the common base of the engines' clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from appliance.command import Command
from appliance.errors import EngineNotReadyError


class JsonSocket:
    """HTTP session, to be used as a context manager. Error messages name the purpose `doing`.

    Without `keeps_connections` each request has its own: an engine may end that of a stream, which the next request
    would find closing.
    """

    def __init__(self, command: Command, *, doing: str, keeps_connections: bool = True) -> None:
        connector = aiohttp.UnixConnector(path=str(command.socket_path), limit=0, force_close=not keeps_connections)
        # No timeout: a slow answer is not an error here, and the supervisor finds an engine that hangs.
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._doing = doing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def exchange(self, route: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Post `body`; return the status and the whole body of the answer, also of a stream and of a refusal. Raises
        EngineNotReadyError (43) if the engine breaks off."""
        try:
            async with self._session.post(f"http://engine{route}", json=body) as reply:
                return reply.status, await reply.read()
        except aiohttp.ClientError as error:
            message = f"engine broke off {route} while {self._doing}: {type(error).__name__}: {error}"
            raise EngineNotReadyError(message) from error

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post `body` and return the answer. Raises EngineNotReadyError (43) if the engine refuses or breaks off, or if
        its answer is not a JSON object."""
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
