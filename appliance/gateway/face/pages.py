"""The dashboard and the chat page: files of this package, and the libraries that the image brings.

They hold nothing about this appliance, so they are served without a key: a page asks for the key itself.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.gateway.clients.auth import ASSETS, Keys
from appliance.gateway.clients.session import Sessions, is_own_origin
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.routes.forward import ClientLeft, declared_length, read_body
from appliance.gateway.routes.models import Endpoint
from appliance.gateway.wire.api_error import ApiError, invalid_key, shutting_down
from appliance.race import first_of
from appliance.values import dataclass

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
PAGES = {"/": "index.html", "/chat/": "chat.html"}
LOGIN, LOGOUT = "/login", "/logout"
LOGIN_BYTES_MAX = 4096
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Scripts and styles only from here, nothing inline, and no page of others around or behind ours.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_OF_PAGES = ((b"content-security-policy", POLICY), (b"referrer-policy", b"no-referrer"))
_OF_FILES = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
)


_COMMENT_LINES = re.compile(rb"^ *(?://|/\*\*| \*).*\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _File:
    kind: bytes
    body: bytes = field(repr=False)
    packed: bytes = field(repr=False)
    tag: bytes


class Files:
    """The files of the pages by their names. Each is read and compressed when it is first asked for."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._read: dict[str, _File] = {}

    def get(self, name: str) -> _File:
        """Return the file. Raises ApiError (404) if there is none of this name in one of the folders."""
        if name not in self._read:
            self._read[name] = _read(self._path_of(name))
        return self._read[name]

    def _path_of(self, name: str) -> Path:
        """Return the path of a file with exactly this name, which is compared with what is there, never joined."""
        for folder in self._folders:
            found = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
            if name in found and found[name].suffix in TYPES:
                return found[name]
        detail = f"not found: {name[:200]}"
        raise ApiError(404, "not_found", detail)


def content_of(path: Path) -> bytes:
    """Return what browsers get of a file: a script of our own without its lines of comments, a tenth of its size."""
    is_own_script = path.parent == STATIC and path.suffix == ".js"
    return _COMMENT_LINES.sub(b"", path.read_bytes()) if is_own_script else path.read_bytes()


def _read(path: Path) -> _File:
    body = content_of(path)
    tag = b'"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
    return _File(kind=TYPES[path.suffix], body=body, packed=gzip.compress(body, 9, mtime=0), tag=tag)


def page_routes(libraries: Path) -> tuple[dict[str, Endpoint], Mapping[str, Endpoint]]:
    """Return the endpoints of pages by path, and that of their files by prefix. `libraries` is the folder of the
    image with files that others wrote."""
    files = Files(STATIC, libraries)
    pages: dict[str, Endpoint] = {path: _page(files, name) for path, name in PAGES.items()}
    return {**pages, "/chat": _moved(b"/chat/")}, {ASSETS: _assets(files)}


def _page(files: Files, name: str) -> Endpoint:
    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        await _send(files.get(name), scope, send)

    return answer


def _assets(files: Files) -> Endpoint:
    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        await _send(files.get(scope["path"].removeprefix(ASSETS)), scope, send)

    return answer


def _moved(target: bytes) -> Endpoint:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"location", target), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 308, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return answer


async def _send(file: _File, scope: Scope, send: Send) -> None:
    asked = {name: value for name, value in scope["headers"] if name in (b"accept-encoding", b"if-none-match")}
    headers = [*_OF_FILES, *(_OF_PAGES if file.kind == TYPES[".html"] else ()), (b"etag", file.tag)]
    if _is_known(file.tag, asked.get(b"if-none-match", b"")):
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    body = file.body
    if _takes_gzip(asked.get(b"accept-encoding", b"")):
        body = file.packed
        headers.append((b"content-encoding", b"gzip"))
    headers += [(b"content-type", file.kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_known(tag: bytes, tags: bytes) -> bool:
    """True if If-None-Match names the tag. A proxy that compresses marks it as weak, which counts as the same here (RFC
    9110, 13.1.2)."""
    return tag in (each.strip().removeprefix(b"W/") for each in tags.split(b","))


def _takes_gzip(accepted: bytes) -> bool:
    """True if Accept-Encoding names gzip with a weight other than 0."""
    codings = (each.partition(b";") for each in accepted.lower().replace(b" ", b"").split(b","))
    return any(coding == b"gzip" and weight.rstrip(b".0") != b"q=" for coding, _, weight in codings)


def login_routes(keys: Keys | None, sessions: Sessions | None, traffic: Traffic) -> dict[str, Endpoint]:
    """Return the endpoints that begin and end a session. Without a key to check, every login succeeds."""

    async def login(scope: Scope, receive: Receive, send: Send) -> None:
        _refuse_foreign(scope)
        try:
            body = await _login_body(scope, receive, traffic)
        except ClientLeft:
            return
        if keys is None or sessions is None:
            await _done(send)
        elif keys.accept([_key_in(body)]):
            await _done(send, (b"set-cookie", sessions.cookie()))
        else:
            raise invalid_key()

    async def logout(scope: Scope, _receive: Receive, send: Send) -> None:
        _refuse_foreign(scope)
        await _done(send, *([(b"set-cookie", sessions.ended())] if sessions else []))

    return {LOGIN: login, LOGOUT: logout}


async def _login_body(scope: Scope, receive: Receive, traffic: Traffic) -> bytes:
    """Return the body of a login. It is not counted as a running request: who has no key must not take the place of one
    who has, or delay a stop."""
    if traffic.is_closed:
        raise shutting_down()
    reading, _ = await first_of(
        read_body(receive, declared_length(scope), most=LOGIN_BYTES_MAX), traffic.until_closed()
    )
    if reading.cancelled():
        raise shutting_down()
    body: bytes = reading.result()
    return body


def _refuse_foreign(scope: Scope) -> None:
    if not is_own_origin(scope):
        raise ApiError(403, "foreign_origin", "a login is taken only from a page of this appliance: no Origin of ours")


def _key_in(body: bytes) -> bytes:
    try:
        key = json.loads(body)["key"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ApiError(400, "invalid_request", 'a login is JSON with the API key: {"key": "…"}') from error
    return key.strip().encode(errors="replace") if isinstance(key, str) else b""


async def _done(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": [*headers, (b"cache-control", b"no-store")]})
    await send({"type": "http.response.body", "body": b""})
