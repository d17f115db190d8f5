"""KV cache size that the running server reports in the labels of `vllm:cache_config_info`, compared with its log."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from appliance.engines.vllm.api.routes import METRICS_PATH
from appliance.engines.vllm.planning.arguments.launch import launch_of
from appliance.engines.vllm.startup.ready import answer_of
from appliance.plan import Allocated, Plan
from appliance.values import dataclass

_TIMEOUT_S = 5.0  # short, since the server has just answered a request
_GAUGE = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_NUMBER = re.compile(rb'(\w+)="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV cache of one rank. A field is None if this version of vLLM does not report it."""

    blocks: int | None = None
    block_size: int | None = None
    tokens: int | None = None  # capacity for all requests together


def parse_cache_config(answer: bytes) -> CacheConfig:
    """Read the gauge from an answer of `/metrics`. All fields are None if the gauge is missing."""
    found = _GAUGE.search(answer)
    told = {name: int(value) for name, value in _NUMBER.findall(found[1])} if found else {}
    return CacheConfig(
        blocks=told.get(b"num_gpu_blocks"),
        block_size=told.get(b"block_size"),
        tokens=told.get(b"kv_cache_size_tokens"),
    )


async def query_cache_config(socket_path: Path) -> CacheConfig:
    """Ask the server. All fields are None if it does not answer."""
    return parse_cache_config(await query_metrics(socket_path))


async def query_metrics(socket_path: Path) -> bytes:
    """Return the answer of the engine's `/metrics`; empty if the server does not answer."""
    try:
        return await ask_metrics(socket_path)
    except OSError:
        return b""


async def ask_metrics(socket_path: Path) -> bytes:
    """Like `query_metrics`, but raises OSError if this process lacks a resource such as file descriptors: that says
    nothing about the engine."""
    request = f"GET {METRICS_PATH} HTTP/1.0\r\nHost: engine\r\n\r\n".encode()  # 1.0: the answer comes in one piece
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer = await answer_of(socket_path, request)
    except (TimeoutError, ValueError):  # ValueError: the answer is not HTTP
        answer = None
    return answer[1] if answer else b""


def confirmed(plan: Plan, allocated: Allocated, told: CacheConfig) -> tuple[Allocated, tuple[str, ...]]:
    """Return the log's sizes with the server's number of tokens, which its scheduler uses, and a sentence for each
    disagreement between log, server and plan."""
    launch, said = launch_of(plan), []
    if told.tokens is not None and allocated.kv_tokens not in (0, told.tokens):
        said.append(f"its log has {allocated.kv_tokens:,} tokens, its metrics {told.tokens:,}")
    if told.block_size is not None and told.block_size != launch.block_size:
        said.append(f"its blocks have {told.block_size:,} tokens, and {launch.block_size:,} were predicted")
    # Compared only if the plan gives the cache in bytes; otherwise the engine sizes the cache by the memory it finds
    # free.
    elif launch.kv_bytes is not None and told.blocks is not None and told.blocks != launch.blocks:
        said.append(f"it has {told.blocks:,} blocks, and {launch.blocks:,} were predicted")
    return replace(allocated, kv_tokens=told.tokens or allocated.kv_tokens), tuple(said)
