"""Errors of vLLM that the gateway replaces with its own messages. Data only.

vLLM's messages name its flags, its variables and its log, which clients cannot use. Sources are files of vllm/ in the
pinned releases.
"""

from __future__ import annotations

from appliance.engine_route import ErrorRule

_NO_TOOLS = (
    "leave `tools` out, or serve a model whose `capabilities` in /v1/models have tool_use; an object of a given form "
    "comes from `response_format`"
)

ERRORS: tuple[ErrorRule, ...] = (
    ErrorRule(
        # The first wording is of 0.32, the second (CLIENT_MESSAGE) of 0.33.
        says=r"^(?:EngineCore encountered an issue|The server had an error while processing your request)",
        of_status=500,
        status=502,
        code="engine_died",
        detail="the engine ended while it worked on this request, and is started again: try again in a moment",
        source="v1/engine/exceptions.py, EngineDeadError",
    ),
    ErrorRule(
        says=r'^"auto" tool choice requires --enable-auto-tool-choice',
        status=400,
        code="model_calls_no_tools",
        detail=f"this model's chat template has no tool calls that can be read: {_NO_TOOLS}",
        source="renderers/online_renderer.py, render_chat",
    ),
    ErrorRule(
        says=r"^tool_choice=(?P<choice>.+) requires --tool-call-parser",
        status=400,
        code="model_calls_no_tools",
        detail="tool_choice {choice} cannot be kept, since this model's chat template has no tool calls that can be "
        f"read: {_NO_TOOLS}",
        source="renderers/online_renderer.py, render_chat",
    ),
    ErrorRule(
        says=r"^(?:Cannot load local files without|The file path .+ must be a subpath of) `--allowed-local-media-path",
        status=400,
        code="file_address_refused",
        detail="files of this server are not read for a request: send the data itself, as a `data:` address in base64",
        source="multimodal/media/connector.py, _load_file_url",
    ),
    ErrorRule(
        says=r"^(?P<what>At most \d+ [^.]+ may be provided in one prompt\.) Set `--limit-mm-per-prompt`",
        status=400,
        code="too_many_inputs",
        detail="{what}",
        source="multimodal/processing/context.py, validate_num_items",
    ),
    ErrorRule(
        says=r"^The \w+ prompt contains a\(n\) (?P<what>\w+) item with (?P<tokens>\d+) embedding tokens, which exceeds "
        r"the pre-allocated encoder cache size (?P<most>\d+)",
        status=400,
        code="input_too_large",
        detail="one {what} of this request becomes {tokens} tokens, and at most {most} are held: send a smaller one",
        source="v1/engine/input_processor.py, _validate_model_input",
    ),
    ErrorRule(
        says=r"^You must set `--enable-(?:prompt|mm)-embeds` to input `(?P<field>\w+)`",
        status=400,
        code="field_not_served",
        detail="`{field}` is not taken: send the text or the data itself",
        source="renderers/chat_utils/content_parser.py, renderers/embed_utils.py, multimodal/processing/context.py",
    ),
    ErrorRule(
        says=r"^(?:Chat template is passed with request, but|chat_template_kwargs\..+) .*--trust-request-chat-template",
        status=400,
        code="field_not_served",
        detail="a chat template in a request is not taken: it is set when the appliance starts "
        "(--chat-template-file, APPLIANCE_CHAT_TEMPLATE_FILE)",
        source="renderers/online_renderer.py, _validate_chat_template; renderers/cohere.py",
    ),
    ErrorRule(
        says=r"^Per-request (?P<field>mm_processor_kwargs|media_io_kwargs) are disabled",
        status=400,
        code="field_not_served",
        detail="`{field}` is not taken: leave it out",
        source="entrypoints/generate/base/protocol.py",
    ),
    ErrorRule(
        says=r"^thinking_token_budget is set but reasoning_config",
        status=400,
        code="field_not_served",
        detail="`thinking_token_budget` is not taken, since this model's thoughts cannot be told from its answer: "
        "leave it out, and bound the answer with `max_completion_tokens`",
        source="v1/engine/input_processor.py, _validate_params",
    ),
    ErrorRule(
        says=r"^(?P<field>trace_decode_token_ids) is set but",
        status=400,
        code="field_not_served",
        detail="`{field}` is not taken: leave it out",
        source="v1/engine/input_processor.py, _validate_params",
    ),
    ErrorRule(
        says=r"^(?:Try switching the model's pooling_task|The '[^']+' pooling task is only available)",
        status=400,
        code="field_not_served",
        detail="this model does not do the `task` that the request names: leave `task` out",
        source="entrypoints/pooling/pooling/serving.py, io_processor.py",
    ),
    ErrorRule(
        says=r"(?s)^(?P<what>.+?)\.? (?:Set max_logprobs \(--max-logprobs\)|"
        r"To increase this limit, set the VLLM_\w+ environment variable|Set VLLM_\w+ to increase this limit)",
        status=400,
        code="limit_exceeded",
        detail="{what}",
        source="sampling_params.py; entrypoints/openai/completion/protocol.py",
    ),
    ErrorRule(
        says=r"^This vLLM engine does not support `store=True` and therefore does not support the background mode",
        status=400,
        code="field_not_served",
        detail="`background` is not taken, since answers are not stored: leave it out, and read the stream",
        source="entrypoints/openai/responses/serving.py, create_responses",
    ),
    ErrorRule(
        says=r"^The model does not support (?P<what>.+? API)",
        status=400,
        code="not_supported",
        detail="this model does not answer at the {what}: `capabilities` and `architecture` in /v1/models say what it "
        "does",
        source="entrypoints/openai/*/api_router.py, entrypoints/pooling/*/api_router.py",
    ),
    ErrorRule(
        says=r"(?P<what>.+)",
        of_status=501,
        status=400,
        code="not_supported",
        detail="{what}",
        source="entrypoints/serve/exception_handling/utils/error_response.py: NotImplementedError is 501",
    ),
)
