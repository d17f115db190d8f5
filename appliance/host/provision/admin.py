"""The management of one-api and new-api after signing in: what they share and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from appliance.errors import ConfigError
from appliance.host.provision.api import Answer, Api, RefusedError
from appliance.host.provision.channel import ENABLED
from appliance.values import dataclass

ROOT, DEFAULT_PASSWORD = "root", "123456"  # root's password in every new one-api
PAGE = 100


class Admin(Protocol):
    """Management of one server. Each method raises RefusedError and NoAnswerError."""

    @property
    def kind(self) -> str: ...
    @property
    def api(self) -> Api: ...
    def create(self, fields: Mapping[str, Any]) -> None: ...
    def enable(self, number: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class OneApi:
    api: Api
    kind: str = "one-api"

    def create(self, fields: Mapping[str, Any]) -> None:
        self.api.ask("POST", "/api/channel/", dict(fields))

    def enable(self, number: int) -> None:
        self.api.ask("PUT", "/api/channel/", {"id": number, "status": ENABLED})


@dataclass(frozen=True, kw_only=True)
class NewApi:
    api: Api
    kind: str = "new-api"

    def create(self, fields: Mapping[str, Any]) -> None:
        self.api.ask("POST", "/api/channel/", {"mode": "single", "channel": dict(fields)})

    def enable(self, number: int) -> None:
        """Enable a channel by a route of its own: newer versions refuse `status` in a PUT, older ones lack that
        route."""
        try:
            self.api.ask("POST", f"/api/channel/{number}/status", {"status": ENABLED})
        except RefusedError:
            self.api.ask("PUT", "/api/channel/", {"id": number, "status": ENABLED})


def channels_named(admin: Admin, name: str) -> list[Mapping[str, Any]]:
    """Return the channels of exactly that name. The server's search also finds names that begin like it, and in some
    versions keys and addresses."""
    return _named(admin, "channel", name)


def tokens_named(admin: Admin, name: str, user: int) -> list[Mapping[str, Any]]:
    """Return this user's tokens of that name: new-api shows root the tokens of all users."""
    return [row for row in _named(admin, "token", name) if row.get("user_id", user) == user]


def _named(admin: Admin, what: str, name: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for page in range(1, 1000):
        path = f"/api/{what}/search?keyword={quote(name, safe='')}&p={page}&page_size={PAGE}"
        data = admin.api.ask("GET", path).data
        rows = data.get("items") if isinstance(data, dict) else data
        rows = [row for row in rows or [] if isinstance(row, dict)]
        found += [row for row in rows if row.get("name") == name]
        if not isinstance(data, dict) or page * PAGE >= int(data.get("total") or 0):
            break  # one-api has no pages in searches and returns everything each time
    return found


def update(admin: Admin, number: int, fields: Mapping[str, Any]) -> None:
    """Change these fields of a channel; the others stay."""
    admin.api.ask("PUT", "/api/channel/", {"id": number, **fields})


def create_token(admin: Admin, name: str) -> None:
    """Create a token without a limit and without an expiry."""
    fields = {"name": name, "expired_time": -1, "remain_quota": 0, "unlimited_quota": True}
    admin.api.ask("POST", "/api/token/", fields)


def token_key(admin: Admin, token: Mapping[str, Any]) -> str:
    """Return the key as clients send it. Newer forks mask it in lists and return it by a route of its own."""
    key = str(token.get("key") or "")
    if not key or "*" in key:
        key = str((admin.api.ask("POST", f"/api/token/{token['id']}/key").data or {}).get("key") or "")
    if not key:
        message = f"the server does not show the key of token {token['id']}"
        raise RefusedError(message)
    return f"sk-{key.removeprefix('sk-')}"


def user_of(admin: Admin) -> int:
    data = admin.api.ask("GET", "/api/user/self").data
    return int(data["id"])


@dataclass(frozen=True, kw_only=True)
class SignedIn:
    admin: Admin
    set_up: tuple[str, ...] = ()  # what was set up for the first time, in words


def sign_in(api: Api, *, access_token: str | None, root_password: str | None) -> SignedIn:
    """Sign in by whatever was given. Raises ConfigError if it is refused, NoAnswerError if the server is gone."""
    if _is_new_api(api):
        return _sign_in_to_new_api(api, access_token, root_password)
    return _sign_in_to_one_api(api, access_token, root_password)


def _is_new_api(api: Api) -> bool:
    """True for new-api: only new-api has a set-up route; one-api begins with a root user."""
    try:
        return isinstance(api.ask("GET", "/api/setup").data, dict)
    except RefusedError:
        return False


def _sign_in_to_one_api(api: Api, access_token: str | None, root_password: str | None) -> SignedIn:
    opened = api.with_headers(Authorization=access_token) if access_token else None
    refused = "none was given" if opened is None else _refusal(opened)
    if opened is None or refused:
        if not root_password:
            hint = "an access token works only with a new database: also give --root-password-file"
            message = f"one-api refuses the access token: {refused}"
            raise ConfigError(message, hint=hint)
        opened = _logged_in(api, root_password)
    admin = OneApi(api=opened)
    return SignedIn(admin=admin, set_up=_set_up_one_api(api, admin, root_password) if root_password else ())


def _refusal(api: Api) -> str:
    try:
        api.ask("GET", "/api/user/self")
    except RefusedError as error:
        return str(error)
    return ""


def _set_up_one_api(api: Api, admin: Admin, root_password: str) -> tuple[str, ...]:
    """Set root's password once, while it is still the default one that everybody knows. A user's own password is never
    replaced."""
    try:
        _login(api, DEFAULT_PASSWORD)
    except RefusedError:
        return ()
    admin.api.ask("PUT", "/api/user/self", {"username": ROOT, "password": root_password, "display_name": "Root User"})
    return ("root's password is now that of the file", *_close(admin))


def _close(admin: Admin) -> tuple[str, ...]:
    """Turn off registration: strangers must not get accounts on a private server."""
    admin.api.ask("PUT", "/api/option/", {"key": "RegisterEnabled", "value": "false"})
    return ("registration is turned off",)


def _sign_in_to_new_api(api: Api, access_token: str | None, root_password: str | None) -> SignedIn:
    if access_token:
        opened = api.with_headers(Authorization=f"Bearer {access_token}", New_Api_User="1")
        if refused := _refusal(opened):
            message = f"new-api refuses the access token: {refused}"
            raise ConfigError(message, hint="make one in its console, or give --root-password-file alone")
        return SignedIn(admin=NewApi(api=opened))
    if not root_password:
        message = "new-api needs root's password, but none was given"
        raise ConfigError(message, hint="--root-password-file FILE; for a new database it becomes root's password")
    is_new = not api.ask("GET", "/api/setup").data.get("status")
    if is_new:
        given = {"username": ROOT, "password": root_password, "confirmPassword": root_password}
        # "Self use" is new-api's mode without prices: with prices it refuses every model that has none.
        api.ask("POST", "/api/setup", {**given, "SelfUseModeEnabled": True, "DemoSiteEnabled": False})
    admin = NewApi(api=_logged_in(api, root_password))
    return SignedIn(admin=admin, set_up=("root's password is now that of the file", *_close(admin)) if is_new else ())


def _logged_in(api: Api, password: str) -> Api:
    """Return the API signed in by a cookie, or by a bearer token in newer forks. Root's access token is not requested,
    because that would replace a token that someone may already use."""
    try:
        answer = _login(api, password)
    except RefusedError as error:
        message = f"root's password was refused: {error}"
        hint = "the server has another password: put that one into the file of --root-password-file"
        raise ConfigError(message, hint=hint) from error
    data = answer.data if isinstance(answer.data, dict) else {}
    if data.get("require_2fa"):
        message = "root's login requires a second factor, which a program cannot give"
        raise ConfigError(message, hint="make an access token in its console, and give --access-token-file")
    user = data.get("user") or data
    number = str(user.get("id") or 1)
    if token := data.get("access_token"):
        return api.with_headers(Authorization=f"Bearer {token}", New_Api_User=number)
    cookies = "; ".join(f"{name}={value}" for name, value in answer.cookies.items())
    return api.with_headers(Cookie=cookies, New_Api_User=number)


def _login(api: Api, password: str) -> Answer:
    return api.ask("POST", "/api/user/login", {"username": ROOT, "password": password})
