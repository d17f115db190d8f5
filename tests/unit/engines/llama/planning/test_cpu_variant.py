"""Which CPU variant serves, and what each needs: the table against the engine's own CMakeLists.txt."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from appliance.engines.llama.planning.hardware.cpu_variant import choose_kernels, runnable_variants
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import parse_variants
from appliance.errors import ConfigError, CpuUnsupportedError, EngineArgumentsError
from appliance.image_facts import CpuVariant, dump_facts, parse_engine_facts
from appliance.plan import Plan, RuledOut, with_measured
from appliance.probe import Cpu
from appliance.profile import make_key
from appliance.settings import resolve_settings
from images.matrix.matrix import load
from tests.builders import DIGEST, IMAGE, SMALL, facts, machine, with_variants
from tests.random_machines import gpu, with_gpus

ROOT = Path(__file__).parents[5]
TABLE = yaml.safe_load((ROOT / "appliance/engines/llama/process/cpu_variants.yaml").read_text())
CMAKE = (ROOT / "tests/data/llama-cpu-variants.cmake").read_text()
AUTO = resolve_settings({}, {})
HASWELL = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")
CASCADELAKE = (*HASWELL, "avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw", "avx512_vnni")
BUILT = ("x64", "haswell", "alderlake", "skylakex", "cascadelake", "icelake", "zen4", "sapphirerapids")
# ggml-cpu/arch/x86/cpu-feats.cpp and arch/arm/cpu-feats.cpp: the bit of each feature in the score.
BITS = {"FMA": 0, "F16C": 1, "SSE42": 2, "BMI2": 3, "AVX": 4, "AVX2": 5, "AVX_VNNI": 6, "AVX512": 7, "AVX512_VBMI": 8,
        "AVX512_BF16": 9, "AVX512_VNNI": 10, "AMX_INT8": 11, "DOTPROD": 1, "FP16_VECTOR_ARITHMETIC": 2, "SVE": 3,
        "MATMUL_INT8": 4, "SVE2": 5, "SME": 6}  # fmt: skip


def cpu(*isa: str) -> Cpu:
    return replace(machine().cpu, isa=tuple(sorted(isa)))


def test_the_table_is_what_the_engine_is_compiled_from() -> None:
    rows = re.findall(r"ggml_add_cpu_backend_variant\((\S+?)\s*((?: \S+)*)\)", re.sub(r" +", " ", CMAKE))
    assert len(rows) == 22
    assert {name: words.split() for name, words in rows} == {
        name: features for part in TABLE.values() for name, features in part["variants"].items()
    }


@pytest.mark.parametrize("part", TABLE)
def test_the_order_is_that_of_the_engine_s_own_score(part: str) -> None:
    scores = [sum(1 << BITS.get(f, 63) for f in fs if f in BITS) for fs in TABLE[part]["variants"].values()]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_every_variant_that_can_be_built_is_in_the_table() -> None:
    engine = load(ROOT).engines["llama"]
    for platform, offered in engine.cpu_variants.items():
        assert set(offered.offered) == set(TABLE[platform.removeprefix("linux/")]["variants"])
    assert set(engine.cpu_variants) == {"linux/amd64", "linux/arm64"}


@pytest.mark.parametrize(
    ("isa", "chosen", "lacking"),
    [
        ((), "x64", "haswell needs sse4_2, avx, f16c, fma, avx2, bmi2"),
        (("sse4_2", "avx"), "x64", "haswell needs f16c, fma, avx2, bmi2"),
        (HASWELL, "haswell", "alderlake needs avx_vnni"),
        ((*HASWELL, "avx_vnni"), "alderlake", "skylakex needs avx512f"),
        (CASCADELAKE, "cascadelake", "icelake needs avx512vbmi"),
        ((*CASCADELAKE, "avx512vbmi", "avx512_bf16"), "zen4", "sapphirerapids needs amx_tile, amx_int8"),
        ((*CASCADELAKE, "avx512vbmi", "avx512_bf16", "amx_tile", "amx_int8"), "sapphirerapids", ""),
    ],
)
def test_the_fastest_that_the_kernel_says_can_run_serves(isa: tuple[str, ...], chosen: str, lacking: str) -> None:
    found = choose_kernels(AUTO, with_variants(*BUILT), cpu(*isa))
    assert found.variant == chosen
    assert found.choice
    assert (found.choice.name, found.choice.source) == ("cpu_variant", "probe")
    assert lacking in found.choice.reason
    assert set(found.isa) <= set(isa)


def test_what_was_ruled_out_is_passed_over_with_what_was_seen() -> None:
    out = RuledOut(seen={"cascadelake": "the kernel check died of SIGILL", "zen4": "never here"}, where="/d/f.json")
    found = choose_kernels(AUTO, with_variants(*BUILT), cpu(*CASCADELAKE), out)
    assert found.variant == "skylakex"
    assert "cascadelake is ruled out: the kernel check died of SIGILL" in (found.choice.reason if found.choice else "")


def test_no_variant_that_runs_is_22_with_what_is_lacking() -> None:
    with pytest.raises(CpuUnsupportedError, match=r"kernels need: avx2, bmi2, f16c, fma \(test\)") as caught:
        choose_kernels(AUTO, with_variants("haswell", "zen4"), cpu("sse4_2", "avx"))
    assert caught.value.exit_code == 22


def test_all_ruled_out_is_22_with_what_each_died_of() -> None:
    out = RuledOut(seen={"x64": "wrong results", "haswell": "died of SIGILL"}, where="/data/f.json")
    with pytest.raises(CpuUnsupportedError, match=r"haswell: died of SIGILL; x64: wrong results") as caught:
        choose_kernels(AUTO, with_variants("x64", "haswell", "zen4"), cpu(*HASWELL), out)
    assert "remove /data/f.json" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("asked", "words", "hint"),
    [
        ("zen4", "this CPU lacks avx512f", "this CPU runs x64, haswell"),
        ("hasswell", "this image has no such variant", "this CPU runs x64, haswell"),
        ("x64", "ruled out on this CPU: it died", "remove /data/f.json"),
    ],
)
def test_a_variant_that_was_asked_for_and_cannot_be_used_is_10(asked: str, words: str, hint: str) -> None:
    settings = resolve_settings({"cpu_variant": asked}, {})
    out = RuledOut(seen={"x64": "it died"} if asked == "x64" else {}, where="/data/f.json")
    with pytest.raises(ConfigError, match=words) as caught:
        choose_kernels(settings, with_variants("x64", "haswell", "zen4"), cpu(*HASWELL), out)
    assert f"'{asked}' (flag --cpu-variant)" in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == 10


def test_one_that_was_asked_for_is_taken() -> None:
    settings = resolve_settings({}, {"APPLIANCE_CPU_VARIANT": "x64"})
    found = choose_kernels(settings, with_variants("x64", "haswell"), cpu(*HASWELL))
    assert (found.variant, found.choice.source if found.choice else "") == ("x64", "variable APPLIANCE_CPU_VARIANT")


def test_an_engine_without_variants_is_left_to_choose() -> None:
    found = choose_kernels(AUTO, with_variants(), cpu(*HASWELL))
    assert (found.variant, found.choice, set(found.isa)) == (None, None, set(HASWELL))
    with pytest.raises(ConfigError, match="no CPU variants to choose from"):
        choose_kernels(resolve_settings({"cpu_variant": "x64"}, {}), with_variants(), cpu())


def test_arm_has_variants_of_its_own() -> None:
    engine = with_variants("armv8.0_1", "armv8.2_2", "armv8.6_2")
    assert choose_kernels(AUTO, engine, cpu("asimd")).variant == "armv8.0_1"
    assert choose_kernels(AUTO, engine, cpu("asimd", "asimddp", "asimdhp")).variant == "armv8.2_2"
    every = ("asimd", "asimddp", "asimdhp", "sve", "i8mm", "bf16", "sve2")
    assert [variant.name for variant in runnable_variants(engine, cpu(*every))] == [v.name for v in engine.cpu_variants]


def test_facts_of_a_build_name_the_variants_that_are_there() -> None:
    table = (ROOT / "appliance/engines/llama/process/cpu_variants.yaml").read_text()
    names = ("libggml-cpu-zen4.so", "libggml-cuda.so", "libggml-cpu-x64.so")
    assert [variant.name for variant in parse_variants(names, table)] == ["x64", "zen4"]
    with pytest.raises(EngineArgumentsError, match=r"no entry in cpu_variants\.yaml: rocketlake"):
        parse_variants(("libggml-cpu-rocketlake.so",), table)
    engine = with_variants("x64", "haswell")
    assert parse_engine_facts(dump_facts(engine)) == engine
    assert engine.cpu_variants[0] == CpuVariant(name="x64", isa=())


@pytest.mark.parametrize("variants", ["7", '"x"', "[7]", '[{"name": "x"}]', '[{"name": "x", "isa": [], "more": 1}]'])
def test_facts_with_variants_that_are_none_are_refused(variants: str) -> None:
    text = dump_facts(with_variants()).replace('"cpu_variants": []', f'"cpu_variants": {variants}')
    with pytest.raises(ValueError, match=r"EngineFacts.*cpu_variants"):
        parse_engine_facts(text)


def test_a_profile_is_of_one_variant() -> None:
    keys = [make_key(AUTO, IMAGE, machine(), DIGEST, cpu_variant=name) for name in ("x64", "haswell")]
    assert keys[0].id != keys[1].id
    assert keys[1].changed(keys[0].parts) == ("cpu_variant: x64 -> haswell",)


def test_the_next_fastest_is_measured_beside_it_once_it_was_checked() -> None:
    engine, amx = with_variants(*BUILT), cpu(*CASCADELAKE, "avx512vbmi", "avx512_bf16", "amx_tile", "amx_int8")
    found = choose_kernels(AUTO, engine, amx)
    assert found.variants == ("sapphirerapids", "zen4")
    assert found.candidate is None
    known = RuledOut(checked=frozenset({"zen4", "x64"}))
    candidate = choose_kernels(AUTO, engine, amx, known).candidate
    assert candidate
    assert candidate.choice
    assert (candidate.variant, candidate.choice.value) == ("zen4", "zen4")
    assert set(candidate.isa) < set(amx.isa)
    without = choose_kernels(AUTO, engine, amx, replace(known, seen={"zen4": "it died"}))
    assert without.variants == ("sapphirerapids", "icelake")


def test_there_is_no_next_where_one_was_asked_for_or_is_the_only_one() -> None:
    asked = resolve_settings({"cpu_variant": "haswell"}, {})
    assert choose_kernels(asked, with_variants(*BUILT), cpu(*CASCADELAKE)).variants == ("haswell",)
    assert choose_kernels(AUTO, with_variants("x64", "zen4"), cpu(*HASWELL)).variants == ("x64",)


def space_with(*checked: str, gpu_mib: int = 0) -> Space:
    """Return a space on a CPU that runs zen4 and haswell."""
    here = replace(machine(), cpu=cpu(*CASCADELAKE, "avx512vbmi", "avx512_bf16"))
    if gpu_mib:
        here = with_gpus(here, [gpu(0, free_mib=gpu_mib)])
    image, engine = facts(has_cuda=gpu_mib > 0)
    engine = replace(engine, cpu_variants=with_variants("haswell", "zen4").cpu_variants)
    kernels = choose_kernels(AUTO, engine, here.cpu, RuledOut(checked=frozenset(checked)))
    return Space(AUTO, image, engine, here, SMALL, kernels=kernels)


def test_the_space_has_the_best_plan_with_the_next_fastest_as_well() -> None:
    space = space_with("haswell")
    of = {name: [plan for plan in space.all() if plan.cpu_variant == name] for name in ("zen4", "haswell")}
    assert space.best == of["zen4"][0]
    assert all(dict(plan.knobs)["cpu_variant"] == name for name, plans in of.items() for plan in plans)
    (same,) = (plan for plan in of["haswell"] if {**dict(plan.knobs), "cpu_variant": "zen4"} == dict(space.best.knobs))
    assert space.costs(same).cpu_prefill_ms > space.costs(space.best).cpu_prefill_ms
    assert [c.value for c in same.choices if c.name == "cpu_variant"] == ["haswell"]
    smaller = space.at_context(same, 4096)
    assert smaller
    assert (smaller.cpu_variant, smaller.context) == ("haswell", 4096)
    assert space.now(same) == same
    measured = with_measured(same, "the fastest of 2 measured", [space.best, same])
    assert [c.reason for c in measured.choices if c.name == "cpu_variant"] == ["the fastest of 2 measured"]


def test_what_was_not_checked_or_has_nothing_to_do_is_not_in_the_space() -> None:
    unchecked = space_with()
    assert {plan.cpu_variant for plan in unchecked.all()} == {"zen4"}
    assert "cpu_variant" not in dict(unchecked.best.knobs)
    on_gpu = space_with("haswell", gpu_mib=8000)
    assert on_gpu.best.placement.is_whole
    assert {plan.cpu_variant for plan in on_gpu.all()} == {"zen4"}


def test_a_plan_of_a_variant_that_may_serve_no_more_is_of_the_usual_one() -> None:
    """A firmware update can take a variant away. Measurements of that variant are not told of the plan that replaces
    it."""
    (haswell, *_) = (plan for plan in space_with("haswell").all() if plan.cpu_variant == "haswell")
    found = space_with().now(haswell)
    assert isinstance(found, Plan)
    assert found.cpu_variant == "zen4"
    assert "cpu_variant" not in dict(found.knobs)
    assert with_measured(found, "the fastest", [haswell, found]).choices == found.choices
