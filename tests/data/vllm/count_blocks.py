"""Blocks and longest contexts of blocks-0.32.json by vLLM's own functions: run with vLLM's Python, never imported.

    PYTHONPATH=tests/data/vllm python count_blocks.py tests/data/vllm/blocks-0.32.json

No engine is started: the groups of its layers, the bytes of a block and the longest context come from
v1/core/kv_cache_utils.py, given specs that are made here, on the layout of its CPU build.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        row |= counted(row)
    text = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def counted(row: dict[str, Any]) -> dict[str, int]:
    utils = import_module("vllm.v1.core.kv_cache_utils")
    config = _config(row)
    groups = utils.get_kv_cache_groups(config, {f"l{at}": _spec(row, kind) for at, kind in enumerate(row["kinds"])})
    block_bytes = utils._pool_bytes_per_block(config, groups)
    # The null block is nobody's.
    longest = utils._estimate_max_model_len_from_groups(config, groups, row["kv_bytes"] - block_bytes)
    return {"blocks": row["kv_bytes"] // block_bytes, "longest": longest}


def _spec(row: dict[str, Any], kind: str) -> Any:
    specs, dtype = import_module("vllm.v1.kv_cache_interface"), import_module("torch").bfloat16
    heads = {"block_size": row["block_size"], "num_kv_heads": row["kv_heads"], "head_size": row["head_size"]}
    if kind == "full":
        return specs.FullAttentionSpec(**heads, dtype=dtype)
    if kind == "sliding":
        return specs.SlidingWindowSpec(**heads, dtype=dtype, sliding_window=row["window"])
    state = {"shapes": ((row["state_bytes"] // 2,),), "dtypes": (dtype,), "page_size_padded": row["page_bytes"]}
    return specs.MambaSpec(**state, block_size=row["block_size"], mamba_cache_mode="align")


def _config(row: dict[str, Any]) -> Any:
    """The part of vLLM's config that those functions read."""
    layout = import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBHNC
    cache = {"mamba_cache_mode": "align", "num_gpu_blocks_override": None, "block_size": row["block_size"]}
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=row["native"], supports_kv_cache_grouping=False),
        cache_config=SimpleNamespace(**cache, get_resolved_kv_cache_layout=lambda: layout),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        max_in_flight_tokens=row["in_flight"],
        speculative_config=None,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
