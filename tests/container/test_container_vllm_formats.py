"""parsers.yaml against the parsers of a vLLM image, and of the newer vLLM that GPU images have: what each makes of its
row's format, and which tokens it needs.

As `test_container_vllm_parser`. All texts together cost one import of vLLM, and one of the newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.vllm.api.parsers import Kind, Row, rows
from tests.container.stages.vllm_image import NEWER, answered, needs_image

FORMATS = Path(__file__).parent / "stages/vllm_formats.py"
JSON = '{"city": "Paris", "days": 2}'
NAMED = '{"name": "get_weather", "arguments": ' + JSON + "}"
WITH_PARAMETERS = '{"name": "get_weather", "parameters": ' + JSON + "}"
PYTHON = 'get_weather(city="Paris", days=2)'
XML = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
KEYS = "<arg_key>city</arg_key>{0}<arg_value>Paris</arg_value>{0}<arg_key>days</arg_key>{0}<arg_value>2</arg_value>{0}"
INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>"
)
CALLED: dict[str, Any] = {"reasoning": "", "content": "", "calls": [["get_weather", {"city": "Paris", "days": 2}]]}
THOUGHT: dict[str, Any] = {"reasoning": "Two and two.", "content": "Four.", "calls": []}
# As the models write it, by the templates and examples that each row's source names.
CALLS: Mapping[str, str] = {
    "openai": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + JSON + "<|call|>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    + JSON
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + JSON
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + JSON
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    "seed_oss": f"<seed:tool_call>\n{XML}\n</seed:tool_call>",
    "minimax_m2": f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
    "glm47": "<tool_call>get_weather" + KEYS.format("") + "</tool_call>",
    "glm45": "<tool_call>get_weather\n" + KEYS.format("\n") + "</tool_call>",
    "qwen3_xml": f"<tool_call>\n{XML}\n</tool_call>",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "olmo3": f"<function_calls>\n{PYTHON}\n</function_calls>",
    "granite4": f"<tool_call>\n{NAMED}\n</tool_call>",
    "granite": f"<|tool_call|>[{NAMED}]",
    "mistral": f"[TOOL_CALLS] [{NAMED}]",
    "llama4_pythonic": f"[{PYTHON}]",
    "llama4_json": WITH_PARAMETERS,
    "llama3_json": WITH_PARAMETERS,
    "hermes": f"<tool_call>\n{NAMED}\n</tool_call>",
}
THOUGHTS: Mapping[str, str] = {
    **dict.fromkeys(("kimi_k2", "glm45", "deepseek_v3", "deepseek_r1", "qwen3"), "<think>Two and two.</think>Four."),
    "openai_gptoss": "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>"
    "Four.<|return|>",
    "gemma4": "<|channel>thought\nTwo and two.<channel|>Four.",
    "seed_oss": "<seed:think>Two and two.</seed:think>Four.",
    "granite": "Here is my thought process: Two and two. Here is my response: Four.",
}
# What a request has to ask for, or the template writes before the answer begins.
ASKED: Mapping[str, Mapping[str, bool]] = {"deepseek_v3": {"thinking": True}, "gemma4": {"enable_thinking": True}}


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: Kind
    row: Row
    lacks: str | None = None  # a token that its tokenizer has not

    @property
    def name(self) -> str:
        return f"{self.kind} {self.row.parser}" + (f" without {self.lacks}" if self.lacks else "")

    @property
    def question(self) -> dict[str, Any]:
        names = {"tools": None, "reasoning": None} | {self.kind: self.row.parser}
        text = (CALLS if self.kind == "tools" else THOUGHTS)[self.row.parser]
        asked = ASKED.get(self.row.parser, {}) if self.kind == "reasoning" else {}
        return {**names, "tokens": sorted(self.row.tokens - {self.lacks}), "text": text, "template": asked}

    @property
    def expected(self) -> dict[str, Any]:
        return CALLED if self.kind == "tools" else THOUGHT


KINDS: tuple[Kind, ...] = ("tools", "reasoning")
WHOLE = [Case(kind=kind, row=row) for kind in KINDS for row in rows(kind)]
LACKING = [Case(kind=case.kind, row=case.row, lacks=token) for case in WHOLE for token in sorted(case.row.tokens)]
# A newer tokenizer of Mistral's has one more token, and its models write calls in another way.
NEW_MISTRAL: Mapping[str, Any] = {
    **{"tools": "mistral", "reasoning": None, "template": {}, "tokens": ["[ARGS]", "[TOOL_CALLS]"]},
    "text": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
}


@pytest.fixture(scope="module", autouse=True)
def _image() -> None:
    needs_image()


@pytest.fixture(params=[False, True], ids=["the image's", NEWER])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return _outcomes(newer=request.param)


@cache
def _outcomes(*, newer: bool) -> dict[str, Any]:
    cases = {case.name: case.question for case in (*WHOLE, *LACKING)} | {"new Mistral": NEW_MISTRAL}
    return dict(zip(cases, answered(FORMATS, list(cases.values()), newer=newer), strict=True))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_the_row_s_format_is_understood_with_no_more_than_its_tokens(case: Case, outcomes: dict[str, Any]) -> None:
    found = outcomes[case.name]
    assert found.get("whole") == case.expected, found
    if case.row.parser == "granite" and case.kind == "reasoning":  # vLLM's own lets a word of the mark through
        assert found["streamed"]["content"] == "Four."
    else:
        assert found["streamed"] == case.expected


@pytest.mark.parametrize("case", LACKING, ids=lambda case: case.name)
def test_without_a_token_of_the_row_start_or_request_fails(case: Case) -> None:
    """In one of the two: the newer's deepseek_v3 streams the end of the block of JSON as arguments where the end of a
    call is no token, the image's does not."""
    sound = {"whole": case.expected, "streamed": case.expected}
    assert [_outcomes(newer=newer)[case.name] for newer in (False, True)] != [sound, sound]


def test_both_formats_of_mistral_are_understood(outcomes: dict[str, Any]) -> None:
    assert outcomes["new Mistral"] == {"whole": CALLED, "streamed": CALLED}
