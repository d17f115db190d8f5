"""KV cache types of K and V, which may differ: "q8_0" means both, "q8_0/q4_0" means K and V."""

from __future__ import annotations


def k_and_v(kv_type: str) -> tuple[str, str]:
    k, _, v = kv_type.partition("/")
    return k, v or k
