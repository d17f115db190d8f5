"""Errors as the pinned engines write them, and what clients are told instead."""

from __future__ import annotations

import json
import re

import pytest

from appliance.engines.engine import load
from appliance.gateway.engine.engine_errors import BODY_BYTES_MAX, EngineErrors, message_in

LOCAL_FILE = "Cannot load local files without `--allowed-local-media-path`."
CASES = [
    ("llama", 501, "This server does not support embeddings. Start it with `--embeddings`", 400, "model_gives_text"),
    ("llama", 501, "This server does not support reranking. Start it with `--reranking`", 400, "model_is_no_reranker"),
    (
        "llama",
        400,
        "Pooling type 'none' is not OAI compatible. Please use a different pooling type",
        400,
        "model_gives_token_vectors",
    ),
    (
        "llama",
        500,
        "the current context does not support logits computation. skipping",
        400,
        "model_gives_vectors",
    ),
    (
        "llama",
        500,
        "input (812 tokens) is too large to process. increase the physical batch size (current batch size: 512)",
        400,
        "context_length_exceeded",
    ),
    *(
        (
            "llama",
            500,
            f"{what} input is not supported - hint: if this is unexpected, you may need to provide the mmproj",
            400,
            "input_not_supported",
        )
        for what in ("image", "audio", "video")
    ),
    (
        "llama",
        500,
        "Multimodal data provided, but model does not support multimodal requests.",
        400,
        "input_not_supported",
    ),
    ("llama", 501, "The current model does not support audio input.", 400, "input_not_supported"),
    ("llama", 501, "Infill is not supported by this model: prefix token is missing. ", 400, "model_has_no_infill"),
    ("llama", 400, "file:// URLs are not allowed unless --media-path is specified", 400, "file_address_refused"),
    ("llama", 500, "tool_choice param requires --jinja flag", 400, "model_calls_no_tools"),
    ("llama", 500, "failed to apply chat template, try using --jinja", 400, "chat_template_failed"),
    (
        "llama",
        400,
        "Unable to generate parser for this template. Automatic parser generation failed: "
        "JSON schema error at #/properties/a: unrecognized type integr",
        400,
        "schema_not_read",
    ),
    (
        "llama",
        400,
        "JSON schema conversion failed:\nInvalid pattern ^(a$: unbalanced parentheses",
        400,
        "schema_not_read",
    ),
    ("llama", 501, "a new one of the engine", 400, "not_supported"),
    (
        "vllm",
        500,
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        502,
        "engine_died",
    ),
    ("vllm", 500, "The server had an error while processing your request.", 502, "engine_died"),
    (
        "vllm",
        400,
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
        400,
        "model_calls_no_tools",
    ),
    ("vllm", 400, 'tool_choice="required" requires --tool-call-parser to be set', 400, "model_calls_no_tools"),
    (
        "vllm",
        400,
        'tool_choice=function "get_weather" requires --tool-call-parser to be set',
        400,
        "model_calls_no_tools",
    ),
    ("vllm", 500, LOCAL_FILE, 400, "file_address_refused"),
    (
        "vllm",
        400,
        "At most 1 image(s) may be provided in one prompt. Set `--limit-mm-per-prompt` to increase this limit.",
        400,
        "too_many_inputs",
    ),
    (
        "vllm",
        400,
        "The decoder prompt contains a(n) image item with 9000 embedding tokens, which exceeds the pre-allocated "
        "encoder cache size 4096. Please reduce the input size or increase the encoder cache size by setting "
        "--limit-mm-per-prompt at startup.",
        400,
        "input_too_large",
    ),
    ("vllm", 400, "You must set `--enable-mm-embeds` to input `image_embeds`", 400, "field_not_served"),
    ("vllm", 400, "You must set `--enable-prompt-embeds` to input `prompt_embeds`.", 400, "field_not_served"),
    (
        "vllm",
        400,
        "Chat template is passed with request, but --trust-request-chat-template is not set. "
        "Refused request with untrusted chat template.",
        400,
        "field_not_served",
    ),
    (
        "vllm",
        400,
        "Per-request mm_processor_kwargs are disabled by default because they can change multimodal preprocessing "
        "resource usage. Start the server with --trust-request-mm-kwargs only when clients are trusted.",
        400,
        "field_not_served",
    ),
    (
        "vllm",
        400,
        "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser and/or "
        "--reasoning-config to use thinking_token_budget.",
        400,
        "field_not_served",
    ),
    (
        "vllm",
        400,
        "trace_decode_token_ids is set but trace replay is not enabled. Start the engine with --enable-trace-replay "
        "to use it.",
        400,
        "field_not_served",
    ),
    (
        "vllm",
        400,
        "Try switching the model's pooling_task via --pooler-config.task classify.",
        400,
        "field_not_served",
    ),
    (
        "vllm",
        400,
        "Requested 40 token ids per row in prompt_logprob_token_ids, which is greater than max allowed: 20. "
        "Set max_logprobs (--max-logprobs) to at least 40.",
        400,
        "limit_exceeded",
    ),
    (
        "vllm",
        400,
        "n must be at most 16384, got 99999. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment "
        "variable.",
        400,
        "limit_exceeded",
    ),
    (
        "vllm",
        400,
        "This vLLM engine does not support `store=True` and therefore does not support the background mode. To "
        "enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
        "the vLLM server.",
        400,
        "field_not_served",
    ),
    ("vllm", 501, "The model does not support Completions API", 400, "not_supported"),
]  # fmt: skip
# Flags of ours that a sentence may name: it has the variable beside it.
OURS = re.compile(r"--(?:pooling|ubatch|mmproj|chat-template-file), APPLIANCE_\w+")
THEIRS = re.compile(r"--[a-z]|vllm|stack trace|start (?:it|the)", re.IGNORECASE)


def ours(engine: str, status: int, message: str) -> tuple[int, str, str]:
    body = json.dumps({"error": {"code": status, "message": message, "type": "x"}}).encode()
    error = EngineErrors(load(engine).errors).as_ours(body, status)
    assert error is not None
    return error.status, error.code, error.detail


@pytest.mark.parametrize(("engine", "status", "message", "our_status", "code"), CASES)
def test_an_engines_words_do_not_reach_clients(
    engine: str, status: int, message: str, our_status: int, code: str
) -> None:
    got_status, got_code, detail = ours(engine, status, message)
    assert (got_status, got_code) == (our_status, code)
    assert not THEIRS.search(OURS.sub("", detail)), detail


def test_each_rule_has_an_error_that_it_is_for() -> None:
    for engine in ("llama", "vllm"):
        rules = load(engine).errors
        reached = {
            next(
                number
                for number, rule in enumerate(rules)
                if rule.of_status in (None, status) and re.search(rule.says, message)
            )
            for name, status, message, _, _ in CASES
            if name == engine
        }
        missing = [rule.says for number, rule in enumerate(rules) if number not in reached]
        assert len(missing) <= (engine == "vllm"), missing  # its 501 without words of its own


def test_what_no_rule_covers_is_the_engines() -> None:
    body = b'{"error":{"code":400,"message":"the prompt is too long","type":"exceed_context_size_error"}}'
    assert EngineErrors(load("llama").errors).as_ours(body, 400) is None


def test_what_a_client_wrote_is_no_error_of_the_engine() -> None:
    """An error may repeat a piece of the request."""
    for engine in ("llama", "vllm"):
        for _, status, message, _, code in CASES:
            body = json.dumps({"error": {"message": f"bad input: {message}"}}).encode()
            found = EngineErrors(load(engine).errors).as_ours(body, 400)
            assert found is None or found.code == code == "limit_exceeded", (message, status)
    long = json.dumps({"error": {"message": LOCAL_FILE, "input": "a" * BODY_BYTES_MAX}}).encode()
    assert EngineErrors(load("vllm").errors).as_ours(long, 500) is None


def test_groups_of_the_engines_sentence_come_back_whole() -> None:
    *_, detail = ours("vllm", 400, 'tool_choice=function "{a} --b" requires --tool-call-parser to be set')
    assert 'tool_choice function "{a} --b" cannot be kept' in detail


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"type":"error","error":{"type":"t","message":"m"}}', "m"),
        (b'{"object":"error","message":"m"}', "m"),
        (b'{"detail":"m"}', "m"),
        (b'{"error":"m"}', "m"),
        (b"m", "m"),
        (b"[]", "[]"),
        (b'{"detail":[{"msg":"m"}]}', '{"detail":[{"msg":"m"}]}'),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_sentence_of_any_error(body: bytes, message: str) -> None:
    assert message_in(body) == message
