"""The types of K and of V, which may differ: "q8_0" is both, "q8_0/q4_0" is K and V."""

from __future__ import annotations


def k_and_v(kv_type: str) -> tuple[str, str]:
    k, _, v = kv_type.partition("/")
    return k, v or k
