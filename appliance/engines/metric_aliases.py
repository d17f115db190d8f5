"""Names that boards and balancers of well-known servers look for, for values that our metrics have as well.

`vllm:` names are those of vLLM 0.33 (its docs/design/metrics.md); three of them are also the default names of the
endpoint picker of the Gateway API's inference extension. `llamacpp:` names are those of llama-server (its README.md).
"""

from __future__ import annotations

from appliance.engine_route import MetricAlias

_REASONS = (("tool_calls", "stop"), ("client_left", "abort"), ("stopped", "error"))


def _both(ours: str, *names: str) -> tuple[MetricAlias, ...]:
    return tuple(MetricAlias(name=name, ours=ours) for name in names)


METRIC_ALIASES = (
    *_both("appliance_requests_running", "vllm:num_requests_running", "llamacpp:requests_processing"),
    *_both("appliance_requests_waiting", "vllm:num_requests_waiting", "llamacpp:requests_deferred"),
    *_both("appliance_kv_cache_use", "vllm:kv_cache_usage_perc", "llamacpp:kv_cache_usage_ratio"),
    *_both("appliance_prompt_tokens_total", "vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    *_both("appliance_prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
    *_both("appliance_prompt_tokens_computed_total", "llamacpp:prompt_tokens_total"),
    *_both("appliance_generated_tokens_total", "vllm:generation_tokens_total", "llamacpp:tokens_predicted_total"),
    *_both("appliance_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    *_both("appliance_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
    *_both("appliance_request_seconds", "vllm:e2e_request_latency_seconds"),
    *_both("appliance_request_wait_seconds", "vllm:request_queue_time_seconds"),
    MetricAlias(
        name="vllm:request_success_total",
        ours="appliance_requests_finished_total",
        labels=(("ending", "finished_reason"),),
        values=_REASONS,
    ),
)
