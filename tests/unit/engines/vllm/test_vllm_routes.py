"""The share of the KV cache that is in use, as vLLM's metrics tell it."""

from __future__ import annotations

import pytest

from appliance.engines.vllm.api.routes import METRICS_PATH, ROUTES, parse_kv_use
from appliance.engines.vllm.engine import ENGINE

# As 0.32.0 wrote it.
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="small"} 1.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.0027548209366391185
"""


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (METRICS, 0.0027548209366391185),
        ("vllm:kv_cache_usage_perc 5e-05\n", 5e-05),
        (f'{METRICS}vllm:kv_cache_usage_perc{{engine="1",model_name="small"}} 0.5\n', 0.5),
        ("vllm:kv_cache_usage_perc 1.0000001\n", 1.0),
    ],
)
def test_the_fullest_cache_is_told(answer: str, share: float) -> None:
    assert parse_kv_use(answer.encode()) == share


@pytest.mark.parametrize("answer", [b"", b"vllm:kv_cache_usage_perc", b"vllm:kv_cache_usage_perc many\n", b"\xff"])
def test_an_answer_without_it_is_a_value_error(answer: bytes) -> None:
    with pytest.raises(ValueError, match="tells of no KV cache"):
        parse_kv_use(answer)


def test_its_load_has_the_engines_own_names_and_no_client_asks_the_engine_for_them() -> None:
    names = {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
    assert names <= {alias.name for alias in ENGINE.metric_aliases}
    assert names <= {line.partition("{")[0] for line in METRICS.splitlines()}
    assert METRICS_PATH not in {path for route in ROUTES for path in (route.path, route.upstream)}
