"""Finds errors inside an engine's event stream. Its HTTP status was 200 long before, and what follows the error may
look like a proper end."""

from __future__ import annotations

import re
from typing import NamedTuple

# OpenAI's error event has no name; Anthropic's messages and OpenAI's responses name theirs. They never match inside a
# text, whose quotation marks are escaped.
_UNNAMED, _NAMED = b'data: {"error":', b"event: error\n"
_BEGINS = re.compile(rb'^(?:data: \{"error":|event: error\r?\n)', re.MULTILINE)
_ENDS = re.compile(rb"\r?\n\r?\n")
EVENT_BYTES = 64 * 2**10  # a longer error is passed on unchanged


# Events that may precede any content: a comment, and those of OpenAI's responses API that only report the state.
_PREFACE = re.compile(rb"(?::[^\n]*|event: response\.(?:created|queued|in_progress)\r?\n[^\n]*)\r?\n(?:\r?\n)?")


def has_content(chunk: bytes) -> bool:
    """True unless the chunk holds only events that may precede any content."""
    return (
        chunk.startswith(b"data:")
        or not chunk.startswith((b":", b"event: response."))
        or bool(_PREFACE.sub(b"", chunk).strip())
    )


class Found(NamedTuple):
    passed: bytes  # the bytes before the error, or all bytes
    error: bytes | None  # the error event, once it is complete; None before that


class ErrorWatch:
    """Takes a stream chunk by chunk. Holds back only bytes that may be the beginning of an error."""

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

    def passes(self, chunk: bytes) -> bool:
        """True if `feed` would pass the chunk whole and hold nothing back: it has whole events, and none is an error.
        Quick, and changes nothing."""
        if self._held or not chunk.endswith(b"\n\n"):
            return False
        return b"error" not in chunk or not (b'data: {"error":' in chunk or b"event: error" in chunk)

    def rest(self) -> bytes:
        """Return the held bytes at the end of the stream."""
        return self._held


def is_named(event: bytes) -> bool:
    """True if the event is in a dialect that names its errors, so that it may be passed on unchanged."""
    return event.startswith(b"event:")


def data_of(event: bytes) -> bytes:
    return event.partition(b"data:")[2].strip()


def _beginning_of_one(data: bytes) -> int:
    """Return the offset of a last line that may become an error with the next chunk; the length of `data` if it
    cannot."""
    at = data.rfind(b"\n") + 1
    line = data[at:]
    may_be = _UNNAMED.startswith(line) or _NAMED.startswith(line.removesuffix(b"\r"))
    return at if line and may_be else len(data)
