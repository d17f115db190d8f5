"""What an engine's answer says of its tokens and times, read from the beginning and the end of its body."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from appliance.gateway.wire.edges import Edges, Member, first_members, last_members, parse_object
from appliance.values import dataclass

# Lines of a stream without any of them are not parsed.
_TOLD = re.compile(rb'"(?:usage|timings)"\s*:\s*\{|"(?:finish_reason|stop_reason)"\s*:\s*"')
_DATA = b"data:"
# The events whose usage is that of the object inside, in Anthropic's API and in OpenAI's responses.
_INNER = {
    "message_start": "message",
    "response.completed": "response",
    "response.incomplete": "response",
    "response.failed": "response",
}
_NAMES = frozenset({"usage", "timings", "choices", "finish_reason", "stop_reason", "incomplete_details"})
_DOCUMENT, _INSIDE, _CHOICE = 1, 2, 3  # depths of the members of a document, of an object inside it, of a choice
_ENDINGS = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_use": "tool_calls",
}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens and seconds of one answer; None where the engine did not tell. `tokens_in` includes `tokens_cached`, which
    includes `tokens_from_disk`."""

    tokens_in: int | None = None
    tokens_cached: int | None = None
    tokens_from_disk: int | None = None
    tokens_out: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ending: str | None = None  # stop, length or tool_calls


def parse_usage(edges: Edges) -> Usage:
    """Return what the answer says so far.

    Reads `usage` in the forms of OpenAI's chat and responses APIs and of Anthropic's, and `timings` as one engine
    adds them, where an engine writes them: in the document itself, or in an event or its inner object. Of several,
    later ones count.
    """
    found: dict[str, Any] = {}
    for document in _events(edges) if edges.is_stream else _documents(edges):
        found |= _of_document(document)
    return Usage(**found)


def _documents(edges: Edges) -> Iterator[Mapping[str, Any]]:
    """Yield what is known of the one document."""
    if not edges.begin:
        yield parse_object(edges.end) or {}
        return
    first = list(first_members(edges.begin, _NAMES))
    # The kept end of an incomplete document may be any part of it.
    last = list(last_members(edges.end, _NAMES)) if edges.is_whole else []
    has_choices = "choices" in _members_at(_DOCUMENT, first)
    for members in (first, last):
        # The array that a choice is in may be cut off, so it is known by its depth.
        yield _members_at(_DOCUMENT, members) | {"choices": [_members_at(_CHOICE, members)] if has_choices else []}


def _events(edges: Edges) -> Iterator[Mapping[str, Any]]:
    """Yield the events with numbers or endings. Texts have no line breaks of their own: each line is the engine's."""
    yield from _told(edges.begin.split(b"\n")[:-1])
    first, *lines = edges.end.split(b"\n")
    if edges.begin and lines and not first.startswith(_DATA):
        # The end of a cut event: the last one of OpenAI's responses repeats the answer and may be longer than is kept.
        members = list(last_members(first, _NAMES))
        yield from (_members_at(depth, members) for depth in (_INSIDE, _DOCUMENT))
    yield from _told((first, *lines))


def _told(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        if line.startswith(_DATA) and _TOLD.search(line):
            event = parse_object(line[len(_DATA) :]) or {}
            inner = event.get(_INNER.get(str(event.get("type")), ""))
            yield inner if isinstance(inner, dict) else event


def _members_at(depth: int, members: Iterable[Member]) -> dict[str, Any]:
    """Return the values of the members at `depth`, of several with one name the first."""
    found: dict[str, Any] = {}
    for member in members:
        if member.depth == depth:
            found.setdefault(member.name, member.value)
    return found


def _of_document(document: Mapping[str, Any]) -> dict[str, Any]:
    usage, timings = _object(document.get("usage")), _object(document.get("timings"))
    return _of_usage(usage) | _of_timings(timings) | _known(ending=_ending(document))


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _ending(document: Mapping[str, Any]) -> str | None:
    choices = document.get("choices")
    told = [_object(choice).get("finish_reason") for choice in choices] if isinstance(choices, list) else []
    told += [document.get("stop_reason"), _object(document.get("delta")).get("stop_reason")]
    if endings := [ending for ending in told if isinstance(ending, str)]:
        return _ENDINGS.get(endings[-1])
    is_cut = _object(document.get("incomplete_details")).get("reason") == "max_output_tokens"
    return "length" if is_cut else None


def _of_timings(fields: Mapping[str, Any]) -> dict[str, Any]:
    read, cached = _count(fields.get("prompt_n")), _count(fields.get("cache_n"))
    return _known(
        tokens_in=None if read is None else read + (cached or 0),
        tokens_cached=cached,
        tokens_from_disk=_count(fields.get("disk_n")),
        tokens_out=_count(fields.get("predicted_n")),
        prefill_s=_seconds(fields.get("prompt_ms")),
        decode_s=_seconds(fields.get("predicted_ms")),
    )


def _of_usage(fields: Mapping[str, Any]) -> dict[str, Any]:
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    read = _first(_count(fields.get("prompt_tokens")), _count(fields.get("input_tokens")))
    if "cache_read_input_tokens" in fields:  # Anthropic counts cached tokens apart
        cached = _count(fields["cache_read_input_tokens"])
        written = _count(fields.get("cache_creation_input_tokens"))
        read = None if read is None else read + (cached or 0) + (written or 0)
    written_out = _first(_count(fields.get("completion_tokens")), _count(fields.get("output_tokens")))
    return _known(tokens_in=read, tokens_cached=cached, tokens_out=written_out)


def _known(**fields: float | str | None) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) / 1000 if is_number and 0 <= value < 1e12 else None  # type: ignore[arg-type,operator]
