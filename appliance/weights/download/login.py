"""Answers a container registry that asks for a login: a token, anonymous or for an account of the Docker config.

Source: distribution/distribution, docs/content/spec/auth/token.md (challenge, realm, service, scope, `token` or
`access_token`); docker/cli, cli/config/types/authconfig.go (`auth` is base64 of user:password).
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from appliance.documents import load
from appliance.errors import ConfigError, DownloadError
from appliance.reference import DOCKER_HUB, is_loopback
from appliance.settings import HubSettings
from appliance.system.disk import read_file
from appliance.weights.download.retry import PASSING, Transient, parse_retry_after

LOGIN_HINT = (
    "it is private, or does not exist: mount a folder with the config.json that `docker login` wrote and name it with "
    "DOCKER_CONFIG, or set DOCKER_AUTH_CONFIG to its text; passwords in a credential helper of the host are not read"
)
# Hosts whose tokens come from another one. An account of the Docker config goes to no other foreign host.
_REALMS = {"docker.io": "auth.docker.io", "registry.gitlab.com": "gitlab.com"}
_CONFIG_BYTES = 2**20
_TOKEN_BYTES = 2**16
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"]*)"')
_PRINTED = re.compile(r"[\x21-\x7e]+")  # what a header can carry


async def log_in(
    session: aiohttp.ClientSession, reply: aiohttp.ClientResponse, registry: str, hub: HubSettings
) -> str | None:
    """Return the value of `Authorization` for the host that sent this reply of status 401; None if nothing is known.

    Raises Transient or DownloadError if the token's server refuses, ConfigError for an unreadable Docker config.
    """
    account = _account(registry, hub)
    for challenge in reply.headers.getall("WWW-Authenticate", []):
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            return account
        if kind.lower() == "bearer":
            if account and account.startswith("Bearer "):
                return account
            return await _token(session, dict(_PARAMETER.findall(rest)), registry, account, hub)
    return None


async def _token(
    session: aiohttp.ClientSession, asked: Mapping[str, str], registry: str, account: str | None, hub: HubSettings
) -> str:
    realm = asked.get("realm", "")
    host = _checked_realm(realm, registry)
    is_own = host == urlsplit(f"//{registry}").hostname or host == _REALMS.get(registry)
    headers = {"Authorization": account} if account and is_own else {}
    query = {name: asked[name] for name in ("service", "scope") if name in asked}
    async with session.get(URL(realm).update_query(query), headers=headers, allow_redirects=False) as reply:
        if reply.status in PASSING:
            words = f"{host} answers {reply.status}"
            raise Transient(words, parse_retry_after(reply.headers.get("Retry-After"), time.time()))
        if reply.status != 200:
            unsent = "" if is_own or not account else f"; the account for {registry} is not sent to this host"
            message = f"no token for {registry}: {host} answers {reply.status}{unsent}"
            raise DownloadError(message, hint=LOGIN_HINT)
        data = await read_limited(reply, _TOKEN_BYTES)
    try:
        document = load(data or b"")
    except ValueError:
        document = {}
    token = document.get("token") or document.get("access_token")
    if not isinstance(token, str) or not _PRINTED.fullmatch(token):
        message = f"no token for {registry}: {host} answers with something else"
        raise DownloadError(message, hint="a proxy on the way may have answered: open the registry in a browser")
    return f"Bearer {token}"


def _checked_realm(realm: str, registry: str) -> str:
    """Return the host of a token's server. Raises DownloadError for an address that is none, or without TLS."""
    try:
        parts = urlsplit(realm)
        host = parts.hostname or ""
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        host = ""
    is_here = is_loopback(urlsplit(f"//{registry}").hostname or "")
    if not host or "@" in parts.netloc or parts.scheme not in (("http", "https") if is_here else ("https",)):
        message = f"no token for {registry}: it names no safe address for tokens: {realm!r:.200}"
        raise DownloadError(message, hint="the registry is set up wrongly: its `realm` has to be an https address")
    return host


async def read_limited(reply: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """Return the body; None if it is longer than `limit` bytes."""
    data = bytearray()
    while chunk := await reply.content.readany():
        data += chunk
        if len(data) > limit:
            return None
    return bytes(data)


def origin(address: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port, to which a token belongs."""
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def _account(registry: str, hub: HubSettings) -> str | None:
    """Return the value of `Authorization` that the first Docker config with this registry has."""
    names = DOCKER_HUB if registry in DOCKER_HUB else {registry}
    for accounts in _configs(hub):
        for address, entry in accounts.items():
            # `docker login` writes https://index.docker.io/v1/ for Docker Hub, and HOST:PORT for others.
            is_meant = address.rpartition("://")[2].partition("/")[0] in names
            if is_meant and isinstance(entry, dict) and (found := _header(entry)):
                return found
    return None


def _header(entry: Mapping[str, Any]) -> str | None:
    token, auth = entry.get("registrytoken"), entry.get("auth")
    if isinstance(token, str) and _PRINTED.fullmatch(token):
        return f"Bearer {token}"
    if isinstance(entry.get("username"), str) and isinstance(entry.get("password"), str):
        auth = base64.b64encode(f"{entry['username']}:{entry['password']}".encode()).decode()
    try:
        is_pair = isinstance(auth, str) and b":" in base64.b64decode(auth, validate=True)
    except (binascii.Error, ValueError):
        is_pair = False
    return f"Basic {auth}" if is_pair else None


def _configs(hub: HubSettings) -> Iterator[dict[str, Any]]:
    """Yield the accounts of each Docker config. Raises ConfigError, without the content, for an unreadable one."""
    if hub.docker_auth:
        yield _accounts(hub.docker_auth.encode(), "variable DOCKER_AUTH_CONFIG")
    for path in hub.docker_configs:
        try:
            yield _accounts(read_file(path, _CONFIG_BYTES), str(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            if str(path).startswith("/root/"):
                continue  # closed to the container's usual user, and named by nobody
            message = f"Docker config cannot be read: {path}: permission denied"
            raise ConfigError(message, hint="mount a copy that the container's user may read") from error
        except OSError as error:
            message = f"Docker config cannot be read: {path}: {(error.strerror or str(error)).lower()}"
            raise ConfigError(message, hint="mount the file that `docker login` wrote") from error


def _accounts(data: bytes, source: str) -> dict[str, Any]:
    try:
        accounts = load(data).get("auths", {})
    except ValueError:
        accounts = None  # what is wrong may be a part of a password
    if not isinstance(accounts, dict):
        message = f"Docker config is not one: {source}: it is no JSON object with auths"
        raise ConfigError(message, hint='as in {"auths": {"registry.example": {"auth": "…"}}}, from `docker login`')
    return accounts
