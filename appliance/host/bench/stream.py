"""Turns the bytes of a streamed answer and their times into tokens and times. Pure.

Nothing is parsed while an answer arrives: with many parallel requests that would delay the clock of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.documents import load
from appliance.values import dataclass

_TEXT = ("content", "reasoning_content", "reasoning", "text", "tool_calls")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The data of one read from the socket; `at_s` counts from the request's start."""

    at_s: float
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one request. Times count from just before it was sent; token counts are the server's own
    `usage`."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the server's prompt cache
    completion_tokens: int
    chunk_at_s: tuple[float, ...]  # one entry for each event that carried text, reasoning or a tool call


class BrokenAnswerError(Exception):
    """The stream is not one complete answer; the message says why."""


def read_answer(pieces: Sequence[Piece]) -> Answer:
    """Return the answer. Raises BrokenAnswerError if the stream was cut, reports an error, or has no token counts."""
    usage: Mapping[str, Any] | None = None
    times: list[float] = []
    is_finished = False
    for at_s, event in _events(pieces):
        _raise_if_error(event)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if _has_text(choice):
                times.append(at_s)
            is_finished = is_finished or choice.get("finish_reason") is not None
    if not is_finished:
        message = f"cut after {len(times)} chunks" if times else "cut before the first token"
        raise BrokenAnswerError(message)
    if not times:
        message = "an answer without a token"
        raise BrokenAnswerError(message)
    if usage is None:
        message = "no token counts: the stream has no usage"
        raise BrokenAnswerError(message)
    return _answer(usage, times)


def _answer(usage: Mapping[str, Any], times: Sequence[float]) -> Answer:
    if not isinstance(usage, dict):
        message = f"no token counts: usage is {usage!r:.80}"
        raise BrokenAnswerError(message)
    try:
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage["completion_tokens"]),
            chunk_at_s=tuple(times),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"no token counts: usage lacks them: {', '.join(map(str, usage)) or 'empty'}"
        raise BrokenAnswerError(message) from error


def _events(pieces: Sequence[Piece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each event with the time of the read that completed its line."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece.data).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield piece.at_s, _parse(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        return load(data)
    except ValueError as error:
        message = f"an event is not a JSON object: {data[:80].decode(errors='replace')}"
        raise BrokenAnswerError(message) from error


def _raise_if_error(event: Mapping[str, Any]) -> None:
    error = event.get("error")
    if error:
        words = error.get("message") if isinstance(error, dict) else error
        message = f"the server ended the stream: {words}"[:200]
        raise BrokenAnswerError(message)


def _has_text(choice: Mapping[str, Any]) -> bool:
    """True if the choice carries text. The role alone, which most servers send first, is not a token."""
    delta = choice.get("delta") or {}
    return any(delta.get(name) or choice.get(name) for name in _TEXT)
