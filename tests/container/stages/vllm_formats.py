"""What vLLM's parsers of tools and reasoning make of a text: run with vLLM's own Python, mounted into its image.

    docker run --rm -i -v $PWD/tests/container/stages/vllm_formats.py:/formats.py:ro \\
        --entrypoint /opt/vllm/bin/python appliance:vllm-cpu /formats.py < cases.json

In: a JSON list of {"tools": NAME or null, "reasoning": NAME or null, "tokens": [...], "text": ..., "template": what a
request hands to the template}. Out, on the last line: for each {"refused": what the server's start would end with},
{"failed": what a request would}, or {"whole": ..., "streamed": ...} of {"reasoning", "content", "calls"}. The tokenizer
has single bytes, and of longer tokens those alone that the case names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def main() -> None:
    print(json.dumps([outcome(case) for case in json.load(sys.stdin)]))


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizer_with(case["tokens"])
    is_harmony = case["reasoning"] == "openai_gptoss" or case["tools"] == "openai"
    try:
        parser_class = import_module("vllm.parser.parser_manager").ParserManager.get_parser(
            tool_parser_name=case["tools"],
            reasoning_parser_name=case["reasoning"],
            enable_auto_tools=case["tools"] is not None,
            is_harmony=is_harmony,
            tokenizer=tokenizer,
        )
    except TypeError as error:
        return {"refused": str(error)}
    coder = Harmony() if is_harmony else tokenizer
    ids = coder.encode(case["text"], add_special_tokens=False)
    try:
        return {
            "whole": whole(*parser_and_request(parser_class, tokenizer, case), case["text"], ids),
            "streamed": streamed(*parser_and_request(parser_class, tokenizer, case), coder, ids),
        }
    except Exception as error:
        return {"failed": repr(error)}


def parser_and_request(parser_class: Any, tokenizer: Any, case: dict[str, Any]) -> tuple[Any, Any]:
    """Make the parser and the request in the way that the server makes them for each request."""
    protocol = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body |= {"chat_template_kwargs": case["template"]} | ({"tools": [WEATHER]} if case["tools"] else {})
    request = protocol.ChatCompletionRequest.model_validate(body)
    return parser_class(tokenizer, request.tools, chat_template_kwargs=case["template"]), request


def whole(parser: Any, request: Any, text: str, ids: list[int]) -> dict[str, Any]:
    reasoning, content, calls = parser.parse(
        text, request, enable_auto_tools=bool(request.tools), model_output_token_ids=ids
    )
    return said(reasoning, content, [(call.name, call.arguments) for call in calls or ()])


def streamed(parser: Any, request: Any, coder: Any, ids: list[int]) -> dict[str, Any]:
    """The same, token by token, as it reaches a client and is put together there."""
    reasoning, content, calls = "", "", dict[int, list[str]]()
    told = 0
    for at, token in enumerate(ids):
        text = coder.decode(ids[: at + 1])
        new = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text[told:]  # a part of a character
        told += len(new)
        delta = parser.parse_delta(new, [token], request, prompt_token_ids=[], finished=at == len(ids) - 1)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls or ():
            parts = calls.setdefault(call.index, ["", ""])
            parts[0] += call.function.name or ""
            parts[1] += call.function.arguments or ""
    return said(reasoning, content, [(name, arguments) for name, arguments in calls.values()])


def said(reasoning: str | None, content: str | None, calls: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "reasoning": (reasoning or "").strip(),
        "content": (content or "").strip(),
        "calls": [[name, json.loads(arguments)] for name, arguments in calls],
    }


def tokenizer_with(tokens: Sequence[str]) -> Any:
    tokenizers = import_module("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=made)


class Harmony:
    """gpt-oss's format is read from the tokens of its own encoding."""

    def __init__(self) -> None:
        self.encoding = import_module("vllm.entrypoints.openai.parser.harmony_utils").get_encoding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        del add_special_tokens
        ids: list[int] = self.encoding.encode(text, allowed_special="all")
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self.encoding.decode(ids))


if __name__ == "__main__":
    main()
