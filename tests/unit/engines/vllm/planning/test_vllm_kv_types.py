"""Types of the KV cache: what a checkpoint asks for, what a chip reads, what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.engines.vllm.planning.quantization import quantization_of
from appliance.errors import ConfigError, CpuUnsupportedError, NoKernelError
from appliance.model import Model
from appliance.probe import Hardware
from tests.golden.vllm_plans import arguments, hardware
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, SERVER, TURINGS, best, reason, space

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": SCHEME}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def stored_as(found: object, model: str = "qwen3-8b-fp8", **changes: Any) -> Model:
    made = folder_model(model)
    return replace(made, config={**made.config, "quantization_config": found}, **changes)


def cpu_with(*isa: str) -> Hardware:
    found = hardware(CPU)
    return replace(found, cpu=replace(found.cpu, isa=(*found.cpu.isa, *isa)))


def kv_flag(*args: Any, **flags: str) -> str | None:
    argv = arguments(best(*args, **flags))
    return argv[argv.index("--kv-cache-dtype") + 1] if "--kv-cache-dtype" in argv else None


@pytest.mark.parametrize(
    ("found", "kv_type", "forces"),
    [
        (COMPRESSED, "fp8_e4m3", True),
        (MODELOPT, "fp8_e4m3", False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}, "fp8_e4m3", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": [], "type": "float"}}, None, False),
        ({"quant_method": "fp8"}, None, False),
    ],
)
def test_what_a_checkpoint_says_of_its_cache(found: object, kv_type: str | None, forces: bool) -> None:
    stored = quantization_of({"quantization_config": found}, {})
    assert (stored.kv_type, stored.forces_kv_type) == (kv_type, forces)


@pytest.mark.parametrize(
    "model",
    [
        stored_as(COMPRESSED),
        stored_as(MODELOPT),
        stored_as({"quant_method": "fp8"}, has_kv_scales=True),
    ],
)
def test_a_checkpoint_with_scales_is_planned_with_its_type_and_names_it(model: Model) -> None:
    plan, plain = best(ADA, model), best(ADA)
    assert plan.kv_type == "fp8_e4m3"
    assert "the checkpoint carries the scales" in reason(plan, "kv_type")
    assert kv_flag(ADA, model) == "fp8_e4m3"
    assert plan.placement.shares[0].gpu == plain.placement.shares[0].gpu
    assert "of 32,768" in reason(plan, "block_size"), "half of the 65,536 of a page in 16 bits"


def test_scales_of_weights_in_16_bits_are_read_by_nobody() -> None:
    assert best(SERVER, replace(folder_model("qwen3-8b"), has_kv_scales=True)).kv_type == "bf16"


def test_what_the_engine_would_take_by_itself_is_named_where_the_chip_lacks_it() -> None:
    plan = best(TURINGS, stored_as({"quant_method": "fp8"}, has_kv_scales=True))
    assert plan.kv_type == "f16"
    assert "scales for fp8_e4m3, which SM 75 does not read" in reason(plan, "kv_type")
    assert kv_flag(TURINGS, stored_as({"quant_method": "fp8"}, has_kv_scales=True)) == "float16"
    assert kv_flag(ADA, stored_as(MODELOPT), kv_type="bf16") == "bfloat16"
    assert kv_flag(ADA) is None


def test_a_type_that_the_engine_takes_whatever_it_is_told_is_20_where_the_chip_lacks_it() -> None:
    with pytest.raises(NoKernelError) as caught:
        best(TURINGS, stored_as(COMPRESSED))
    assert caught.value.exit_code == 20
    assert "kv_cache_scheme makes vLLM take fp8_e4m3" in caught.value.message
    with pytest.raises(CpuUnsupportedError) as on_cpu:
        best(CPU, stored_as(COMPRESSED, "smollm2-135m"))
    assert on_cpu.value.exit_code == 22


def test_a_type_against_the_checkpoint_s_is_10() -> None:
    with pytest.raises(ConfigError) as caught:
        best(ADA, stored_as(COMPRESSED), kv_type="bf16")
    assert "'bf16' (flag --kv-type)" in caught.value.message
    assert caught.value.hint
    assert best(ADA, stored_as(COMPRESSED), kv_type="fp8").kv_type == "fp8"


@pytest.mark.parametrize("machine", [ADA, TURINGS, SERVER])
def test_nothing_below_8_bits_is_measured_unless_asked_for(machine: str) -> None:
    tried = {plan.kv_type for plan in space(machine).all()}
    assert len(tried) > 1
    assert not any(name.startswith(("int4", "nvfp4")) for name in tried)
    assert not {"fp8", "fp8_e4m3"} <= tried, "one type under two names"
    asked = space(machine, kv_type="int4_per_token_head").all()
    assert {plan.kv_type for plan in asked} == {"int4_per_token_head"}


def test_a_calibrated_checkpoint_is_measured_with_its_type_and_the_exact_one() -> None:
    assert {plan.kv_type for plan in space(ADA, stored_as(MODELOPT)).all()} == {"fp8_e4m3", "bf16"}
    assert {plan.kv_type for plan in space(ADA, stored_as(COMPRESSED)).all()} == {"fp8_e4m3"}


@pytest.mark.parametrize("isa", ["avx512f", "amx_tile"])
@pytest.mark.parametrize("kv_type", ["fp8", "fp8_e5m2"])
def test_fp8_on_a_cpu_needs_its_instruction_sets(isa: str, kv_type: str) -> None:
    assert best(cpu_with(isa), "smollm2-135m", kv_type=kv_type).kv_type == kv_type
    with pytest.raises(ConfigError) as caught:
        best(CPU, "smollm2-135m", kv_type=kv_type)
    assert caught.value.exit_code == 10
    assert "needs one of avx512f, amx_tile, which this CPU has not" in caught.value.message
    assert "use auto, or one of bf16" in (caught.value.hint or "")


def test_a_latent_cache_of_a_cpu_has_no_fp8() -> None:
    with pytest.raises(ConfigError):
        best(cpu_with("avx512f"), "deepseek-v2-lite", kv_type="fp8")


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"), [("F32", "bfloat16", 0.5), ("F32", "float32", 1), ("BF16", "float32", 2)]
)
def test_weights_count_in_the_type_that_serves(stored: str, dtype: str, factor: float) -> None:
    """Whatever config.json calls them."""
    model = folder_model("qwen3-8b")
    total = sum(size for _, size in model.bytes_by_type)
    held = replace(model, bytes_by_type=((stored, total),))
    plan = best(SERVER, held, engine_arg=f"--dtype {dtype}")
    expected = model.weights_bytes * factor / 2**20
    assert plan.placement.shares[0].memory.weights * len(plan.placement.shares) == pytest.approx(expected, rel=0.01)
