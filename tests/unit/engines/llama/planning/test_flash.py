"""Flash attention only where the CUDA backend has a kernel for the model's heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.flash import why_no_kernel
from appliance.engines.llama.planning.memory.memory import compute_mib
from appliance.engines.llama.planning.space import Space
from appliance.errors import ConfigError
from appliance.model import Model
from appliance.model.architecture.stack import LayerKind
from appliance.plan import Costs, Plan
from appliance.settings import resolve_settings
from tests.builders import facts, model
from tests.golden.machines import MACHINES
from tests.shapes import PUBLISHED


def with_heads(key: int, value: int, *, heads: int, kv_heads: int, kind: LayerKind = "full") -> Model:
    """Return Llama 3.1 8B with attention of other sizes."""
    plain = model("llama-3.1-8b", "Q4_K_M")
    k, v = (key, 0) if kind == "mla" else (key * kv_heads, value * kv_heads)
    layers = tuple(replace(layer, kind=kind, k_elements=k, v_elements=v) for layer in plain.stack)
    kv = (kv_heads,) * plain.layers
    return replace(plain, stack=layers, heads=heads, kv_heads=kv, key_length=key, value_length=value)


STABLELM_12B: Mapping[str, Any] = {"key": 160, "value": 160, "heads": 32, "kv_heads": 8}
DEEPSEEK_EXPANDED: Mapping[str, Any] = {"key": 192, "value": 128, "heads": 32, "kv_heads": 32}  # no *_mla keys


@pytest.mark.parametrize(
    ("sizes", "has_kernel"),
    [
        (STABLELM_12B, False),
        (DEEPSEEK_EXPANDED, False),
        ({"key": 192, "value": 128, "heads": 64, "kv_heads": 8}, True),  # MiMo-V2
        ({"key": 192, "value": 192, "heads": 64, "kv_heads": 8}, False),
        ({"key": 128, "value": 128, "heads": 32, "kv_heads": 32}, True),
        ({"key": 128, "value": 64, "heads": 32, "kv_heads": 8}, False),
        ({"key": 512, "value": 512, "heads": 8, "kv_heads": 4}, True),
        ({"key": 512, "value": 512, "heads": 8, "kv_heads": 8}, False),
        ({"key": 320, "value": 256, "heads": 64, "kv_heads": 2}, True),
        ({"key": 320, "value": 256, "heads": 16, "kv_heads": 2}, False),
        ({"key": 576, "value": 512, "heads": 16, "kv_heads": 1, "kind": "mla"}, True),
        ({"key": 288, "value": 256, "heads": 40, "kv_heads": 1, "kind": "mla"}, False),  # MiniCPM3
    ],
)
def test_the_table_is_that_of_the_kernels(sizes: Mapping[str, Any], *, has_kernel: bool) -> None:
    assert (why_no_kernel(with_heads(**sizes)) is None) is has_kernel


@pytest.mark.thorough
def test_every_published_shape_has_a_kernel() -> None:
    assert [name for name in PUBLISHED if why_no_kernel(model(name, "Q4_K_M"))] == []


def planned(machine: str, of: Model, **flags: str) -> Plan:
    image, engine = facts(has_cuda=machine != "cpu-16g")
    return Space(resolve_settings(flags, {}), image, engine, MACHINES[machine], of).best


@pytest.mark.parametrize(
    ("sizes", "of_f16"),
    [
        ({"key": 128, "value": 128, "heads": 32, "kv_heads": 8}, 1.0),  # credited with no speed
        ({"key": 96, "value": 96, "heads": 32, "kv_heads": 32}, (1.0625 + 4) / 2),  # Phi-3
        ({"key": 576, "value": 512, "heads": 16, "kv_heads": 1, "kind": "mla"}, (1.0625 + 4) / 2),
    ],
)
def test_a_rounded_cache_is_converted_for_heads_without_a_vector_kernel(
    sizes: Mapping[str, Any], of_f16: float
) -> None:
    """The cost of the conversion counts: the cache is read, written as f16, and read again."""

    def planned_with(kv_type: str) -> Plan:
        return planned("2x4090", with_heads(**sizes), kv_type=kv_type, ctx_size="8192", devices="0")

    exact, rounded = planned_with("f16"), planned_with("q8_0")
    costs = [costs_of(plan, with_heads(**sizes)).gpu_depth_us for plan in (rounded, exact)]
    assert costs[0] / costs[1] == pytest.approx(of_f16, rel=1e-3)
    (why,) = [choice.reason for choice in rounded.choices if choice.name == "kv_type"]
    assert ("converted to f16 for every token" in why) is (of_f16 > 1)


def costs_of(plan: Plan, of: Model) -> Costs:
    image, engine = facts(has_cuda=True)
    return Space(resolve_settings({}, {}), image, engine, MACHINES["2x4090"], of).costs(plan)


@pytest.mark.parametrize("sizes", [STABLELM_12B, DEEPSEEK_EXPANDED])
def test_without_a_kernel_it_is_off_and_the_scores_are_counted(sizes: Mapping[str, Any]) -> None:
    of = with_heads(**sizes)
    found = planned("2x4090", of)
    assert not launch_of(found).flash_attention
    assert found.kv_type == "f16"
    (why,) = [choice.reason for choice in found.choices if choice.name == "flash_attention"]
    assert f"no kernel for K heads of {of.key_length}" in why
    scores = 4 * 512 * found.context * of.heads / 2**20
    assert all(share.memory.compute >= scores for share in found.placement.shares)
    assert launch_of(planned("cpu-16g", of)).flash_attention  # the CPU's takes any size


def test_a_quantized_cache_without_a_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"setting kv_type needs flash attention: 'q8_0' .*K heads of 160") as caught:
        planned("2x4090", with_heads(**STABLELM_12B), kv_type="q8_0")
    assert caught.value.hint == "use f16, or --devices none"
    assert planned("2x4090", with_heads(**STABLELM_12B), kv_type="q8_0", devices="none").kv_type == "q8_0"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "context", "ubatch", "seen"),
    [(8, 2, 4096, 512, 80.51), (8, 2, 16384, 512, 296.51), (8, 2, 8192, 1024, 305.02), (8, 2, 16384, 128, 74.13),
     (16, 16, 8192, 512, 286.01)],
)  # fmt: skip
def test_the_buffer_is_what_the_engine_took_without_it(
    heads: int, kv_heads: int, context: int, ubatch: int, seen: float
) -> None:
    """MiB that llama-server b11312 took with --flash-attn off, for a width of 1,024 and heads of 64 values."""
    plain = with_heads(64, 64, heads=heads, kv_heads=kv_heads)
    of = replace(plain, embedding_length=1024, feed_forward_length=3072)
    assert compute_mib(of, ubatch, context, has_flash=False) == pytest.approx(seen, rel=0.01)
