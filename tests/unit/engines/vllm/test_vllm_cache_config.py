"""The KV cache by `vllm:cache_config_info`, held against the log and the plan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.vllm.cache_config import CacheConfig, confirmed, parse_cache_config, query_cache_config
from appliance.plan import Allocated
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, best, launch

# Labels of 0.33.0: every field of its CacheConfig as a text (v1/metrics/loggers.py, `log_metrics_info`).
METRICS = b"""\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",gpu_memory_utilization="0.92",\
kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="4.015625",kv_cache_memory_bytes="757923840",\
kv_cache_size_tokens="32896",num_cpu_blocks="None",num_gpu_blocks="257",num_gpu_blocks_override="None"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="small"} 1.0
"""
TOLD = CacheConfig(blocks=257, block_size=128, tokens=32_896)
ON_CPU = best(CPU, "smollm2-135m")
LOGGED = Allocated(kv=722.8, kv_tokens=32_896)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (METRICS, TOLD),
        (METRICS.replace(b'kv_cache_size_tokens="32896",', b""), replace(TOLD, tokens=None)),  # older ones
        (METRICS.replace(b'"257"', b'"None"'), replace(TOLD, blocks=None)),  # of a model that has no cache
        (b"", CacheConfig()),
        (b"vllm:cache_config_info 1.0\n\xff", CacheConfig()),
        (b'# vllm:cache_config_info{block_size="16"} 1.0\n', CacheConfig()),
    ],
)
def test_what_the_labels_tell(answer: bytes, found: CacheConfig) -> None:
    assert parse_cache_config(answer) == found


def test_what_agrees_is_said_by_nobody() -> None:
    assert (launch(ON_CPU).blocks, launch(ON_CPU).block_size) == (TOLD.blocks, TOLD.block_size)
    assert confirmed(ON_CPU, LOGGED, TOLD) == (LOGGED, ())
    assert confirmed(ON_CPU, LOGGED, CacheConfig()) == (LOGGED, ())
    assert confirmed(ON_CPU, Allocated(), TOLD)[0].kv_tokens == 32_896  # its line of the log was lost


@pytest.mark.parametrize(
    "answer", [b"x" * 200_000, b"HTTP/1.0 " + b"2" * 5000 + b" OK\r\n\r\n", b"", b"HTTP/1.0 200 OK\r\n\r\nodd"]
)
async def test_an_answer_that_is_none_tells_nothing(answer: bytes, tmp_path: Path) -> None:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(say, tmp_path / "engine.sock"):
        assert await query_cache_config(tmp_path / "engine.sock") == CacheConfig()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (replace(TOLD, tokens=32_768), "its log has 32,896 tokens, its metrics 32,768"),
        (replace(TOLD, blocks=256), "it has 256 blocks, and 257 were predicted"),
        (replace(TOLD, block_size=16), "its blocks have 16 tokens, and 128 were predicted"),
    ],
)
def test_what_does_not_is_said_and_the_server_counts(told: CacheConfig, words: str) -> None:
    found, said = confirmed(ON_CPU, LOGGED, told)
    assert (found.kv_tokens, said) == (told.tokens, (words,))


def test_blocks_that_the_engine_itself_decides_are_no_surprise() -> None:
    plan = best(ADA)
    assert launch(plan).kv_bytes is None
    told = CacheConfig(blocks=launch(plan).blocks + 7, block_size=launch(plan).block_size)
    assert confirmed(plan, LOGGED, told) == (LOGGED, ())


def test_nobody_who_answers_tells_nothing(tmp_path: Path) -> None:
    assert asyncio.run(query_cache_config(tmp_path / "none.sock")) == CacheConfig()
