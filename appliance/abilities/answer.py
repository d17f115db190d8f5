"""An answer of the engine's chat route, whole or put together from its events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.values import dataclass

UNREADABLE = "the engine could not read the model's answer, and sent an error"


class BrokenAnswerError(ValueError):
    """An answer that a client could not read. The message is a sentence without any text of the model."""


@dataclass(frozen=True, kw_only=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    finish: str  # finish_reason

    @property
    def is_cut(self) -> bool:
        return self.finish == "length"


def read_answer(body: bytes, *, is_stream: bool) -> Answer:
    """Read the body of an answer with status 200. Raises BrokenAnswerError."""
    try:
        return _joined(_events(body)) if is_stream else _whole(json.loads(body))
    except BrokenAnswerError:
        raise
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        message = f"the answer has not the form of a chat completion ({type(error).__name__})"
        raise BrokenAnswerError(message) from error


def _whole(document: Mapping[str, Any]) -> Answer:
    choice = document["choices"][0]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return Answer(
        text=message.get("content") or "",
        reasoning=_reasoning(message),
        calls=tuple(Call(name=each["name"], arguments=each["arguments"]) for each in calls),
        finish=choice["finish_reason"],
    )


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning, by either of the names that engines give it."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    # By line feeds alone: `splitlines` would also split at separators of Unicode inside of a text.
    lines = body.decode().split("\n")
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    is_whole = events[-1:] == ["[DONE]"]
    for event in events[:-1] if is_whole else events:
        document = json.loads(event)
        if "error" in document:
            raise BrokenAnswerError(UNREADABLE)
        yield document
    if not is_whole:
        message = "the stream ends without [DONE]"
        raise BrokenAnswerError(message)


def read_count(body: bytes) -> int:
    """Return the number in an answer of the route that counts tokens. Raises BrokenAnswerError."""
    try:
        return int(json.loads(body)["input_tokens"])
    except (LookupError, TypeError, ValueError) as error:
        message = "the engine does not tell the tokens of a prompt"
        raise BrokenAnswerError(message) from error


def _joined(events: Iterator[dict[str, Any]]) -> Answer:
    text = reasoning = finish = ""
    calls: dict[int, list[str]] = {}  # name and arguments by index
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            reasoning += _reasoning(delta)
            finish = choice.get("finish_reason") or finish
            for each in delta.get("tool_calls") or ():
                call, function = calls.setdefault(each["index"], ["", ""]), each.get("function") or {}
                call[0] += function.get("name") or ""
                call[1] += function.get("arguments") or ""
    if not finish:
        message = "the stream has no finish_reason"
        raise BrokenAnswerError(message)
    made = tuple(Call(name=name, arguments=arguments) for _, (name, arguments) in sorted(calls.items()))
    return Answer(text=text, reasoning=reasoning, calls=made, finish=finish)
