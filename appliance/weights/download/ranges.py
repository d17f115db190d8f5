"""One GET of the rest of a file: redirects, who receives the token, and whether the answer belongs to the wanted
file.

Redirects are followed here, because a hub sends large files from another host with a signed address. That host must
not receive the token. The address expires, so each attempt begins at the hub.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import aiohttp
import certifi
from yarl import URL

from appliance.errors import DownloadError, FatalError
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.cache.download_set import WantedFile
from appliance.weights.download.login import LOGIN_HINT, log_in, origin
from appliance.weights.download.retry import PASSING, Transient, parse_retry_after

REDIRECTS = 5
_MOVED = frozenset({301, 302, 303, 307, 308})
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# No total limit: a large file takes hours. Half a minute without a byte is a broken connection.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=30)
_BUFFER_BYTES = 2**20  # per connection in memory, and per write
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class RefusedError(DownloadError):
    """A refusal by the server, with its HTTP status."""

    def __init__(self, message: str, *, hint: str, status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class RangeRefused(Transient):
    """The partial file is not a beginning of the server's file."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of the server. `begin` is the file offset of the body's first byte. `total` is the file's size, None if
    not sent."""

    begin: int
    total: int | None
    validator: str | None
    content: aiohttp.StreamReader


def tls_context() -> ssl.SSLContext:
    """TLS context with the machine's certificates or SSL_CERT_FILE. An image has none and uses its locked certifi."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        context.load_verify_locations(certifi.where())
    return context


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session. It uses the environment's proxies and no compression, so that byte counts are file sizes."""
    connector = aiohttp.TCPConnector(ssl=tls_context(), limit=4)
    async with aiohttp.ClientSession(
        connector=connector, timeout=_TIMEOUT, trust_env=True, auto_decompress=False, read_bufsize=_BUFFER_BYTES
    ) as session:
        yield session


@asynccontextmanager
async def open_range(
    session: aiohttp.ClientSession, file: WantedFile, begin: int, hub: HubSettings, end: int | None = None
) -> AsyncIterator[Answer]:
    """Request the file from `begin` on. `Answer.begin` is 0 if the server does not support ranges.

    Raises Transient for temporary errors, DownloadError for others.
    """
    async with open_reply(session, file, _headers(file, begin, end), hub) as reply:
        yield _answer(reply, file)


@asynccontextmanager
async def open_reply(
    session: aiohttp.ClientSession, file: WantedFile, headers: Mapping[str, str], hub: HubSettings
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Request a file, after redirects and logins. Raises Transient for temporary errors, RefusedError for others."""
    try:
        async with _followed(session, file, headers, hub) as reply:
            yield reply
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise broken(error, file.path, file.url) from error


def broken(error: Exception, what: str, address: str) -> FatalError | Transient:
    """Return the error for a request without an answer."""
    if is_untrusted(error):
        return untrusted(what, address, error)
    return Transient(_in_words(error, address), is_unreached=isinstance(error, _UNREACHED))


def is_untrusted(error: BaseException | None) -> bool:
    """True if a certificate was refused, which a retry does not change."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def untrusted(what: str, address: str, error: Exception) -> DownloadError:
    message = f"download failed: {what}: the certificate of {urlsplit(address).hostname} is not trusted: {error}"
    return DownloadError(message, hint="behind an intercepting proxy, set SSL_CERT_FILE to its certificates")


def _headers(file: WantedFile, begin: int, end: int | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}
    if begin or end is not None:
        headers["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
    # A weak validator does not promise the same bytes and must not be sent here (RFC 9110, 13.1.5).
    if begin and file.validator and not file.validator.startswith("W/"):
        headers["If-Range"] = file.validator  # a changed file is sent from its beginning
    return headers


@asynccontextmanager
async def _followed(
    session: aiohttp.ClientSession, file: WantedFile, headers: Mapping[str, str], hub: HubSettings
) -> AsyncIterator[aiohttp.ClientResponse]:
    address, login = file.url, None
    for _ in range(REDIRECTS + 2):  # a login takes one more
        own = {**headers, **_authorization(address, file, hub, login)}
        async with session.get(as_sent(address), headers=own, allow_redirects=False) as reply:
            _check_is_same(reply, file)
            if reply.status == 401 and file.registry and login is None and address == file.url:
                # At each attempt anew: tokens expire within minutes, in the middle of a large file.
                login = await log_in(session, reply, file.registry, hub)
                if login:
                    continue
            if reply.status not in _MOVED:
                _check_status(reply, file, is_hub=origin(address) == origin(hub.endpoint))
                yield reply
                return
            address = _next(address, reply, file)
    message = f"download failed: {file.path}: more than {REDIRECTS} redirects, the last to {_bare(address)}"
    raise DownloadError(message, hint="check the address, and HF_ENDPOINT if it is set")


def as_sent(address: str) -> URL:
    """Keep a signed address unchanged: other quoting would break its signature."""
    return URL(address, encoded=bool(re.fullmatch(r"[\x21-\x7e]+", address)))


def _authorization(address: str, file: WantedFile, hub: HubSettings, login: str | None) -> dict[str, str]:
    """Return the header for the host that it is meant for, and for no other."""
    if file.registry:
        return {"Authorization": login} if login and origin(address) == origin(file.url) else {}
    is_endpoint = origin(address) == origin(hub.endpoint)
    return {"Authorization": f"Bearer {hub.token}"} if hub.token and is_endpoint else {}


def _next(address: str, reply: aiohttp.ClientResponse, file: WantedFile) -> str:
    location = urljoin(address, reply.headers.get("Location", ""))
    scheme = urlsplit(location).scheme
    # Content over plain HTTP has no proven sender, and not every file is listed with its hash.
    is_downgrade = urlsplit(address).scheme == "https" and scheme != "https"
    if scheme not in ("http", "https") or is_downgrade or location == address:
        message = f"download failed: {file.path}: {_bare(address)} redirects to {_bare(location) or 'nowhere'}"
        raise DownloadError(message, hint="check the address, and HF_ENDPOINT if it is set")
    return location


def _bare(address: str) -> str:
    """Remove the query: in a signed address it is a secret while it is valid."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else parts.path


def _check_is_same(reply: aiohttp.ClientResponse, file: WantedFile) -> None:
    """Check size and hash that the hub announces against the listing. Raises DownloadError if they differ."""
    size, etag = reply.headers.get("X-Linked-Size", ""), reply.headers.get("X-Linked-Etag", "").strip('"')
    is_other = bool(re.fullmatch(r"[0-9a-f]{64}", etag)) and file.sha256 is not None and etag != file.sha256
    if size.isdigit() and file.bytes is not None and int(size) != file.bytes:
        raise _changed(file, f"{file.bytes:,} bytes", f"{int(size):,} bytes")
    if is_other:
        raise _changed(file, f"sha256 {file.sha256}", f"sha256 {etag}")


def _changed(file: WantedFile, expected: str, got: str) -> DownloadError:
    message = f"file is not the one that was listed: {file.path}: expected {expected}, got {got}"
    return DownloadError(message, hint="it changed meanwhile: repeat the command to get the new one")


def _check_status(reply: aiohttp.ClientResponse, file: WantedFile, *, is_hub: bool) -> None:
    status, host = reply.status, reply.url.host
    if status in (200, 206):
        return
    # The other host refuses a signed address when it has expired: the hub issues a new one.
    if status in PASSING or (status in (401, 403) and not is_hub and file.url != str(reply.url)):
        wait = parse_retry_after(reply.headers.get("Retry-After"), time.time())
        words = f"{host} answers {status}"
        raise Transient(words, wait)
    if status == 416:
        words = f"{host} has no such range"
        raise RangeRefused(words)
    message = f"download failed: {file.path}: {host} answers {status}"
    if file.registry:
        raise RefusedError(message, hint=LOGIN_HINT if status in (401, 403) else registry_hint(status), status=status)
    is_gated = reply.headers.get("X-Error-Code") == "GatedRepo"  # 401 without a token, 403 with one
    hint = refusal_hint(403 if is_gated else status, _repo_of(file.url))
    raise RefusedError(message, hint=hint, status=status)


def registry_hint(status: int) -> str:
    if status == 404:
        return "the registry no longer has it: repeat the command, or push the model again"
    return "try again later, and look into the registry's log"


def refusal_hint(status: int, page: str) -> str:
    if status == 401:
        return f"the token is not accepted, or {page} is private: set HF_TOKEN to one that may read it"
    if status == 403:
        return f"it is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account"
    if status == 404:
        return "the file was removed: repeat the command, or name another file"
    return "try again later, or open the address in a browser"


def _repo_of(url: str) -> str:
    return _bare(url).partition("/resolve/")[0]


def _answer(reply: aiohttp.ClientResponse, file: WantedFile) -> Answer:
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        message = f"download failed: {file.path}: {reply.url.host} encodes it as {reply.headers['Content-Encoding']}"
        raise DownloadError(message, hint="a proxy on the way changes the content: bypass it")
    length = reply.headers.get("Content-Length", "")
    begin, total = 0, int(length) if length.isdigit() else None
    if reply.status == 206:
        found = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
        if not found:
            words = f"{reply.url.host} sent a part without Content-Range"
            raise Transient(words)
        begin, total = int(found[1]), None if found[2] == "*" else int(found[2])
    if total is not None and file.bytes is not None and total != file.bytes:
        message = f"file has another size than announced: {file.path}: expected {file.bytes:,} bytes, got {total:,}"
        raise DownloadError(message, hint="the address returns another file, perhaps a proxy's page: open it")
    validator = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
    return Answer(begin=begin, total=total, validator=validator, content=reply.content)


def _in_words(error: Exception, url: str) -> str:
    host = urlsplit(url).hostname
    if isinstance(error, TimeoutError):
        return f"{host} is silent"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"{host} cannot be reached: {_cause(error.os_error)}"
    return f"the connection to {host} broke"


def _cause(error: OSError) -> str:
    """Return the kernel's error text: asyncio adds addresses to its own. Name resolution errors have negative
    numbers."""
    is_kernels = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno or 0) if is_kernels else error.strerror or str(error)).lower()
