"""Which headers pass, in both directions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

RawHeaders = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1: these speak of one connection and not of the message.
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
    b"expect",  # answered here
    b"origin",  # the engine reflects it in its CORS headers
    b"referer",
    b"accept-encoding",  # `identity` instead: an error event cannot be put into a compressed stream
}

NOT_FOR_CLIENT = HOP_BY_HOP | {b"server", b"date", b"set-cookie"}

# What `to_client` leaves of an engine's own streams: sent when a stream has to begin before the engine is there.
OF_A_STREAM: RawHeaders = ((b"x-accel-buffering", b"no"), (b"content-type", b"text/event-stream"))


def to_engine(headers: RawHeaders, dropped: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    """The client's headers for the engine, without secrets and without what speaks of the client's connection."""
    dropped |= NOT_FOR_ENGINE | _named_in_connection(headers)
    return [*((name, value) for name, value in headers if name not in dropped), (b"accept-encoding", b"identity")]


def to_client(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client: CORS stays closed; content-length only where the framing is by length."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = NOT_FOR_CLIENT | _named_in_connection(lowered)
    if any(name == b"transfer-encoding" for name, _ in lowered):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in lowered if name not in dropped and not name.startswith(b"access-control-")]


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """`Connection: close, X-Foo` makes X-Foo a header of that connection too. Never content-type: the body needs it."""
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    return frozenset(named) - {b"content-type"}
