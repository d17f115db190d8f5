"""Choice of vLLM's parsers for tool calls and reasoning, from the chat template and parsers.yaml. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from appliance.engines.tables import load_table
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.plan import Choice
from appliance.values import dataclass

_DATA = Path(__file__).with_name("parsers.yaml")
Kind = Literal["tools", "reasoning"]
# If the user passes any of these flags, no parser is chosen.
OF_TOOLS = ("--tool-call-parser", "--enable-auto-tool-choice", "--disable-auto-tool-choice",
            "--no-enable-auto-tool-choice", "--tool-parser-plugin")  # fmt: skip
OF_REASONING = ("--reasoning-parser", "--reasoning-parser-plugin")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parser and the chat templates that it fits. All patterns of `template` must occur and none of `without`. Each
    of `tokens` must be a single token of the vocabulary."""

    parser: str
    format: str
    source: str
    template: tuple[re.Pattern[str], ...]
    without: tuple[re.Pattern[str], ...] = ()
    tokens: frozenset[str] = frozenset()

    def matches(self, template: str) -> bool:
        return all(each.search(template) for each in self.template) and not any(
            each.search(template) for each in self.without
        )


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """Parsers for the engine's flags. A name is None if vLLM has no parser for this model or the user decided;
    `choices` tell which."""

    tools: str | None = None
    reasoning: str | None = None
    choices: tuple[Choice, ...] = ()


def parsers_of(model: Model, engine: EngineFacts, passed: Sequence[str]) -> Parsers:
    """Choose the parsers of a model. `passed` are the user's own arguments for the engine."""
    if model.is_embedding_model or model.chat_template is None:
        return Parsers()
    tools = _chosen("tools", model, engine) if model.calls_tools and not {*OF_TOOLS} & {*passed} else None
    reasoning = _chosen("reasoning", model, engine) if model.reasons and not {*OF_REASONING} & {*passed} else None
    return Parsers(
        tools=_name(tools), reasoning=_name(reasoning), choices=tuple(each for each in (tools, reasoning) if each)
    )


def rows(kind: Kind) -> tuple[Row, ...]:
    return _table()[kind]


_NONE = "none"
_NAMES: Mapping[Kind, str] = {"tools": "tool_calls", "reasoning": "reasoning"}
_WITHOUT: Mapping[Kind, str] = {
    "tools": "chats with tools are refused (400)",
    "reasoning": "what there is of it stays in the answer",
}
_FLAGS: Mapping[Kind, str] = {
    "tools": "--enable-auto-tool-choice --tool-call-parser NAME",
    "reasoning": "--reasoning-parser NAME",
}


def _name(choice: Choice | None) -> str | None:
    return None if choice is None or choice.value == _NONE else choice.value


def _chosen(kind: Kind, model: Model, engine: EngineFacts) -> Choice:
    """Return the choice by the first row that matches the template. A missing reasoning parser is not reported as a
    refusal, since many templates mention reasoning for models that do not reason, or only on request."""
    row = next((each for each in rows(kind) if each.matches(model.chat_template or "")), None)
    why = "no parser is known for its chat template" if row is None else next(_trouble(row, kind, model, engine), None)
    if row is not None and why is None:
        return Choice(name=_NAMES[kind], value=row.parser, reason=f"by its chat template: {row.format}", source="model")
    why = f'{why}: {_WITHOUT[kind]}; --engine-arg "{_FLAGS[kind]}" names one'
    is_refusal = kind == "tools" or row is not None
    return Choice(name=_NAMES[kind], value=_NONE, reason=why, source="model", is_refusal=is_refusal)


def _trouble(row: Row, kind: Kind, model: Model, engine: EngineFacts) -> Iterator[str]:
    there = engine.tool_parsers if kind == "tools" else engine.reasoning_parsers
    if row.parser not in there:
        yield f"vLLM {engine.version} lists no parser {row.parser}, which its chat template ({row.format}) asks for"
    if missing := sorted(row.tokens - model.added_tokens):
        yield f"its tokenizer has no token {', '.join(missing)}, which parser {row.parser} looks up"


@cache
def _table() -> Mapping[Kind, tuple[Row, ...]]:
    found: Mapping[Kind, Any] = load_table(_DATA)
    return {kind: tuple(map(_row, each)) for kind, each in found.items()}


def _row(found: Mapping[str, Any]) -> Row:
    return Row(
        parser=found["parser"],
        format=found["format"],
        source=found["source"],
        template=tuple(map(re.compile, found["template"])),
        without=tuple(map(re.compile, found.get("without", ()))),
        tokens=frozenset(found.get("tokens", ())),
    )
