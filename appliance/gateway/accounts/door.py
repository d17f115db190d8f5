"""Answers requests that come with a named key: which paths it may use, and how much."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from appliance.errors import FatalError
from appliance.gateway.accounts.accounts import Accounts, has_ended
from appliance.gateway.accounts.named_keys import NamedKey
from appliance.gateway.clients.auth import presented_keys
from appliance.gateway.clients.request_log import KEY_NAME, OWNER
from appliance.gateway.wire.api_error import ApiError, invalid_key, keys_unknown, lacking
from appliance.system.lack import is_lack, tell
from appliance.system.saved_prompts import owner_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class NamedDoor:
    """ASGI application in front of another. Raises ApiError for a request that it refuses.

    Every named key may use the paths `work`, which count against its limits, and `free`, which do not; every other path
    is for keys that were made with --admin.
    """

    def __init__(
        self,
        app: ASGIApp,
        accounts: Accounts,
        *,
        work: Collection[str],
        free: Collection[str],
        below: tuple[str, ...],
        for_admins: Collection[str] = (),
    ) -> None:
        """`below` are beginnings of further free paths, `for_admins` those among them that are not."""
        self._app = app
        self._accounts = accounts
        self._work = work
        self._free = free
        self._below = below
        self._for_admins = for_admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key, path = await self._find(scope), scope["path"]
        scope[KEY_NAME], scope[OWNER] = key.name, owner_of(key.sha256)
        if path in self._work:
            with self._accounts.meter(key).admitted(key):
                await self._app(scope, receive, send)
        elif key.is_admin or path in self._free or (path.startswith(self._below) and path not in self._for_admins):
            await self._app(scope, receive, send)
        else:
            words = "may use only the model and the list of models; more needs one made with --admin"
            detail = f"the key '{key.name}' {words}"
            raise ApiError(403, "key_not_allowed", detail)

    async def _find(self, scope: Scope) -> NamedKey:
        try:
            key = await self._accounts.find(presented_keys(scope["headers"]))
        except (OSError, RuntimeError, FatalError) as error:
            if not is_lack(error):
                raise
            tell("reading the named keys", error)
            raise lacking() from error
        if key is None:
            raise invalid_key() if self._accounts.is_known else keys_unknown()
        if has_ended(key):
            raise ApiError(401, "key_ended", f"the key '{key.name}' was valid until {key.until}", headers=_BEARER)
        return key


_BEARER = ((b"www-authenticate", b"Bearer"),)
