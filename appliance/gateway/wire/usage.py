"""What an engine's answer says of its tokens and times, read from the first and last pieces of its body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.values import dataclass

# In the text of an answer quotes are escaped, so these never match there.
_OBJECT = re.compile(rb'"(usage|timings)"\s*:\s*(?=\{)')
_FINISH = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(\w{1,40})"')
_INCOMPLETE = re.compile(rb'"incomplete_details"\s*:\s*\{\s*"reason"\s*:\s*"max_output_tokens"')
_ENDINGS = {
    b"stop": "stop",
    b"end_turn": "stop",
    b"stop_sequence": "stop",
    b"length": "length",
    b"max_tokens": "length",
    b"tool_calls": "tool_calls",
    b"function_call": "tool_calls",
    b"tool_use": "tool_calls",
}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens and seconds of one answer; None where the engine did not tell. `tokens_in` includes `tokens_cached`."""

    tokens_in: int | None = None
    tokens_cached: int | None = None
    tokens_out: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ending: str | None = None  # stop, length or tool_calls


def parse_usage(body: bytes) -> Usage:
    """Return what `body` says, which may lack a middle part.

    Reads `usage` in the forms of OpenAI's chat and responses APIs and of Anthropic's, and `timings` as one engine
    adds them. Of several, later ones count.
    """
    found: dict[str, Any] = {}
    for name, fields in _objects(body):
        found |= _of_timings(fields) if name == b"timings" else _of_usage(fields)
    endings = _FINISH.findall(body)
    ending = _ENDINGS.get(endings[-1]) if endings else None
    if ending is None and _INCOMPLETE.search(body):
        ending = "length"
    return Usage(**found, ending=ending)


def _objects(body: bytes) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    for match in _OBJECT.finditer(body):
        text = body[match.end() : match.end() + 4096].decode(errors="replace")
        try:
            found, _ = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):  # cut off where pieces are missing
            continue
        if isinstance(found, dict):
            yield match[1], found


def _of_timings(fields: Mapping[str, Any]) -> dict[str, Any]:
    read, cached = _count(fields.get("prompt_n")), _count(fields.get("cache_n"))
    return _known(
        tokens_in=None if read is None else read + (cached or 0),
        tokens_cached=cached,
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


def _known(**fields: float | None) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) / 1000 if is_number and 0 <= value < 1e12 else None  # type: ignore[arg-type,operator]
