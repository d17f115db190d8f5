"""The key. It is compared in constant time, and it is never logged, echoed or sent on to the engine."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.gateway.wire import api_error

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Answered without a key: a health check has none."""

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True)
class Keys:
    """Any of `values` opens the door. Positional, since it is one thing; its repr shows how many, never which."""

    values: frozenset[str] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.values:
            message = "authentication is on and there is no API key"
            raise ConfigError(message, hint="set one, or turn authentication off with APPLIANCE_AUTH=off")
        if any(not key.strip() for key in self.values):
            message = "an API key is empty"
            raise ConfigError(message, hint="remove the file of keys, and a key is generated at the next start")

    def __repr__(self) -> str:
        return f"Keys({len(self.values)} hidden)"

    def accept(self, candidates: Iterable[bytes]) -> bool:
        """Every pair is compared to its end, so the time taken says nothing about which key came close."""
        keys = [key.encode() for key in self.values]
        return sum(hmac.compare_digest(candidate, key) for candidate in candidates for key in keys) > 0


def presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """What a request offers: OpenAI clients send a bearer token, Anthropic clients `x-api-key`, some send both."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield token.strip()


class RequireKey:
    """ASGI middleware in front of every path but the health routes, unknown paths included."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or self._keys.accept(presented_keys(scope["headers"])):
            await self._app(scope, receive, send)
        else:
            await api_error.invalid_key().send(send, api_error.dialect_of(scope["path"]))
