"""Checks a request against HTTP itself, before its path is looked at, and answers where uvicorn would close without an
explanation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from appliance.engine_route import Dialect
from appliance.gateway.wire.api_error import ApiError, dialect_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Limits that every engine's HTTP server accepts: the strictest takes 100 headers of less than 8,192 bytes and refuses
# more without a body. The gateway adds a few headers of its own.
LINE_BYTES_MAX = 8000
HEADERS_MAX = 90
HEADER_BYTES_MAX = 32 * 2**10  # same as nginx (large_client_header_buffers 4 8k)
_FRAMING = (b"content-length", b"transfer-encoding")
_PLAIN = {b"content-encoding": (b"", b"identity"), b"transfer-encoding": (b"", b"identity", b"chunked")}
_HOST = re.compile(rb"[^\s/?#@\\\"<>^`{|}]*")  # RFC 3986, 3.2.2; the parts are not checked


class CheckHttp:
    """ASGI middleware that refuses requests that break HTTP's rules or our limits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := fault(scope)) is not None:
            await error.send(send, dialect_of(scope["path"]))
        else:
            await self._app(scope, receive, send)


def fault(scope: Scope) -> ApiError | None:
    """Return the error for this request; None if it is valid HTTP within our limits. Pure."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    hosts = [value for name, value in headers if name == b"host"]
    if scope["http_version"] == "1.1" and not hosts:
        return ApiError(400, "missing_host", "a request of HTTP/1.1 needs a Host header")
    if len(hosts) > 1:  # RFC 9112, 3.2: a proxy in front may use the other one
        return ApiError(400, "several_hosts", f"a request needs exactly one Host header; this one has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return ApiError(400, "invalid_host", "the Host header is not a host name or address, with or without a port")
    if len(scope["path"]) + len(scope["query_string"]) > LINE_BYTES_MAX:
        return ApiError(414, "uri_too_long", f"the address is over the limit of {LINE_BYTES_MAX} bytes")
    if _are_too_large(headers):
        detail = (
            f"the headers are over the limit: {LINE_BYTES_MAX} bytes in one, {HEADERS_MAX} headers, "
            f"{HEADER_BYTES_MAX // 2**10} KiB in all"
        )
        return ApiError(431, "header_too_large", detail)
    if encodings := [value for name, value in headers if _compresses(name, value)]:
        detail = f"a compressed body ({encodings[0][:50].decode('latin-1')}) is not supported: send it uncompressed"
        return ApiError(415, "unsupported_encoding", detail, headers=((b"accept-encoding", b"identity"),))
    return None


def _are_too_large(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    sizes = [len(name) + len(value) for name, value in headers]
    return len(sizes) > HEADERS_MAX or sum(sizes) > HEADER_BYTES_MAX or max(sizes, default=0) > LINE_BYTES_MAX


def _compresses(name: bytes, value: bytes) -> bool:
    return name in _PLAIN and value.strip().lower() not in _PLAIN[name]


def as_response(error: ApiError, dialect: Dialect = "openai") -> bytes:
    """Return all bytes of an answer after which the connection is closed."""
    body = error.body(dialect)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-appliance-error", error.code.encode()),
        *error.headers,
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return status + b"".join(name + b": " + value + b"\r\n" for name, value in headers) + b"\r\n" + body


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with three changes: our error for invalid HTTP, no chunks for clients of HTTP/1.0 (RFC 9112,
    6.1), and support for bodies of requests that offer another protocol, as Java's client does for HTTP/2 (RFC 9110,
    7.8)."""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._fed(data)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _fed(self, data: bytes) -> bytes:
        """Feed the parser and return the bytes that are left. After an offer of another protocol the parser takes the
        rest for that protocol; a new parser then continues after that header."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            framing = [b"%s: %s\r\n" % each for each in self.headers if each[0] in _FRAMING]
            callbacks = _AfterHeader(self)
            self.parser = httptools.HttpRequestParser(callbacks)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
            callbacks.is_past = True
            return data[offer.args[0] :]
        return b""

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # otherwise its body is still to come
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.end_with(ApiError(400, "invalid_http", "the request is not valid HTTP/1.1"))

    def end_with(self, error: ApiError) -> None:
        """Send the error in place of the answer, and close."""
        dialect = dialect_of(getattr(self, "url", b"").decode("latin-1"))  # no URL if not even that was read
        self.transport.write(as_response(error, dialect))
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = cast("ASGI3Application", _UntilClosed(cast("ASGIApp", app), cycle))
        super()._start_asgi_task(cycle, app)


class _AfterHeader:
    """Callbacks for a parser that continues after a header which another parser has read."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol
        self.is_past = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        callback: Callable[..., None] = getattr(self._protocol, name)
        if name in ("on_body", "on_message_complete"):
            return callback
        return lambda *words: callback(*words) if self.is_past else None


class _UntilClosed:
    """An application whose answers of unknown length end when the connection closes."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_framed = True

        async def unframed(message: Message) -> None:
            nonlocal is_framed
            if message["type"] == "http.response.start":
                is_framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not is_framed:
                    self._cycle.chunked_encoding = False  # None would let uvicorn choose, and it would choose chunks
            elif not is_framed:
                # uvicorn counts the body against the announced length, and none was announced
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, unframed)
