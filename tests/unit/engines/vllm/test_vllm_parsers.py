"""Which parsers the engine is given: by the tokens of a chat template, and only what image and tokenizer have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.api.parsers import Parsers, parsers_of, rows
from appliance.engines.vllm.planning.space import Space
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.model.architecture.facts import CALLS_TOOLS, REASONS
from appliance.plan import Plan
from appliance.settings import resolve_settings
from appliance.start.attachments import with_attachments
from tests.golden.vllm_plans import arguments, engine_facts, hardware, inputs
from tests.shapes.folders import folder_model

DATA = Path(__file__).parents[3] / "data/vllm"
FACTS = engine_facts()
THINK = frozenset({"<think>", "</think>"})
CALL = frozenset({"<tool_call>", "</tool_call>"})
DEEPSEEK = frozenset({"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"})
PYTHON_TAG = frozenset({"<|python_tag|>"})
NO_TOKENS: frozenset[str] = frozenset()

# What each family's template is known by, cut down to that: as published, but for the text between.
HERMES = (
    r"""{% if tools %}{{- "within XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n" }}"""
)
CODER = r"{% if tools %}{{- '\n<tool_call>\n<function=example>\n<parameter=example_1>\n' }}"
QWEN3_END = (
    "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
QWEN35_END = QWEN3_END.replace("{%- endif %}", "{%- else %}{{- '<think>\\n' }}{%- endif %}")
QWEN35_SMALL_END = QWEN35_END.replace("enable_thinking is false", "enable_thinking is true")
R1_END = "{% if '</think>' in content %}{% endif %}{{'<｜Assistant｜><think>\\n'}}"
V31_END = "{% if not thinking %}{{'</think>'}}{% endif %}{{'<｜Assistant｜>'}}"
V3_CALL = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n```json\\n'}}"
V31_CALL = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'}}"
GLM45 = "[gMASK]<sop>{% if tools %}<tool_call>{function-name}\n<arg_key>{% endif %}</think>{{ enable_thinking }}"
LLAMA = (
    '{% if tools %}<|start_header_id|>{{- \'Respond in the format {"name": function name, "parameters": dictionary\'}}'
)
GRANITE = "{% if tools %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}"
KIMI = "{% if tools -%}{{ '<|im_system|>tool_declare<|im_middle|>' -}}"
KIMI_TOKENS = frozenset({"<|tool_calls_section_begin|>", "<|tool_call_begin|>"})
HARMONY = (
    "{{ reasoning_effort }}{% if tools %}{{- '<|start|>assistant to=functions.' }}{% endif %}"
    "{{- '<|channel|>analysis<|message|>' }}"
)
FAMILIES: tuple[tuple[str, str, frozenset[str], str | None, str | None], ...] = (
    ("Qwen2.5", HERMES, CALL, "hermes", None),
    ("Hermes 3", '{% if tools %}<tool_call>\n{"name": <function-name>}', NO_TOKENS, "hermes", None),
    ("Qwen3", HERMES + QWEN3_END, CALL | THINK, "hermes", "qwen3"),
    ("Qwen3 2507 Thinking", HERMES + r"'<|im_start|>assistant\n<think>\n'", CALL | THINK, "hermes", "deepseek_r1"),
    ("Qwen3-Coder", CODER, CALL, "qwen3_xml", None),
    ("Qwen3.6", CODER + QWEN35_END, CALL | THINK, "qwen3_xml", "qwen3"),
    ("Qwen3.5, which thinks on request", CODER + QWEN35_SMALL_END, CALL | THINK, "qwen3_xml", None),
    ("Qwen3.6, edited not to think", "{%- set enable_thinking = false %}" + CODER + QWEN35_END, CALL | THINK,
     "qwen3_xml", None),
    ("Llama 3.1", LLAMA, PYTHON_TAG, "llama3_json", None),
    ("Llama 3.1, another tokenizer", LLAMA, NO_TOKENS, None, None),
    ("Llama 4", "{% if tools %}<|header_start|> [func_name1(params_name1=", NO_TOKENS, "llama4_pythonic", None),
    ("Mistral Small", "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]", frozenset({"[TOOL_CALLS]"}), "mistral", None),
    ("Magistral", "{% if tools %}[TOOL_CALLS][THINK]thinking", frozenset({"[TOOL_CALLS]"}), "mistral", None),
    ("DeepSeek-V3 with tools", "{% if tools %}" + V3_CALL, DEEPSEEK, "deepseek_v3", None),
    ("DeepSeek-R1 as published", V3_CALL + R1_END, DEEPSEEK | THINK, None, "deepseek_r1"),
    ("DeepSeek-V3.1 with tools", "{% if tools %}" + V31_CALL + V31_END, DEEPSEEK | THINK, "deepseek_v31",
     "deepseek_v3"),
    ("gpt-oss", HARMONY, frozenset({"<|channel|>", "<|message|>"}), "openai", "openai_gptoss"),
    ("GLM-4.5", GLM45, CALL | THINK, "glm45", "glm45"),
    ("GLM-4.7", GLM45.replace("}\n<arg", "}<arg"), CALL | THINK, "glm47", "glm45"),
    ("Kimi-K2", KIMI, KIMI_TOKENS, "kimi_k2", None),
    ("Kimi-K2-Thinking", KIMI + "<think>{{rc}}</think>", KIMI_TOKENS | THINK, "kimi_k2", "kimi_k2"),
    ("Granite 3", GRANITE + "<|tool_call|>Here is my thought process:", NO_TOKENS, "granite", None),
    ("Granite 3.2", GRANITE + "<|tool_call|>Here is my thought process: {{ thinking }}", NO_TOKENS, "granite",
     "granite"),
    ("Granite 4", GRANITE + HERMES, CALL, "granite4", None),
    ("Phi-4-mini by vLLM's template", '{%- if tools %}as functools[{"name": [function name]}]', NO_TOKENS,
     None, None),
    ("Phi-4-mini's own", "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", NO_TOKENS,
     None, None),
    ("Gemma 4", "{% if tools %}<|tool_call>call:{{ enable_thinking }}<|channel>thought",
     frozenset({"<|tool_call>", "<|channel>", "<channel|>"}), "gemma4", "gemma4"),
    ("a plain template", "{{ messages }}", NO_TOKENS, None, None),
)  # fmt: skip


def as_given(template: str | None, tokens: frozenset[str] = NO_TOKENS) -> Model:
    """Return the model that is read from a folder with this template; None means without a template."""
    text = template or ""
    return replace(
        folder_model("qwen3-8b"),
        chat_template=template,
        has_chat_template=template is not None,
        added_tokens=tokens,
        calls_tools=bool(CALLS_TOOLS.search(text)),
        reasons=bool(REASONS.search(text)),
    )


def planned(model: Model, facts: EngineFacts = FACTS, **flags: str) -> Plan:
    return Space(replace(inputs(hardware("1x4090"), model, flags), facts=replace(facts, kv_types=()))).best


def given_by(plan: Plan) -> tuple[str | None, str | None]:
    argv = arguments(plan)
    found = [
        argv[argv.index(flag) + 1] if flag in argv else None for flag in ("--tool-call-parser", "--reasoning-parser")
    ]
    assert ("--enable-auto-tool-choice" in argv) == (found[0] is not None)
    return found[0], found[1]


@pytest.mark.parametrize(("template", "tokens", "tools", "reasoning"), [row[1:] for row in FAMILIES],
                         ids=[row[0] for row in FAMILIES])  # fmt: skip
def test_a_family_is_known_by_its_template(
    template: str, tokens: frozenset[str], tools: str | None, reasoning: str | None
) -> None:
    plan = planned(as_given(template, tokens))
    assert given_by(plan) == (tools, reasoning)
    assert (plan.launch.calls_tools, plan.launch.splits_reasoning) == (tools is not None, reasoning is not None)
    said = {choice.name: choice.value for choice in plan.choices}
    assert said.get("tool_calls", "none") == (tools or "none")
    assert said.get("reasoning", "none") == (reasoning or "none")


def test_every_row_is_some_family_s_or_says_where_it_was_read() -> None:
    known = {parser for *_, tools, reasoning in FAMILIES for parser in (tools, reasoning)}
    for kind, listed in (("tools", FACTS.tool_parsers), ("reasoning", FACTS.reasoning_parsers)):
        for row in rows(kind):  # type: ignore[arg-type]
            assert row.source
            assert row.parser in listed
    assert len(known) > 15


def test_a_parser_that_the_image_s_engine_has_not_is_not_given() -> None:
    model = as_given(CODER + QWEN35_END, CALL | THINK)
    plan = planned(model, replace(FACTS, tool_parsers=("hermes",), reasoning_parsers=("qwen3",)))
    assert given_by(plan) == (None, "qwen3")
    (said,) = (choice for choice in plan.choices if choice.name == "tool_calls")
    assert said.is_refusal
    assert said.reason.startswith("vLLM 0.33.0 lists no parser qwen3_xml")
    assert "chats with tools are refused (400)" in said.reason


def test_a_parser_whose_tokens_are_not_there_is_not_given() -> None:
    """vLLM ends its start over them: "could not locate think start/end tokens in the tokenizer"."""
    plan = planned(as_given(HERMES + r"'<|im_start|>assistant\n<think>\n</think>x'", CALL))
    assert given_by(plan) == ("hermes", None)
    (said,) = (choice for choice in plan.choices if choice.name == "reasoning")
    assert "its tokenizer has no token </think>, <think>, which parser deepseek_r1 looks up" in said.reason


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        ("--tool-call-parser xlam --enable-auto-tool-choice", (None, "qwen3")),
        ("--disable-auto-tool-choice", (None, "qwen3")),
        ("--reasoning-parser deepseek_r1", ("hermes", None)),
    ],
)
def test_a_user_s_own_wins(args: str, ours: tuple[str | None, str | None]) -> None:
    model = as_given(HERMES + QWEN3_END, CALL | THINK)
    found = parsers_of(model, FACTS, args.split())
    assert (found.tools, found.reasoning) == ours
    plan = planned(model, engine_arg=args)
    argv = arguments(plan)
    for word in args.split():
        assert argv.count(word) == 1
    assert len([word for word in argv if word in ("--tool-call-parser", "--reasoning-parser")]) in (1, 2)
    assert plan.launch.calls_tools == ("--disable-auto-tool-choice" not in args)
    assert plan.launch.splits_reasoning


def test_a_template_of_the_user_decides_in_place_of_the_folder_s(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(CODER)
    settings = resolve_settings({"chat_template_file": str(own)}, {})
    model = with_attachments(as_given(HERMES, CALL), settings)
    assert parsers_of(model, FACTS, ()).tools == "qwen3_xml"


def test_a_model_that_gives_vectors_has_none() -> None:
    model = replace(as_given(HERMES + QWEN3_END, CALL | THINK), is_embedding_model=True)
    assert parsers_of(model, FACTS, ()) == Parsers()
    assert parsers_of(as_given(None), FACTS, ()) == Parsers()


@given(st.text(max_size=80), st.frozensets(st.sampled_from(sorted(CALL | THINK | DEEPSEEK))))
def test_any_template_has_parsers_of_the_lists_or_none(text: str, tokens: frozenset[str]) -> None:
    found = parsers_of(as_given("{{ tools }} </think>" + text, tokens), FACTS, ())
    assert found.tools is None or found.tools in FACTS.tool_parsers
    assert found.reasoning is None or found.reasoning in FACTS.reasoning_parsers
    assert {choice.name for choice in found.choices} == {"tool_calls", "reasoning"}


def test_a_plan_of_a_profile_keeps_them() -> None:
    from appliance.plan import as_document

    document = json.dumps(as_document(planned(as_given(HERMES + QWEN3_END, CALL | THINK))))
    assert '"tool_parser": "hermes"' in document
    assert '"reasoning_parser": "qwen3"' in document


@pytest.mark.parametrize(
    ("model", "mmproj", "reads"),
    [("qwen3.6-27b-awq", "auto", ("image",)), ("qwen3.6-27b-awq", "off", ()), ("qwen3-8b", "auto", ())],
)
def test_images_are_promised_where_their_tower_is_loaded(model: str, mmproj: str, reads: tuple[str, ...]) -> None:
    assert Space(inputs(hardware("h200"), folder_model(model), {"mmproj": mmproj})).best.launch.reads == reads
