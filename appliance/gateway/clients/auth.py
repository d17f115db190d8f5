"""Checks the API key. The key is compared in constant time, and is never logged, echoed or sent to the engine."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.gateway.wire import api_error

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths answered without a key, since a health check has none."""

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True)
class Keys:
    """The accepted API keys. `values` is positional, since it is the only field; the repr shows how many there are,
    never which."""

    values: frozenset[str] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.values:
            message = "authentication is on, but there is no API key"
            raise ConfigError(message, hint="set one, or turn authentication off with APPLIANCE_AUTH=off")
        if any(not key.strip() for key in self.values):
            message = "an API key is empty"
            raise ConfigError(message, hint="remove the key file: the next start generates a key")

    def __repr__(self) -> str:
        return f"Keys({len(self.values)} hidden)"

    def accept(self, candidates: Iterable[bytes]) -> bool:
        """True if one of the candidates is a key. Every pair is compared to its end, so that the time tells nothing
        about the keys."""
        keys = [key.encode() for key in self.values]
        return sum(hmac.compare_digest(candidate, key) for candidate in candidates for key in keys) > 0


def presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yield the keys that a request presents: OpenAI clients send a bearer token, Anthropic clients `x-api-key`, some
    send both."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield token.strip()


class RequireKey:
    """ASGI middleware that asks for a key on every path except health routes, also on unknown paths."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or self._keys.accept(presented_keys(scope["headers"])):
            await self._app(scope, receive, send)
        else:
            await api_error.invalid_key().send(send, api_error.dialect_of(scope["path"]))
