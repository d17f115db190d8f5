"""One-api and new-api, signed in: what is asked alike, and where the two differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote

from appliance.errors import ConfigError
from appliance.host.provision.api import Answer, Api, RefusedError
from appliance.host.provision.channel import ENABLED
from appliance.values import dataclass

ROOT, DEFAULT_PASSWORD = "root", "123456"  # with which every one-api begins
PAGE = 100


class Admin(Protocol):
    """Each raises RefusedError and NoAnswerError."""

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
        """By a route of its own: newer versions refuse `status` in a PUT, older ones have no such route."""
        try:
            self.api.ask("POST", f"/api/channel/{number}/status", {"status": ENABLED})
        except RefusedError:
            self.api.ask("PUT", "/api/channel/", {"id": number, "status": ENABLED})


def channels_named(admin: Admin, name: str) -> list[Mapping[str, Any]]:
    """A search finds more: names that begin like it, and of some versions keys and addresses too."""
    return _named(admin, "channel", name)


def tokens_named(admin: Admin, name: str, user: int) -> list[Mapping[str, Any]]:
    """Of this user alone: root is shown everybody's by new-api."""
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
            break  # one-api knows no pages of a search and gives all of it each time
    return found


def update(admin: Admin, number: int, fields: Mapping[str, Any]) -> None:
    """What is left out stays as it is."""
    admin.api.ask("PUT", "/api/channel/", {"id": number, **fields})


def create_token(admin: Admin, name: str) -> None:
    """Without a limit and without an end."""
    fields = {"name": name, "expired_time": -1, "remain_quota": 0, "unlimited_quota": True}
    admin.api.ask("POST", "/api/token/", fields)


def token_key(admin: Admin, token: Mapping[str, Any]) -> str:
    """As clients send it. Newer forks mask it in lists and give it on its own."""
    key = str(token.get("key") or "")
    if not key or "*" in key:
        key = str((admin.api.ask("POST", f"/api/token/{token['id']}/key").data or {}).get("key") or "")
    if not key:
        message = f"token {token['id']} is shown without its key"
        raise RefusedError(message)
    return f"sk-{key.removeprefix('sk-')}"


def user_of(admin: Admin) -> int:
    data = admin.api.ask("GET", "/api/user/self").data
    return int(data["id"])


@dataclass(frozen=True, kw_only=True)
class SignedIn:
    admin: Admin
    set_up: tuple[str, ...] = ()  # what was done for the first time, in words


def sign_in(api: Api, *, access_token: str | None, root_password: str | None) -> SignedIn:
    """The way that there is. ConfigError where none opens; NoAnswerError where it has gone."""
    if _is_new_api(api):
        return _sign_in_to_new_api(api, access_token, root_password)
    return _sign_in_to_one_api(api, access_token, root_password)


def _is_new_api(api: Api) -> bool:
    """Only it has a set-up of its own: one-api begins with a root user."""
    try:
        return isinstance(api.ask("GET", "/api/setup").data, dict)
    except RefusedError:
        return False


def _sign_in_to_one_api(api: Api, access_token: str | None, root_password: str | None) -> SignedIn:
    opened = api.with_headers(Authorization=access_token) if access_token else None
    refused = "none was given" if opened is None else _refusal(opened)
    if opened is None or refused:
        if not root_password:
            hint = "an access token counts only for a database that is new: also give --root-password-file"
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
    """Once, while root still has the password that everybody knows; a password of the user's is never replaced."""
    try:
        _login(api, DEFAULT_PASSWORD)
    except RefusedError:
        return ()
    admin.api.ask("PUT", "/api/user/self", {"username": ROOT, "password": root_password, "display_name": "Root User"})
    return ("root has the password of its file", *_close(admin))


def _close(admin: Admin) -> tuple[str, ...]:
    """What a machine of one's own does not want: strangers who register."""
    admin.api.ask("PUT", "/api/option/", {"key": "RegisterEnabled", "value": "false"})
    return ("nobody can register",)


def _sign_in_to_new_api(api: Api, access_token: str | None, root_password: str | None) -> SignedIn:
    if access_token:
        opened = api.with_headers(Authorization=f"Bearer {access_token}", New_Api_User="1")
        if refused := _refusal(opened):
            message = f"new-api refuses the access token: {refused}"
            raise ConfigError(message, hint="make one in its console, or give --root-password-file alone")
        return SignedIn(admin=NewApi(api=opened))
    if not root_password:
        message = "new-api wants root's password, and none was given"
        raise ConfigError(message, hint="--root-password-file FILE; for a new database it becomes root's password")
    is_new = not api.ask("GET", "/api/setup").data.get("status")
    if is_new:
        given = {"username": ROOT, "password": root_password, "confirmPassword": root_password}
        # Its own words for one without prices: with prices it refuses every model that has none.
        api.ask("POST", "/api/setup", {**given, "SelfUseModeEnabled": True, "DemoSiteEnabled": False})
    admin = NewApi(api=_logged_in(api, root_password))
    return SignedIn(admin=admin, set_up=("root has the password of its file", *_close(admin)) if is_new else ())


def _logged_in(api: Api, password: str) -> Api:
    """With a cookie, or in newer forks with a bearer token. Root's access token is not asked for: that would replace
    the one that somebody else may hold."""
    try:
        answer = _login(api, password)
    except RefusedError as error:
        message = f"root's password is refused: {error}"
        hint = "it was set up with another one: put that into the file of --root-password-file"
        raise ConfigError(message, hint=hint) from error
    data = answer.data if isinstance(answer.data, dict) else {}
    if data.get("require_2fa"):
        message = "root's login asks for a second factor, which a program has not"
        raise ConfigError(message, hint="make an access token in its console, and give --access-token-file")
    user = data.get("user") or data
    number = str(user.get("id") or 1)
    if token := data.get("access_token"):
        return api.with_headers(Authorization=f"Bearer {token}", New_Api_User=number)
    cookies = "; ".join(f"{name}={value}" for name, value in answer.cookies.items())
    return api.with_headers(Cookie=cookies, New_Api_User=number)


def _login(api: Api, password: str) -> Answer:
    return api.ask("POST", "/api/user/login", {"username": ROOT, "password": password})
