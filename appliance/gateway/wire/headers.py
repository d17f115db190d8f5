"""Chooses the headers that are passed on, in both directions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these headers describe one connection and not the message.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

NOT_FOR_ENGINE = HOP_BY_HOP | {
    b"authorization",
    b"x-api-key",
    b"cookie",
    b"host",
    b"content-length",  # computed again from the body that was read
    b"expect",  # answered by this gateway
    b"origin",  # the engine repeats it in its CORS headers
    b"referer",
    b"x-appliance-receipt",  # for this gateway
    b"x-cache-owner",  # set by this gateway alone
    b"accept-encoding",  # replaced by `identity`: an error event cannot be inserted into a compressed stream
}

NOT_FOR_CLIENT = HOP_BY_HOP | {b"server", b"date", b"set-cookie"}

# Headers that `to_client` keeps of an engine's stream; sent when a stream must begin before the engine is back.
OF_A_STREAM: RawHeaders = ((b"x-accel-buffering", b"no"), (b"content-type", b"text/event-stream"))


def to_engine(
    headers: RawHeaders, dropped: frozenset[bytes] = frozenset(), *, owner: str | None = None
) -> list[tuple[bytes, bytes]]:
    """Return the client's headers for the engine, without secrets and without headers of the client's connection.

    `owner` is the tag of the request's API key, with which the engine marks prompts that it keeps on disk.
    """
    dropped |= NOT_FOR_ENGINE | _named_in_connection(headers)
    ours = [(b"accept-encoding", b"identity"), *([(b"x-cache-owner", owner.encode())] if owner else [])]
    return [*((name, value) for name, value in headers if name not in dropped), *ours]


def to_client(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the engine's headers for the client. CORS headers are dropped; content-length is kept only if it frames
    the body."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = NOT_FOR_CLIENT | _named_in_connection(lowered)
    if any(name == b"transfer-encoding" for name, _ in lowered):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in lowered if name not in dropped and not name.startswith(b"access-control-")]


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the headers that `Connection` names: `Connection: close, X-Foo` makes X-Foo a header of that connection
    too. Never content-type, which the body needs."""
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return frozenset(named) - {b"content-type"}
