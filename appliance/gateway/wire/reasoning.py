"""What a request says of reasoning, in the words that chat templates know. docs/api.md has the table of all dialects.

Both engines read OpenAI's fields themselves. Of Anthropic's they read at most the budget, so the rest becomes
`chat_template_kwargs`, which both take on that route.
"""

from __future__ import annotations

import codecs
import json
from typing import Any

import msgspec

_THINKS = {"enabled": True, "adaptive": True, "disabled": False}


class _Asked(msgspec.Struct):
    thinking: object = None
    output_config: object = None
    chat_template_kwargs: object = None


_ASKED = msgspec.json.Decoder(_Asked)


def switch(*, is_on: bool) -> dict[str, bool]:
    """Return the switch for reasoning by both names that chat templates have for it."""
    return {"enable_thinking": is_on, "thinking": is_on}


def with_template_words(body: bytes) -> bytes:
    """Return a request of Anthropic's dialect with its `thinking` and `output_config.effort` as `chat_template_kwargs`.

    Every other byte stays. A request that says nothing of them, or that has `chat_template_kwargs`, is unchanged; so is
    one that is no JSON object, which the engine refuses.
    """
    if b'"thinking"' not in body and b'"output_config"' not in body:
        return body
    try:
        asked = _ASKED.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return body
    words = _words(asked)
    if not words or asked.chat_template_kwargs is not None:
        return body
    begin = body.index(b"{") + 1
    return b'%b"chat_template_kwargs":%b,%b' % (body[:begin], json.dumps(words).encode(), body[begin:])


def _words(asked: _Asked) -> dict[str, Any]:
    kind = asked.thinking.get("type") if isinstance(asked.thinking, dict) else None
    effort = asked.output_config.get("effort") if isinstance(asked.output_config, dict) else None
    is_on = _THINKS.get(kind) if isinstance(kind, str) else None
    return {
        **({} if is_on is None else switch(is_on=is_on)),
        **({"reasoning_effort": effort} if isinstance(effort, str) else {}),
    }
