"""Answers of the gateway's own /v1 as answers of Ollama's API: whole ones, and streams line by line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from appliance.gateway.wire.edges import Edges
from appliance.gateway.wire.ollama_paths import CHAT, EMBED, EMBEDDINGS
from appliance.gateway.wire.usage import Usage, parse_usage

Document = dict[str, Any]

_EVENT_END = re.compile(rb"\r?\n\r?\n")
TOLD_KEPT = 4  # an engine tells them in its last event, or in the last two
_CUT_SHORT = "the answer ended before its last part"


class AnswerError(Exception):
    """Raised if an answer of the engine has no form in Ollama's API. The text is for the client."""


class Writer:
    """Makes the documents of one answer. `model` is the name that the client sent, `kind` the path that it asked."""

    def __init__(self, kind: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._kind = kind
        self._model = model
        self._clock = clock
        self._began = clock()
        self._first: float | None = None

    def note_content(self) -> None:
        """Note that content has come: times that the engine does not tell are counted from its first."""
        self._first = self._first or self._clock()

    def part(
        self, text: str = "", *, thinking: str = "", calls: list[Document] | None = None, logprobs: object = None
    ) -> Document:
        """Return one line of a stream that is not the last."""
        said: Document = {**({"thinking": thinking} if thinking else {}), **({"tool_calls": calls} if calls else {})}
        if self._kind == CHAT:
            said = {"message": {"role": "assistant", "content": text, **said}}
        else:
            said = {"response": text, **said}
        shown = {"logprobs": logprobs} if logprobs else {}
        return {**self._head(), **said, "done": False, **shown}

    def last(self, part: Document, reason: str, usage: Usage, receipt: object = None) -> Document:
        """Return `part` as the end of an answer, with its tokens and times. `receipt` is added as `appliance`."""
        shown = {"appliance": receipt} if receipt else {}
        return {**part, "done": True, "done_reason": reason, **self._figures(usage), **shown}

    def vectors(self, document: Mapping[str, Any]) -> Document:
        """Return the answer to a request for embeddings."""
        vectors = [each["embedding"] for each in sorted(document["data"], key=lambda each: each.get("index", 0))]
        if self._kind == EMBEDDINGS:
            return {"embedding": vectors[0]}
        count = (document.get("usage") or {}).get("prompt_tokens")
        counted = {} if count is None else {"prompt_eval_count": count}
        return {"model": self._model, "embeddings": vectors, "total_duration": self._elapsed_ns(), **counted}

    def nothing(self, reason: str) -> Document:
        """Return the answer to a request that only loads or unloads the model."""
        if self._kind == EMBED:
            return {"model": self._model, "embeddings": []}
        if self._kind == EMBEDDINGS:
            return {"embedding": []}
        return {**self.part(), "done": True, "done_reason": reason}

    def _head(self) -> Document:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {"model": self._model, "created_at": now}

    def _figures(self, usage: Usage) -> Document:
        """Return tokens and nanoseconds; a figure that the engine did not tell and that was not seen is left out."""
        prefill_s, decode_s = usage.prefill_s, usage.decode_s
        if self._first is not None:
            prefill_s = self._first - self._began if prefill_s is None else prefill_s
            decode_s = self._clock() - self._first if decode_s is None else decode_s
        found = {
            "total_duration": self._elapsed_ns(),
            "prompt_eval_count": usage.tokens_in,
            "prompt_eval_duration": _ns(prefill_s),
            "eval_count": usage.tokens_out,
            "eval_duration": _ns(decode_s),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _elapsed_ns(self) -> int:
        return int((self._clock() - self._began) * 1e9)


class Lines:
    """Takes the events of a stream in pieces of any size, and returns lines. Nothing is held back but an incomplete
    event, and a tool call until its arguments are complete, since Ollama's API has no parts of a call."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pending = b""
        self._told: list[bytes] = []  # the last events that tell tokens and times
        self._receipt: object = None
        self._reason: str | None = None
        self._calls: dict[int, _Call] = {}
        self._sent_calls = 0
        self.has_ended = False
        self.has_failed = False

    def feed(self, piece: bytes) -> bytes:
        *events, self._pending = _EVENT_END.split(self._pending + piece)
        return b"".join(line for event in events for line in self._lines_of(event))

    def end(self) -> bytes:
        """Return the rest at the end of the stream: the last line, or an error if the stream is incomplete."""
        rest = b"".join(self._lines_of(self._pending)) if self._pending.strip() else b""
        self._pending = b""
        if self.has_ended:
            return rest
        return rest + (self._failure(_CUT_SHORT) if self._reason is None else self._last())

    def _lines_of(self, event: bytes) -> Iterator[bytes]:
        if self.has_ended:
            return
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        try:
            if data == b"[DONE]":
                yield self._last() if self._reason is not None else self._failure(_CUT_SHORT)
            elif data:
                yield from self._lines_of_document(data, json.loads(data))
            elif event.startswith(b":"):
                yield line_of(self._writer.part())  # keeps proxies and clients from giving up
        except AnswerError as error:
            yield self._failure(str(error))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            yield self._failure("the engine sent an event that is not understood")

    def _lines_of_document(self, data: bytes, document: Mapping[str, Any]) -> Iterator[bytes]:
        if "error" in document:
            yield self._failure(error_text(data, 500))
            return
        if b'"usage"' in data or b'"timings"' in data:
            self._told = [*self._told, b"data: " + data][-TOLD_KEPT:]
            self._receipt = receipt_of(document) or self._receipt
        for choice in document.get("choices") or ():
            said = choice.get("delta") or {"content": choice.get("text")}
            text, thinking = said.get("content") or "", thinking_of(said)
            calls = [call for delta in said.get("tool_calls") or () for call in self._added(delta)]
            if choice.get("finish_reason"):
                self._reason = reason_of(choice["finish_reason"])
                calls += self._complete()
            if text or thinking or calls:
                self._writer.note_content()
                logprobs = logprobs_of(choice)
                yield line_of(self._writer.part(text, thinking=thinking, calls=calls, logprobs=logprobs))

    def _added(self, delta: Mapping[str, Any]) -> list[Document]:
        """Take a part of a call; return the calls that are complete, since a later one began."""
        number, function = delta.get("index", 0), delta.get("function") or {}
        complete = self._complete() if number not in self._calls else []
        call = self._calls.setdefault(number, _Call())
        call.id = call.id or delta.get("id") or ""
        call.name = call.name or function.get("name") or ""
        call.arguments.append(function.get("arguments") or "")
        return complete

    def _complete(self) -> list[Document]:
        calls = [
            _made(call.id, call.name, "".join(call.arguments), self._sent_calls + place)
            for place, call in enumerate(self._calls.values())
        ]
        self._calls.clear()
        self._sent_calls += len(calls)
        return calls

    def _last(self) -> bytes:
        self.has_ended = True
        usage = parse_usage(Edges(end=b"\n".join(self._told), is_stream=True))
        return line_of(self._writer.last(self._writer.part(), self._reason or "stop", usage, self._receipt))

    def _failure(self, text: str) -> bytes:
        self.has_ended = self.has_failed = True
        return line_of({"error": text})


class _Call:
    """A tool call whose arguments still come."""

    def __init__(self) -> None:
        self.id = self.name = ""
        self.arguments: list[str] = []


def whole(writer: Writer, kind: str, body: bytes) -> Document:
    """Return the answer that has come in one piece. Raises AnswerError if it has no form in Ollama's API."""
    try:
        document = json.loads(body)
        if kind in (EMBED, EMBEDDINGS):
            return writer.vectors(document)
        return _whole_text(writer, document)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        message = "the engine's answer is not understood"
        raise AnswerError(message) from error


def _whole_text(writer: Writer, document: Mapping[str, Any]) -> Document:
    choice = document["choices"][0]
    said = choice.get("message") or {"content": choice.get("text")}
    calls = [
        _made(call.get("id") or "", call["function"]["name"], call["function"]["arguments"], place)
        for place, call in enumerate(said.get("tool_calls") or ())
    ]
    told = {name: document.get(name) or {} for name in ("usage", "timings")}
    usage = parse_usage(Edges(end=json.dumps(told).encode()))
    text, thinking, logprobs = said.get("content") or "", thinking_of(said), logprobs_of(choice)
    shown = writer.part(text, thinking=thinking, calls=calls, logprobs=logprobs)
    return writer.last(shown, reason_of(choice.get("finish_reason")), usage, receipt_of(document))


def _made(call_id: str, name: str, arguments: str | Mapping[str, Any], place: int) -> Document:
    """Return a tool call with its arguments as an object. Raises AnswerError if they are none: they were cut short."""
    try:
        found = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        message = f"the model's call of '{name[:100]}' has arguments that are not a JSON object, perhaps cut short"
        raise AnswerError(message)
    named = {"index": place, "name": name, "arguments": found}
    return {"id": call_id, "function": named} if call_id else {"function": named}


def thinking_of(said: Mapping[str, Any]) -> str:
    """Return the reasoning of a message or of a part of one; engines spell its field in two ways."""
    return said.get("reasoning_content") or said.get("reasoning") or ""


def logprobs_of(choice: Mapping[str, Any]) -> object:
    """Return the log probabilities of a choice, whose entries have the same form in both APIs; None without any."""
    found = choice.get("logprobs")
    return found.get("content") if isinstance(found, Mapping) else None


def receipt_of(document: Mapping[str, Any]) -> object:
    """Return the appliance's receipt in an answer; None without one."""
    usage = document.get("usage")
    return usage.get("appliance") if isinstance(usage, Mapping) else None


def reason_of(finish_reason: str | None) -> str:
    """Return Ollama's word for the end of an answer: it has none of its own for tool calls."""
    return "length" if finish_reason == "length" else "stop"


def error_text(body: bytes, status: int) -> str:
    """Return the sentence of an error in any form that the gateway or an engine sends."""
    try:
        document = json.loads(body)
        found = document.get("error", document)
        text = found if isinstance(found, str) else found.get("message") or found.get("detail")
    except (ValueError, AttributeError, RecursionError):
        text = None
    if isinstance(text, str) and text:
        return text
    return f"the engine refused this request with status {status} and gave no reason"


def line_of(document: Document) -> bytes:
    """Return one line of a stream."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
