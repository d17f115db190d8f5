"""Errors of llama-server that are replaced by the appliance's own words. Data.

llama-server's messages name flags of its own command line. For many mistakes of a client it answers 500 or 501, which
SDKs repeat. Sources are files of tools/server of the pinned llama.cpp.
"""

from __future__ import annotations

from appliance.engine_route import ErrorRule

_POOLING = "or set `pooling` (--pooling, APPLIANCE_POOLING)"

ERRORS: tuple[ErrorRule, ...] = (
    ErrorRule(
        says=r"^This server does not support embeddings\. Start it with",
        status=400,
        code="model_gives_text",
        detail=f"this model returns no vectors: serve an embedding model, {_POOLING} to mean, cls or last",
        source="server-context.cpp, handle_embeddings_impl",
    ),
    ErrorRule(
        says=r"^This server does not support reranking\. Start it with",
        status=400,
        code="model_is_no_reranker",
        detail=f"this model returns no scores: serve a reranker, {_POOLING} to rank for a model with a rank head",
        source="server-context.cpp, post_rerank",
    ),
    ErrorRule(
        says=r"^Pooling type 'none' is not OAI compatible",
        status=400,
        code="model_gives_token_vectors",
        detail="this model returns a vector for each token, but this API returns one for each text: "
        "set `pooling` (--pooling, APPLIANCE_POOLING) to mean, cls or last",
        source="server-context.cpp, handle_embeddings_impl",
    ),
    ErrorRule(
        says=r"^the current context does not support logits computation",
        status=400,
        code="model_gives_vectors",
        detail="this model returns vectors or scores, not text: use /v1/embeddings or /v1/rerank, or serve a model "
        "that generates text",
        source="server-context.cpp, pre_decode",
    ),
    ErrorRule(
        says=r"^input \((?P<tokens>\d+) tokens\) is too large to process\. increase the physical batch size "
        r"\(current batch size: (?P<most>\d+)\)",
        status=400,
        code="context_length_exceeded",
        detail="a text of this request has {tokens} tokens, and this model reads at most {most} at once: send shorter "
        "texts, or set `ubatch` (--ubatch, APPLIANCE_UBATCH) higher",
        source="server-context.cpp, pre_decode",
    ),
    ErrorRule(
        says=r"^(?P<what>image|audio|video) input is not supported - hint",
        status=400,
        code="input_not_supported",
        detail="this model reads no {what}: `architecture.input_modalities` in /v1/models says what it reads; a model "
        "that has a projector reads more with `mmproj` (--mmproj, APPLIANCE_MMPROJ)",
        source="server-common.cpp, oaicompat_content_load_media",
    ),
    ErrorRule(
        says=r"^Multimodal data provided, but model does not support multimodal requests",
        status=400,
        code="input_not_supported",
        detail="this model reads text alone: `architecture.input_modalities` in /v1/models says what a model reads",
        source="server-common.cpp, tokenize_input_subprompt",
    ),
    ErrorRule(
        says=r"^The current model does not support audio input",
        status=400,
        code="input_not_supported",
        detail="this model reads no audio: serve one whose `architecture.input_modalities` in /v1/models has audio",
        source="server-context.cpp, post_transcriptions_oai",
    ),
    ErrorRule(
        says=r"^Infill is not supported by this model",
        status=400,
        code="model_has_no_infill",
        detail="this model was not trained to fill in text: its vocabulary lacks the tokens for it; serve a model for "
        "code that has them, or ask /v1/completions",
        source="server-context.cpp, post_infill",
    ),
    ErrorRule(
        says=r"^file:// URLs are not allowed unless",
        status=400,
        code="file_address_refused",
        detail="requests cannot read files of this server: send the data itself, as a `data:` address in base64",
        source="server-common.cpp, handle_media",
    ),
    ErrorRule(
        says=r"^(?P<field>tools|tool_choice) param requires --jinja flag",
        status=400,
        code="model_calls_no_tools",
        detail="`{field}` is not taken: the chat template is applied without tools; leave the field out",
        source="server-common.cpp, oaicompat_chat_params_parse",
    ),
    ErrorRule(
        says=r"^(?:this custom template is not supported|failed to apply chat template), try using --jinja",
        status=400,
        code="chat_template_failed",
        detail="the model's chat template cannot be applied to these messages: ask /v1/completions, or serve it with "
        "another template (--chat-template-file, APPLIANCE_CHAT_TEMPLATE_FILE)",
        source="common/chat.cpp, common_chat_templates_apply_legacy",
    ),
    ErrorRule(
        says=r"^(?:Unable to generate parser for this template\. Automatic parser generation failed: )?"
        r"JSON schema (?:error|conversion failed)(?s:(?P<what>.+))",
        status=400,
        code="schema_not_read",
        detail="the JSON schema of a tool or of the answer cannot be read{what}",
        source="common/json-schema.cpp, fail; common/json-schema-to-grammar.cpp, check_errors; common/chat.cpp",
    ),
    ErrorRule(
        says=r"(?P<what>.+)",
        of_status=501,
        status=400,
        code="not_supported",
        detail="{what}",
        source="server-common.cpp, format_error_response: ERROR_TYPE_NOT_SUPPORTED is 501",
    ),
)
