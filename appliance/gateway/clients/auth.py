"""Checks the API key. The key is compared in constant time, and is never logged, echoed or sent to the engine."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.gateway.clients.request_log import OWNER
from appliance.gateway.wire import api_error
from appliance.system.saved_prompts import owner_of

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths answered without a key, since a health check has none."""

PAGE_PATHS = frozenset({"/", "/chat", "/chat/", "/login", "/logout"})
ASSETS = "/assets/"
"""Paths of the pages and of their files, which hold nothing about this appliance."""

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    ForNamedKeys = ASGIApp
    from appliance.gateway.clients.session import Sessions


def is_open(path: str) -> bool:
    """True if the path is answered without a key."""
    return path in OPEN_PATHS or path in PAGE_PATHS or path.startswith(ASSETS)


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

    @property
    def first(self) -> str:
        """One of the keys, always the same: sessions are signed with it."""
        return min(self.values)

    @property
    def owner(self) -> str:
        """Tag of prompts that are kept for these keys; with another first key it is another one."""
        return owner_of(hashlib.sha256(self.first.encode()).hexdigest())

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
    """ASGI middleware that asks for a key on every path except those of `is_open`, also on unknown paths. A page's
    session serves in its place."""

    def __init__(
        self, app: ASGIApp, keys: Keys, sessions: Sessions | None = None, named: ForNamedKeys | None = None
    ) -> None:
        """`named` answers requests whose key is not one of `keys`; it raises ApiError for an unknown one."""
        self._app = app
        self._keys = keys
        self._owner = keys.owner
        self._sessions = sessions
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        if self._is_known(scope):
            scope[OWNER] = self._owner
            await self._app(scope, receive, send)
            return
        try:
            if self._named is None:
                raise api_error.invalid_key()
            await self._named(scope, receive, send)
        except api_error.ApiError as error:  # raised before anything was sent
            await error.send(send, api_error.dialect_of(scope["path"]))

    def _is_known(self, scope: Scope) -> bool:
        if self._keys.accept(presented_keys(scope["headers"])):
            return True
        return self._sessions is not None and self._sessions.admits(scope)
