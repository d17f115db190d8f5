"""Errors inside a stream of events that an engine sends: its HTTP status was 200 long before, and what follows the
error may look like a proper end."""

from __future__ import annotations

import re
from typing import NamedTuple

# OpenAI's is one without a name; Anthropic's messages and OpenAI's responses name theirs. Never inside a text: there
# the quotation marks are escaped.
_UNNAMED, _NAMED = b'data: {"error":', b"event: error\n"
_BEGINS = re.compile(rb'^(?:data: \{"error":|event: error\r?\n)', re.MULTILINE)
_ENDS = re.compile(rb"\r?\n\r?\n")
EVENT_BYTES = 64 * 2**10  # an error that is longer passes as it is


# What may come before there is any answer: a comment, and the events of OpenAI's responses that only say so.
_PREFACE = re.compile(rb"(?::[^\n]*|event: response\.(?:created|queued|in_progress)\r?\n[^\n]*)\r?\n(?:\r?\n)?")


def has_content(chunk: bytes) -> bool:
    """True unless all of it is said before there is any answer."""
    return not chunk.startswith((b":", b"event: response.")) or bool(_PREFACE.sub(b"", chunk).strip())


class Found(NamedTuple):
    passed: bytes  # what comes before the error, or all of it
    error: bytes | None  # the event, once it is whole


class ErrorWatch:
    """Fed with a stream chunk by chunk. Holds back only what may be the beginning of an error."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> Found:
        if not self._held and b"error" not in chunk and chunk.endswith(b"\n"):
            return Found(chunk, None)
        data, self._held = self._held + chunk, b""
        if (begin := _BEGINS.search(data)) is None:
            kept = _beginning_of_one(data)
            self._held = data[kept:]
            return Found(data[:kept], None)
        if end := _ENDS.search(data, begin.start()):
            return Found(data[: begin.start()], data[begin.start() : end.end()])
        if len(data) - begin.start() > EVENT_BYTES:
            return Found(data, None)
        self._held = data[begin.start() :]
        return Found(data[: begin.start()], None)

    def rest(self) -> bytes:
        """At the end of the stream."""
        return self._held


def is_named(event: bytes) -> bool:
    """Whether it is in a dialect that names its errors, and may pass as it is."""
    return event.startswith(b"event:")


def data_of(event: bytes) -> bytes:
    return event.partition(b"data:")[2].strip()


def _beginning_of_one(data: bytes) -> int:
    """Where the last line may become an error with the next chunk; the end where it cannot."""
    at = data.rfind(b"\n") + 1
    line = data[at:]
    may_be = _UNNAMED.startswith(line) or _NAMED.startswith(line.removesuffix(b"\r"))
    return at if line and may_be else len(data)
