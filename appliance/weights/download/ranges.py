"""One GET of the rest of a file: redirects, who may see the token, and whether the answer is of the file that is meant.

Redirects are followed here, since a hub sends the bytes of large files from another host with a signed address: that
host must not get the token, and the address expires, so each attempt begins at the hub.
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

from appliance.errors import DownloadError
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.cache.download_set import WantedFile
from appliance.weights.download.retry import PASSING, Transient, parse_retry_after

REDIRECTS = 5
_MOVED = frozenset({301, 302, 303, 307, 308})
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# No limit for the whole: a large file takes hours. Half a minute without a byte is a broken connection.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=30)
_BUFFER_BYTES = 2**20  # of one connection in memory, and what is written at once
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class RangeRefused(Transient):
    """What is there is no beginning of the file that the server has."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`begin`: place in the file of the body's first byte. `total`: the file's size, where the server tells it."""

    begin: int
    total: int | None
    validator: str | None
    content: aiohttp.StreamReader


def tls_context() -> ssl.SSLContext:
    """Certificates of the machine, or of SSL_CERT_FILE; an image has none, and gets those of its lock."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        context.load_verify_locations(certifi.where())
    return context


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Proxies of the environment are used. Bodies come as they are: a size is a size of the file."""
    connector = aiohttp.TCPConnector(ssl=tls_context(), limit=4)
    async with aiohttp.ClientSession(
        connector=connector, timeout=_TIMEOUT, trust_env=True, auto_decompress=False, read_bufsize=_BUFFER_BYTES
    ) as session:
        yield session


@asynccontextmanager
async def open_range(
    session: aiohttp.ClientSession, file: WantedFile, begin: int, hub: HubSettings, end: int | None = None
) -> AsyncIterator[Answer]:
    """The file from `begin` on, or all of it where the server knows no ranges: `Answer.begin` tells.

    Raises Transient for what may pass, and DownloadError for what will not.
    """
    try:
        async with _followed(session, file, _headers(file, begin, end), hub) as reply:
            yield _answer(reply, file)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        if is_untrusted(error):
            raise untrusted(file.path, file.url, error) from error
        raise Transient(_in_words(error, file.url), is_unreached=isinstance(error, _UNREACHED)) from error


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a certificate was refused, which does not pass by itself."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def untrusted(what: str, address: str, error: Exception) -> DownloadError:
    message = f"download failed: {what}: the certificate of {urlsplit(address).hostname} is not trusted: {error}"
    return DownloadError(message, hint="behind an intercepting proxy name its certificates: SSL_CERT_FILE")


def _headers(file: WantedFile, begin: int, end: int | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}
    if begin or end is not None:
        headers["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
    # A weak validator promises the same meaning, not the same bytes, and may not be sent here (RFC 9110, 13.1.5).
    if begin and file.validator and not file.validator.startswith("W/"):
        headers["If-Range"] = file.validator  # a file that changed comes from its beginning
    return headers


@asynccontextmanager
async def _followed(
    session: aiohttp.ClientSession, file: WantedFile, headers: Mapping[str, str], hub: HubSettings
) -> AsyncIterator[aiohttp.ClientResponse]:
    address = file.url
    for _ in range(REDIRECTS + 1):
        own = {**headers, **_authorization(address, hub)}
        async with session.get(_as_sent(address), headers=own, allow_redirects=False) as reply:
            _check_is_same(reply, file)
            if reply.status not in _MOVED:
                _check_status(reply, file, is_hub=origin(address) == origin(hub.endpoint))
                yield reply
                return
            address = _next(address, reply, file)
    message = f"download failed: {file.path}: more than {REDIRECTS} redirects, the last to {_bare(address)}"
    raise DownloadError(message, hint="check the address, and HF_ENDPOINT where it is set")


def _as_sent(address: str) -> URL:
    """A signed address as it is: quoted otherwise, it would be another one."""
    return URL(address, encoded=bool(re.fullmatch(r"[\x21-\x7e]+", address)))


def _authorization(address: str, hub: HubSettings) -> dict[str, str]:
    is_endpoint = origin(address) == origin(hub.endpoint)
    return {"Authorization": f"Bearer {hub.token}"} if hub.token and is_endpoint else {}


def origin(address: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what a token is for."""
    parts = urlsplit(address)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def _next(address: str, reply: aiohttp.ClientResponse, file: WantedFile) -> str:
    location = urljoin(address, reply.headers.get("Location", ""))
    scheme = urlsplit(location).scheme
    # Of what comes over plain HTTP nobody knows who sent it, and not every file is listed with its hash.
    is_downgrade = urlsplit(address).scheme == "https" and scheme != "https"
    if scheme not in ("http", "https") or is_downgrade or location == address:
        message = f"download failed: {file.path}: {_bare(address)} redirects to {_bare(location) or 'nowhere'}"
        raise DownloadError(message, hint="check the address, and HF_ENDPOINT where it is set")
    return location


def _bare(address: str) -> str:
    """Without the query, which in a signed address is a secret for its lifetime."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else parts.path


def _check_is_same(reply: aiohttp.ClientResponse, file: WantedFile) -> None:
    """The hub tells size and hash of what it is about to send: they must be those of the listing."""
    size, etag = reply.headers.get("X-Linked-Size", ""), reply.headers.get("X-Linked-Etag", "").strip('"')
    is_other = bool(re.fullmatch(r"[0-9a-f]{64}", etag)) and file.sha256 is not None and etag != file.sha256
    if size.isdigit() and file.bytes is not None and int(size) != file.bytes:
        raise _changed(file, f"{file.bytes:,} bytes", f"{int(size):,} bytes")
    if is_other:
        raise _changed(file, f"sha256 {file.sha256}", f"sha256 {etag}")


def _changed(file: WantedFile, expected: str, got: str) -> DownloadError:
    message = f"file is not the one that was listed: {file.path}: expected {expected}, got {got}"
    return DownloadError(message, hint="it changed meanwhile: run the same again, which asks for the new one")


def _check_status(reply: aiohttp.ClientResponse, file: WantedFile, *, is_hub: bool) -> None:
    status, host = reply.status, reply.url.host
    if status in (200, 206):
        return
    # A refusal of the other host is of its signed address, which expires: the hub gives a new one.
    if status in PASSING or (status in (401, 403) and not is_hub and file.url != str(reply.url)):
        wait = parse_retry_after(reply.headers.get("Retry-After"), time.time())
        words = f"{host} answers {status}"
        raise Transient(words, wait)
    if status == 416:
        words = f"{host} has no such range"
        raise RangeRefused(words)
    message = f"download failed: {file.path}: {host} answers {status}"
    is_gated = reply.headers.get("X-Error-Code") == "GatedRepo"  # 401 without a token, 403 with one
    raise DownloadError(message, hint=refusal_hint(403 if is_gated else status, _repo_of(file.url)))


def refusal_hint(status: int, page: str) -> str:
    if status == 401:
        return f"the token is not accepted, or {page} is private: set HF_TOKEN to one that may read it"
    if status == 403:
        return f"it is gated: accept its terms at {page}, then set HF_TOKEN to a token of that account"
    if status == 404:
        return "it is not there any more: run the same again, or name another file"
    return "try again later, or look at the address in a browser"


def _repo_of(url: str) -> str:
    return _bare(url).partition("/resolve/")[0]


def _answer(reply: aiohttp.ClientResponse, file: WantedFile) -> Answer:
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        message = f"download failed: {file.path}: {reply.url.host} packs it as {reply.headers['Content-Encoding']}"
        raise DownloadError(message, hint="a proxy on the way changes what it hands on: go around it")
    length = reply.headers.get("Content-Length", "")
    begin, total = 0, int(length) if length.isdigit() else None
    if reply.status == 206:
        found = _RANGE.fullmatch(reply.headers.get("Content-Range", ""))
        if not found:
            words = f"{reply.url.host} answers a part and does not say which"
            raise Transient(words)
        begin, total = int(found[1]), None if found[2] == "*" else int(found[2])
    if total is not None and file.bytes is not None and total != file.bytes:
        message = f"file has another size than announced: {file.path}: expected {file.bytes:,} bytes, got {total:,}"
        raise DownloadError(message, hint="another file answers at this address; a proxy's page, perhaps: look at it")
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
    """The kernel's words: asyncio puts addresses into its own. A name that is not found has a negative number."""
    is_kernels = error.errno is not None and error.errno > 0
    return (os.strerror(error.errno or 0) if is_kernels else error.strerror or str(error)).lower()
