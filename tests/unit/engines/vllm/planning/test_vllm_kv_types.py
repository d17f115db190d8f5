"""Types of the KV cache: what a checkpoint asks for, what a chip reads, what is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.engines.vllm.planning.model.quantization import quantization_of
from appliance.engines.vllm.planning.space import Space
from appliance.errors import ConfigError, ModelUnreadableError
from appliance.model import Model
from appliance.plan import Plan
from appliance.probe import Hardware
from tests.golden.vllm_plans import arguments, hardware
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, SERVER, TURINGS, best, reason, space, with_cards

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
    ("found", "kv_type"),
    [
        (COMPRESSED, "fp8_e4m3"),
        (MODELOPT, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME | {"dynamic": True}}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, None),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_what_a_checkpoint_says_of_its_cache(found: object, kv_type: str | None) -> None:
    stored = quantization_of({"quantization_config": found}, {})
    assert (stored.kv_type, stored.kv_problem) == (kv_type, None)


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (SCHEME | {"type": "int"}, "type 'int' with num_bits 8, and only float with 8 is known"),
        (SCHEME | {"num_bits": []}, "type 'float' with num_bits [], and only float with 8 is known"),
        (SCHEME | {"type": "x" * 9000}, "type '" + "x" * 39 + " with num_bits 8"),
        (SCHEME | {"strategy": "channel"}, "strategy 'channel', and only tensor and attn_head are known"),
        (SCHEME | {"symmetric": False}, "it is not symmetric"),
        ("fp8", "it is no object"),
    ],
)
def test_a_scheme_that_ends_the_engine_is_30_before_it_starts(scheme: object, said: str) -> None:
    with pytest.raises(ModelUnreadableError) as caught:
        best(ADA, stored_as(COMPRESSED | {"kv_cache_scheme": scheme}))
    assert caught.value.exit_code == 30
    assert "config.json: vLLM refuses its kv_cache_scheme: " + said in caught.value.message
    assert caught.value.hint


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


def test_the_checkpoint_s_own_type_gives_way_to_a_named_one() -> None:
    assert kv_flag(TURINGS, stored_as(COMPRESSED)) == "float16"
    assert kv_flag(CPU, stored_as(COMPRESSED, "smollm2-135m")) == "bfloat16"
    assert kv_flag(ADA, stored_as(COMPRESSED), kv_type="bf16") == "bfloat16"
    assert best(ADA, stored_as(COMPRESSED), kv_type="fp8").kv_type == "fp8"


@pytest.mark.parametrize("found", [COMPRESSED, MODELOPT, {"quant_method": "fp8"}])
def test_e5m2_is_not_offered_beside_weights_whose_scales_of_the_cache_are_loaded(found: object) -> None:
    """ "fp8_e5m2 kv-cache is not supported with fp8 checkpoints", which vLLM says after its imports."""
    assert "fp8_e5m2" not in {plan.kv_type for plan in space(ADA, stored_as(found)).all()}
    with pytest.raises(ConfigError) as caught:
        best(ADA, stored_as(found), kv_type="fp8_e5m2")
    assert caught.value.exit_code == 10
    assert "'fp8_e5m2' (flag --kv-type): beside weights in " in caught.value.message
    assert "fp8_e4m3" in (caught.value.hint or "")
    assert best(ADA, "qwen3-8b", kv_type="fp8_e5m2").kv_type == "fp8_e5m2"


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
    assert {plan.kv_type for plan in space(ADA, stored_as(COMPRESSED)).all()} == {"fp8_e4m3", "bf16"}


@pytest.mark.parametrize("isa", ["avx512f", "amx_tile"])
@pytest.mark.parametrize("kv_type", ["fp8", "fp8_e5m2"])
def test_fp8_on_a_cpu_needs_its_instruction_sets(isa: str, kv_type: str) -> None:
    assert best(cpu_with(isa), "smollm2-135m", kv_type=kv_type).kv_type == kv_type
    with pytest.raises(ConfigError) as caught:
        best(CPU, "smollm2-135m", kv_type=kv_type)
    assert caught.value.exit_code == 10
    assert "needs one of avx512f, amx_tile, which this CPU lacks" in caught.value.message
    assert "use auto, or one of bf16" in (caught.value.hint or "")


def test_a_latent_cache_of_a_cpu_has_no_fp8() -> None:
    with pytest.raises(ConfigError):
        best(cpu_with("avx512f"), "deepseek-v2-lite", kv_type="fp8")


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"), [("F32", "bfloat16", 0.5), ("F32", "float32", 1), ("BF16", "float32", 2)]
)
def test_weights_count_in_the_type_that_serves(stored: str, dtype: str, factor: float) -> None:
    """The type in config.json does not count."""
    model = folder_model("qwen3-8b")
    total = sum(size for _, size in model.bytes_by_type)
    held = replace(model, bytes_by_type=((stored, total),))
    plan = best(SERVER, held, engine_arg=f"--dtype {dtype}")
    expected = model.weights_bytes * factor / 2**20
    assert plan.placement.shares[0].memory.weights * len(plan.placement.shares) == pytest.approx(expected, rel=0.01)


def of_kind(kv_type: str, *args: Any) -> tuple[Space, Plan]:
    """Return a space and its first plan with this type of cache."""
    found = space(*args)
    return found, next(plan for plan in found.all() if plan.kv_type == kv_type)


@pytest.mark.parametrize(
    ("machine", "model", "kv_type"),
    [
        (ADA, "qwen3-8b-fp8", "fp8_e4m3"),
        (SERVER, "qwen3-30b-a3b", "int8_per_token_head"),
        (cpu_with("amx_tile"), "smollm2-135m", "fp8_e5m2"),
    ],
)
def test_a_cache_that_won_by_speed_is_compared_with_an_exact_one(
    machine: str | Hardware, model: str, kv_type: str
) -> None:
    here, plan = of_kind(kv_type, machine, model)
    exact = here.exact(replace(plan, speculation=here.speculation(plan, "ngram", 4)))
    assert exact is not None
    assert (exact.kv_type, exact.context, exact.speculation) == ("bf16", plan.context, None)
    changed = {name for name, value in dict(exact.knobs).items() if dict(plan.knobs)[name] != value}
    assert changed == {"kv_type"}
    assert here.exact(exact) is None, "exact itself"


def test_the_exact_cache_may_have_a_shorter_context() -> None:
    here, plan = of_kind("fp8_e4m3", with_cards(ADA, vram_free_mib=13000))
    exact = here.exact(plan)
    assert exact is not None
    assert 8192 <= exact.context < plan.context < 40960


def test_a_cache_that_somebody_asked_for_is_not_compared() -> None:
    asked = space(ADA, kv_type="fp8_e4m3")
    assert asked.exact(asked.best) is None
    scaled = space(ADA, stored_as(COMPRESSED))
    assert scaled.best.kv_type == "fp8_e4m3"
    assert scaled.exact(scaled.best) is None, "the checkpoint's own, with its scales"
