"""Puts a receipt into the `usage` of an engine's answer: of a whole document, or of a stream's last event with usage.

Only answers that were asked for a receipt come here; all others pass byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HEADER = b"x-appliance-receipt"
FIELD = "appliance"
_ENDS = re.compile(rb"\r?\n\r?\n")
# In the text of an answer quotes are escaped, so it never matches there.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_NAME = re.compile(rb"^event: (\S+)\r?\n")
# The events that carry the usage of a whole answer, in Anthropic's API and in OpenAI's responses.
_LAST = frozenset({b"message_delta", b"response.completed", b"response.incomplete"})
_COMMON = ("id", "object", "created", "model", "system_fingerprint")
EVENT_BYTES = 2**20  # the last event of OpenAI's responses repeats the whole answer; a longer one passes unchanged

Receipt = Mapping[str, Any]


def is_asked(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if the request asks for a receipt: `X-Appliance-Receipt: 1`."""
    return any(name == HEADER and value.strip() == b"1" for name, value in headers)


def in_document(body: bytes, receipt: Receipt) -> bytes:
    """Return the whole answer with the receipt; unchanged if it is not a JSON object."""
    document = _parsed(body)
    return body if document is None else _dumped(_with(document, receipt))


class ReceiptEvents:
    """Takes a stream piece by piece. Holds back the last event with usage, until it is known to be the last.

    When `is_at_end` becomes True, `end` has to be called with the receipt; what comes later passes unchanged.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._held = b""  # the last event with usage
        self._before = b""  # the last event of any kind, whose fields an event of our own repeats
        self._last = b""
        self._tail = b""
        self.is_at_end = False
        self._is_over = False

    def feed(self, piece: bytes) -> bytes:
        """Return what may be passed on now."""
        if self._is_over:
            return piece
        data, passed = self._partial + piece, []
        while not self.is_at_end and (end := _ENDS.search(data)):
            event, data = data[: end.end()], data[end.end() :]
            passed.append(self._take(event))
        if self.is_at_end:
            self._tail += data
            data = b""
        elif len(data) > EVENT_BYTES:
            self._is_over = True  # no receipt for it
            passed += [self._held, data]
            data = self._held = b""
        self._partial = data
        return b"".join(passed)

    def passes(self, piece: bytes) -> bool:
        """True if `feed` would pass the piece, which has whole events, and hold nothing back: none is the last one or
        has usage. Quick, and changes nothing; the first piece of a stream has to be fed, for the fields of our own."""
        if self._partial or self._held or self.is_at_end:
            return self._is_over
        return bool(self._before) and b'"usage"' not in piece and b"[DONE]" not in piece

    def end(self, receipt: Receipt, tokens: tuple[int | None, int | None] = (None, None)) -> bytes:
        """Return the end of the stream so far, with the receipt. `tokens` are those of prompt and answer, for a stream
        without usage."""
        self.is_at_end, self._is_over = False, True
        if _data(self._last) != b"[DONE]":
            return self._held + _in_event(self._last, receipt) + self._tail
        ours = _in_event(self._held, receipt) if self._held else _own_event(self._before, receipt, tokens)
        return ours + self._last + self._tail

    def rest(self) -> bytes:
        """Return what is held back at the end of a stream that never came to its last event."""
        return b"" if self._is_over else self._held + self._partial

    def _take(self, event: bytes) -> bytes:
        name = _NAME.match(event)
        if _data(event) == b"[DONE]" or (name is not None and name[1] in _LAST and _USAGE.search(event)):
            self._last, self.is_at_end = event, True
            return b""
        if not event.startswith(b":"):
            self._before = event
        passed, self._held = self._held, b""
        if name is None and _USAGE.search(event):
            self._held = event
            return passed
        return passed + event


def _in_event(event: bytes, receipt: Receipt) -> bytes:
    head, mark, data = event.partition(b"data:")
    document = _parsed(data)
    if document is None:
        return event
    inner = document.get("response")
    if isinstance(inner, dict):
        document["response"] = _with(inner, receipt)
    else:
        document = _with(document, receipt)
    return head + mark + b" " + _dumped(document) + b"\n\n"


def _own_event(before: bytes, receipt: Receipt, tokens: tuple[int | None, int | None]) -> bytes:
    """Return a chunk like OpenAI's last one with usage: without choices, with the fields of the chunk before it."""
    document = _parsed(_data(before)) or {}
    read, made = tokens
    counts = {"prompt_tokens": read, "completion_tokens": made}
    if read is not None and made is not None:
        counts["total_tokens"] = read + made
    usage = {**{name: value for name, value in counts.items() if value is not None}, FIELD: receipt}
    chunk = {**{name: document[name] for name in _COMMON if name in document}, "choices": [], "usage": usage}
    return b"data: " + _dumped(chunk) + b"\n\n"


def _with(document: dict[str, Any], receipt: Receipt) -> dict[str, Any]:
    usage = document.get("usage")
    return {**document, "usage": {**(usage if isinstance(usage, dict) else {}), FIELD: receipt}}


def _data(event: bytes) -> bytes:
    return event.partition(b"data:")[2].strip()


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _dumped(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()  # ASCII: half of a surrogate pair stays an escape
