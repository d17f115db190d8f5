"""Requests of Ollama's API as requests to the gateway's own /v1.

Field names, defaults and words of errors are those of ollama/ollama `api/types.go` and `server/routes.go`, release
0.12.11.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.documents import foreign, has_too_many_values
from appliance.gateway.wire.api_error import ApiError
from appliance.gateway.wire.ollama_paths import CHAT, EMBED, EMBEDDINGS, GENERATE
from appliance.gateway.wire.reasoning import switch
from appliance.values import dataclass

Document = dict[str, Any]

OUR_CHAT, OUR_TEXT, OUR_VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

# Beginnings of images in base64; an image of another kind is announced as PNG, since decoders look at the bytes.
_IMAGE_KINDS = (("/9j/", "jpeg"), ("UklGR", "webp"), ("R0lGOD", "gif"))
_INVALID = "invalid_request"
_LEVELS = ("low", "medium", "high")
_ZERO = re.compile(r"[+-]?0*(?:\.0*)?(?:ns|us|µs|ms|s|m|h)?")

# Options that both APIs have, as (Ollama's name, our names). Engines ignore a name that they do not know, so an option
# with two names has one effect.
_FLOATS = (
    ("temperature", ("temperature",)),
    ("top_p", ("top_p",)),
    ("min_p", ("min_p",)),
    ("typical_p", ("typical_p",)),
    ("presence_penalty", ("presence_penalty",)),
    ("frequency_penalty", ("frequency_penalty",)),
    ("repeat_penalty", ("repeat_penalty", "repetition_penalty")),
)
_INTEGERS = (("seed", ("seed",)), ("top_k", ("top_k",)), ("repeat_last_n", ("repeat_last_n",)))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request that needs the model."""

    kind: str  # its path in Ollama's API
    model: str  # the name that the client sent; empty if it sent none
    is_stream: bool
    keep_alive: str | float | None
    path: str | None  # path of our own API; None: the model is only to be loaded, or unloaded
    body: Document

    @property
    def unloads(self) -> bool:
        """True if the request asks to unload the model: no prompt, and `keep_alive` is zero."""
        return self.path is None and is_zero(self.keep_alive)

    def encoded(self, model: str) -> bytes:
        """Return the body for `path` with that name of the model; an empty one is left out. Raises ApiError (400) for a
        body that is nested too deep."""
        named = {"model": model, **self.body} if model else self.body
        try:
            return json.dumps(named, separators=(",", ":")).encode()
        except RecursionError:
            raise ApiError(400, _INVALID, "the body is nested too deep") from None


def parse(body: bytes) -> Document:
    """Return the JSON object of a body. Raises ApiError (400) for every other body."""
    if not body:
        raise ApiError(400, _INVALID, "missing request body")
    if has_too_many_values(body):
        raise ApiError(400, _INVALID, "the body has too many values")
    try:
        found = foreign(body)
    except ValueError as error:
        raise ApiError(400, _INVALID, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, _INVALID, "the body is not a JSON object")
    return found


def translate(kind: str, body: bytes) -> Asked:
    """Return the request of `kind`, one of the paths that need the model. Raises ApiError (400)."""
    asked = parse(body)
    path, translated = _TRANSLATORS[kind](asked)
    keep_alive = keep_alive_of(asked)
    if keep_alive is not None:
        translated["keep_alive"] = keep_alive
    can_stream = path in (OUR_CHAT, OUR_TEXT)
    is_stream = can_stream and _flag(asked, "stream", default=True)
    if is_stream:
        translated |= {"stream": True, "stream_options": {"include_usage": True}}
    return Asked(
        kind=kind, model=name_of(asked), is_stream=is_stream, keep_alive=keep_alive, path=path, body=translated
    )


def name_of(asked: Document) -> str:
    """Return the model that a request names, in the present or the older field; empty if it names none."""
    return _text(asked, "model") or _text(asked, "name")


def keep_alive_of(asked: Document) -> str | float | None:
    """Return `keep_alive`: a number of seconds or a text with a unit; None if there is none. Raises ApiError (400)."""
    value = asked.get("keep_alive")
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise ApiError(400, _INVALID, "`keep_alive` must be a number of seconds or a text such as 5m")
    return value


def is_zero(keep_alive: str | float | None) -> bool:
    """True for a `keep_alive` of zero: `0`, `"0"`, `"0s"`."""
    if isinstance(keep_alive, str):
        return bool(keep_alive) and any(map(str.isdigit, keep_alive)) and _ZERO.fullmatch(keep_alive) is not None
    return keep_alive == 0


def _chat(asked: Document) -> tuple[str | None, Document]:
    messages = _list(asked, "messages")
    if not messages:
        return None, {}
    tools = _list(asked, "tools")
    body: Document = {"messages": list(_messages(messages)), **_generation(asked)}
    return OUR_CHAT, {**body, "tools": tools} if tools else body


def _generate(asked: Document) -> tuple[str | None, Document]:
    prompt, system = _text(asked, "prompt"), _text(asked, "system")
    images = _images(asked)
    _refuse_unsupported(asked)
    if _flag(asked, "raw"):
        return (OUR_TEXT, {"prompt": prompt, **_raw_generation(asked, system, images)}) if prompt else (None, {})
    if not prompt and not images:
        return None, {}
    user = {"role": "user", "content": _content(prompt, images)}
    messages = [{"role": "system", "content": system}, user] if system else [user]
    return OUR_CHAT, {"messages": messages, **_generation(asked)}


def _refuse_unsupported(asked: Document) -> None:
    if _text(asked, "suffix"):
        raise ApiError(400, _INVALID, "`suffix` is not supported: text cannot be filled in by this API, use /infill")
    if _text(asked, "template"):
        raise ApiError(
            400, _INVALID, "`template` is not supported: the model's own chat template is used; send `raw` without one"
        )
    if _list(asked, "context"):
        raise ApiError(400, _INVALID, "`context` is not supported: send the conversation as `messages` to /api/chat")


def _raw_generation(asked: Document, system: str, images: Sequence[str]) -> Document:
    if system:
        raise ApiError(400, _INVALID, "raw mode does not support template, system, or context")
    if images:
        raise ApiError(400, _INVALID, "raw mode does not support images")
    if _format(asked):
        raise ApiError(400, _INVALID, "raw mode does not support format")
    if _flag(asked, "logprobs"):
        raise ApiError(400, _INVALID, "raw mode does not support logprobs")
    return _options(asked)


def _embed(asked: Document) -> tuple[str | None, Document]:
    texts = asked.get("input")
    if texts is None or texts in ("", []):
        return None, {}
    if not isinstance(texts, str) and not _are_texts(texts):
        raise ApiError(400, _INVALID, "`input` must be a text or a list of texts")
    body: Document = {"input": texts, "encoding_format": "float"}
    if (dimensions := _integer(asked, "dimensions")) is not None:
        body["dimensions"] = dimensions
    return OUR_VECTORS, body


def _embeddings(asked: Document) -> tuple[str | None, Document]:
    prompt = _text(asked, "prompt")
    return (OUR_VECTORS, {"input": prompt, "encoding_format": "float"}) if prompt else (None, {})


_TRANSLATORS = {CHAT: _chat, GENERATE: _generate, EMBED: _embed, EMBEDDINGS: _embeddings}


def _generation(asked: Document) -> Document:
    """Return the fields of an answer by the chat template."""
    return {**_options(asked), **_format(asked), **_thinking(asked), **_logprobs(asked)}


def _options(asked: Document) -> Document:
    """Return the sampling options by our names. Options of loading, such as `num_ctx`, are left out: the plan decides
    them."""
    options = asked.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ApiError(400, _INVALID, "`options` must be an object")
    found: Document = {}
    for name, ours in _FLOATS:
        if (value := _number(options, name)) is not None:
            found |= dict.fromkeys(ours, value)
    for name, ours in _INTEGERS:
        if (count := _integer(options, name)) is not None:
            found |= dict.fromkeys(ours, count)
    if (most := _integer(options, "num_predict")) is not None and most > 0:  # else there is no limit
        found["max_tokens"] = most
    return {**found, **_stop(options)}


def _stop(options: Mapping[str, Any]) -> Document:
    stop = options.get("stop")
    if stop is None:
        return {}
    texts = [stop] if isinstance(stop, str) else stop
    if not _are_texts(texts):
        raise ApiError(400, _INVALID, 'option "stop" must be a list of texts')
    return {"stop": texts} if texts else {}


def _format(asked: Document) -> Document:
    wanted = asked.get("format")
    if wanted is None or wanted == "":
        return {}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(wanted, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}}
    raise ApiError(400, _INVALID, 'invalid format: expected "json" or a JSON schema')


def _thinking(asked: Document) -> Document:
    """Return what turns thinking on or off; empty if the model's own default is wanted."""
    think = asked.get("think")
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": switch(is_on=think)}
    if isinstance(think, str) and think in _LEVELS:
        template = {**switch(is_on=True), "reasoning_effort": think}
        return {"reasoning_effort": think, "chat_template_kwargs": template}
    raise ApiError(
        400, _INVALID, f"invalid think value: {think!r:.40} (must be true, false, {', '.join(map(repr, _LEVELS))})"
    )


def _logprobs(asked: Document) -> Document:
    if not _flag(asked, "logprobs"):
        return {}
    most = _integer(asked, "top_logprobs")
    return {"logprobs": True, "top_logprobs": most} if most else {"logprobs": True}


def _messages(messages: Sequence[Any]) -> Iterator[Document]:
    calls: list[tuple[str, str]] = []  # id and function of each call that has no result yet
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(400, _INVALID, f"message {number} is not an object")
        role = _text(message, "role").lower()
        if not role:
            raise ApiError(400, _INVALID, f"message {number} has no role")
        made: Document = {"role": role, "content": _content(_text(message, "content"), _images(message))}
        if thinking := _text(message, "thinking"):
            made["reasoning_content"] = thinking
        if asked := _list(message, "tool_calls"):
            made["tool_calls"] = [_call(call, f"call_{number}_{place}") for place, call in enumerate(asked)]
            calls += [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        if role == "tool":
            made["tool_call_id"] = _answered(message, calls)
        yield made


def _call(call: object, default_id: str) -> Document:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise ApiError(400, _INVALID, "a tool call has no function")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise ApiError(400, _INVALID, "a tool call's arguments must be an object")
    try:
        written = json.dumps(arguments or {}, separators=(",", ":"))
    except RecursionError:
        raise ApiError(400, _INVALID, "a tool call's arguments are nested too deep") from None
    named = {"name": _text(function, "name"), "arguments": written}
    return {"id": _text(call, "id") or default_id, "type": "function", "function": named}


def _answered(message: Document, calls: list[tuple[str, str]]) -> str:
    """Return the id of the call that a result belongs to, and remove it from `calls`: by the result's id, else by its
    tool's name, else the first. Clients of Ollama may send neither."""
    wanted, name = _text(message, "tool_call_id"), _text(message, "tool_name")
    by_id = [call for call in calls if call[0] == wanted]
    by_name = [call for call in calls if call[1] == name]
    found = next(iter([*by_id, *by_name, *calls]), None)
    if found is not None and (by_id or not wanted):
        calls.remove(found)
        return found[0]
    return wanted or "call_unknown"


def _content(text: str, images: Sequence[str]) -> str | list[Document]:
    if not images:
        return text
    pictures: list[Document] = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return [{"type": "text", "text": text}, *pictures] if text else pictures


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((name for beginning, name in _IMAGE_KINDS if image.startswith(beginning)), "png")
    return f"data:image/{kind};base64,{image}"


def _images(asked: Mapping[str, Any]) -> list[str]:
    images = _list(asked, "images")
    if not _are_texts(images):
        raise ApiError(400, _INVALID, "`images` must be a list of images in base64")
    return images


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _text(asked: Mapping[str, Any], name: str) -> str:
    value = asked.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, _INVALID, f"`{name}` must be a text")
    return value or ""


def _list(asked: Mapping[str, Any], name: str) -> list[Any]:
    value = asked.get(name)
    if value is not None and not isinstance(value, list):
        raise ApiError(400, _INVALID, f"`{name}` must be a list")
    return value or []


def _flag(asked: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = asked.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, _INVALID, f"`{name}` must be true or false")
    return default if value is None else value


def _number(asked: Mapping[str, Any], name: str) -> float | None:
    value = asked.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ApiError(400, _INVALID, f'option "{name}" must be a number')
    return value


def _integer(asked: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number; `40.0` is one, since JavaScript and Go do not tell the two apart."""
    value = _number(asked, name)
    if value is not None and value != int(value):
        raise ApiError(400, _INVALID, f'option "{name}" must be a whole number')
    return None if value is None else int(value)
