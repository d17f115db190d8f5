"""Sessions of the pages: a cookie in place of the key, which a browser cannot send with every request.

The cookie holds the time of its end and a signature with the API key. So it survives a restart, ends when the key is
changed, and nothing is kept here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

LASTS_S = 30 * 24 * 3600
TRIED_MAX = 4  # cookies of our name in one request: a browser sends one, and each costs a signature
_READS = frozenset({"GET", "HEAD"})


class Sessions:
    """Makes and checks the cookies of one API key."""

    def __init__(self, key: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(b"appliance session\0" + key.encode()).digest()
        self._clock = clock
        # Browsers keep cookies by host, not by port: two appliances on one host need two names.
        self._name = f"appliance_{self._signed('name')[:8]}".encode()

    def cookie(self) -> bytes:
        """Return the value of a Set-Cookie header that begins a session."""
        token = f"{int(self._clock()) + LASTS_S}.{secrets.token_hex(8)}"
        return self._set(f"{token}.{self._signed(token)}", LASTS_S)

    def ended(self) -> bytes:
        """Return the value of a Set-Cookie header that ends the session in the browser."""
        return self._set("", 0)

    def admits(self, scope: Scope) -> bool:
        """True if the request comes from a page of ours with a session.

        A session may only read, unless the browser says by Origin that one of our own pages asks: a cookie is sent
        with other sites' requests too, wherever a browser does not know SameSite.
        """
        cookies = [value for name, value in scope["headers"] if name == b"cookie"]
        if not any(self._is_valid(value) for value in islice(self._values(cookies), TRIED_MAX)):
            return False
        return scope["method"] in _READS or is_own_origin(scope)

    def _values(self, cookies: Iterable[bytes]) -> Iterable[bytes]:
        for cookie in cookies:
            for pair in cookie.split(b";"):
                name, _, value = pair.strip().partition(b"=")
                if name == self._name:
                    yield value

    def _is_valid(self, value: bytes) -> bool:
        token, _, signature = value.decode("latin-1").rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signed(token).encode()):
            return False
        return int(token.partition(".")[0]) > self._clock()

    def _signed(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _set(self, value: str, seconds: int) -> bytes:
        return self._name + f"={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict".encode()


def is_own_origin(scope: Scope) -> bool:
    """True if the request has exactly one Origin, and that is the host that it was sent to."""
    origins = [value for name, value in scope["headers"] if name == b"origin"]
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(origins) != 1 or len(hosts) != 1:
        return False
    scheme, separator, host = origins[0].partition(b"://")
    return scheme in (b"http", b"https") and bool(separator) and host.lower() == hosts[0].lower()
