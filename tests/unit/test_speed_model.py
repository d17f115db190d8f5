"""Published speeds and what the planner predicts for them: benchmarks/speed_model.py."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from appliance.engines.llama.planning.hardware.rates import card_rates, class_of, cpu_rates
from appliance.engines.llama.planning.memory.memory import layers_of
from appliance.engines.llama.planning.placement.intervals import SPREADS
from appliance.engines.llama.planning.placement.roofline import Roofline
from appliance.model import Model
from appliance.model.shapes.described import describe_shape
from appliance.probe import Gpu
from benchmarks.speed_model import (
    AIM_BIAS,
    AIM_MEDIAN,
    AIM_WITHIN,
    AIM_WORST,
    GROUP_ROWS,
    Compared,
    bias_of,
    by_group,
    compare,
    is_held_out,
    load_data,
    main,
    spreads,
)
from tests.builders import device
from tests.shapes import PUBLISHED

DATA = load_data()
A100 = Gpu(
    index=0, name="NVIDIA A100-SXM4-80GB", uuid="GPU-0", sm="80", vram_total_mib=81920, vram_free_mib=81000,
    pci_bus_id=None, sm_count=108, sm_clock_mhz=1410, power_limit_w=400.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return compare(DATA)


def test_half_of_the_results_are_held_out_by_a_rule_and_each_names_its_source() -> None:
    assert len(DATA.results) >= 300
    assert [result.held_out for result in DATA.results] == [is_held_out(result) for result in DATA.results]
    assert 0.4 < statistics.mean(result.held_out for result in DATA.results) < 0.6
    assert len({result.key for result in DATA.results}) == len(DATA.results)
    for result in DATA.results:
        assert result.source.startswith(("https://", "docs/figures.md"))
        assert result.date[:2] == "20"
        assert result.figure > 0


@pytest.mark.thorough
def test_results_that_were_never_fitted_are_predicted(compared: list[Compared]) -> None:
    """Only results that others published are judged. Our own are not: a model of 135 M on two cores of a Xeon
    (docs/figures.md)."""
    held = _held(compared)
    assert len(held) > 130
    assert statistics.median(abs(row.error) for row in held) <= AIM_MEDIAN
    assert max(abs(row.error) for row in held) <= AIM_WORST
    assert {row.result.machine for row in compared if row.result.is_own} == {"xeon-2", "xeon-2-amx"}


@pytest.mark.thorough
def test_no_group_of_results_is_predicted_too_high_or_too_low(compared: list[Compared]) -> None:
    groups = {name: rows for name, rows in by_group(_held(compared)).items() if len(rows) >= GROUP_ROWS}
    assert len(groups) >= 8
    assert {name: bias_of(rows) for name, rows in groups.items() if abs(bias_of(rows)) > AIM_BIAS} == {}


@pytest.mark.thorough
def test_intervals_hold_four_in_five_results_that_were_never_fitted(compared: list[Compared]) -> None:
    held = _held(compared)
    assert AIM_WITHIN[0] <= sum(row.is_within for row in held) / len(held) <= AIM_WITHIN[1]
    assert spreads(compared) == SPREADS


def test_a_result_is_left_out_for_what_it_is_and_still_listed(compared: list[Compared]) -> None:
    left_out = [row.result for row in compared if row.result.left_out]
    assert len(left_out) < 0.05 * len(compared)
    assert {(result.left_out or "").partition(" ")[0] for result in left_out} == {"built"}


def test_results_collected_since_the_fit_are_judged_apart(
    compared: list[Compared], capsys: pytest.CaptureFixture[str]
) -> None:
    """The published figures count no row twice, and the later ones are printed with an error of their own."""
    later = [row for row in compared if row.result.since_fit]
    assert len(later) >= 30
    assert not [row for row in later if row.is_judged or row.result.left_out]
    assert len({row.result.machine for row in later}) >= 10
    assert main(["--only", "rtx-4070-ti-super-250w|*"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^later, held out +8 results: median error", printed, re.MULTILINE)
    assert re.search(r"^later, to be fitted +4 results: median error", printed, re.MULTILINE)


def _held(compared: list[Compared]) -> list[Compared]:
    return [row for row in compared if row.is_judged and row.result.held_out]


@pytest.mark.thorough
def test_experts_in_host_memory_are_predicted_on_machines_of_several_kinds(compared: list[Compared]) -> None:
    held = [row for row in _held(compared) if row.result.cpu_expert_layers]
    assert len({row.result.machine for row in held}) >= 7
    for is_prefill in (False, True):
        errors = [abs(row.error) for row in held if row.result.is_prefill is is_prefill]
        assert len(errors) >= 8
        assert statistics.median(errors) < 0.2
        assert max(errors) < 0.35


def test_a_prompt_uses_some_experts_often_and_others_never() -> None:
    """A prompt of 512 tokens with 4 experts each used 72 to 95 of 128 experts, fewer in later layers
    (llama.cpp#15346)."""
    model = describe_shape(PUBLISHED["gpt-oss-120b"], Path("gpt-oss-120b.gguf"), "MXFP4")
    layer, card = layers_of(model)[0], device()
    whole_ms = layer.expert_bytes / (card.upload_gb_s * 1e6)
    roofline = Roofline(model=model, kv_type="f16", ubatch=512, dram_gb_s=50.0, upload=card)
    used = {
        tokens: replace(roofline, ubatch=tokens, prompt=tokens).experts_on_cpu(layer, card).copy_ms / whole_ms
        for tokens in (1, 64, 512, 4096)
    }
    assert used[1] == pytest.approx(4 / 128)
    assert 72 < used[512] * 128 < 95
    assert used[1] < used[64] < used[512] < used[4096] < 1


@pytest.mark.parametrize("machine", ["h100-80g", "a100-80g", "v100", "a30", "titan-v"])
def test_cards_with_hbm_are_bound_by_what_they_unpack_and_predicted_so(machine: str, compared: list[Compared]) -> None:
    (found,) = [r for r in compared if r.result.machine == machine and r.result.test == "tg128"]
    assert abs(found.error) < 0.25


def test_prefill_goes_by_multiprocessors_and_clock_and_a_starved_card_is_slower() -> None:
    whole = card_rates(A100, 2039.0)
    half = card_rates(replace(A100, sm_count=54), 2039.0)
    slow = card_rates(replace(A100, sm_clock_mhz=705), 2039.0)
    starved = card_rates(replace(A100, power_limit_w=100.0), 2039.0)
    assert half.tflops < 0.6 * whole.tflops
    assert slow.tflops == pytest.approx(whole.tflops / 2)
    assert 0.3 * whole.tflops < starved.tflops < 0.6 * whole.tflops
    assert whole.gb_s == half.gb_s == starved.gb_s


def test_a_token_takes_as_long_as_its_weights_are_read_or_unpacked() -> None:
    """Twice the bandwidth of an HBM card brings nothing where its multiprocessors unpack as fast as they can: an H200
    decodes quantized weights no faster than an H100. Of 16-bit weights there is nothing to unpack."""
    model = describe_shape(PUBLISHED["llama-3.1-8b"], Path("8b.gguf"), "Q4_0")
    plain = describe_shape(PUBLISHED["llama-3.1-8b"], Path("8b.gguf"), "F16")

    def read_ms(model: Model, gb_s: float, weights_g_s: float | None) -> float:
        card = replace(device(), bandwidth_gb_s=gb_s, weights_g_s=weights_g_s)
        roofline = Roofline(model=model, kv_type="f16", ubatch=512, dram_gb_s=50.0)
        return roofline.on_gpu(layers_of(model)[0], card).gpu_ms

    assert read_ms(model, 4000.0, 2000.0) == read_ms(model, 8000.0, 2000.0) > read_ms(model, 8000.0, None)
    assert read_ms(model, 1000.0, 2000.0) == read_ms(model, 1000.0, None)
    assert read_ms(plain, 8000.0, 2000.0) == read_ms(plain, 8000.0, None)


def test_attention_of_cores_takes_longer_with_the_prompt() -> None:
    """A CP8180 reads 4,096 tokens at 0.6 of the speed of 512: no core computes attention in 8 bits."""
    model = describe_shape(PUBLISHED["llama-3.1-8b"], Path("8b.gguf"), "Q4_0")
    cpu = cpu_rates(("avx2",), 8, 60.0)
    roofline = Roofline(model=model, kv_type="f16", ubatch=512, dram_gb_s=60.0, cpu=cpu)
    costs = roofline.on_cpu(layers_of(model)[0])
    assert 1.1 < costs.prefill_ms(4096, 2048) / 8 / costs.prefill_ms(512, 256) < 1.6
    rounded = replace(roofline, kv_type="q8_0").on_cpu(layers_of(model)[0])
    assert rounded.prefill_depth_us > 5 * costs.prefill_depth_us


ARM, AVX2, AVX512 = ("asimd", "asimddp", "i8mm"), ("avx2",), ("avx2", "avx512f", "avx512_vnni", "avx512vbmi")


@pytest.mark.parametrize(
    ("type_name", "isa", "has_many"),
    [
        ("Q2_K", ARM, False),
        ("Q2_K", AVX512, True),
        ("Q6_K", ARM, True),
        ("Q6_K", AVX512, False),
        ("Q6_K", (*AVX512, "amx_int8"), True),
        ("Q4_K", ARM, True),
        ("Q4_K", AVX2, True),
        ("Q4_K", (), False),
        ("IQ3_S", (*AVX512, "amx_int8"), False),
    ],
)
def test_types_without_kernels_for_many_tokens_on_these_cores_go_token_by_token(
    type_name: str, isa: tuple[str, ...], has_many: bool
) -> None:
    """Decode of such a type is bound by arithmetic too where the memory is fast."""
    model = describe_shape(PUBLISHED["llama-3.1-8b"], Path("8b.gguf"), type_name)
    layer = layers_of(model)[0]
    slow, fast = (
        Roofline(model=model, kv_type="f16", ubatch=512, dram_gb_s=gb_s, cpu=cpu_rates(isa, 4, gb_s)).on_cpu(layer)
        for gb_s in (2.0, 10_000.0)
    )
    assert fast.cpu_ms < slow.cpu_ms
    is_bound = fast.cpu_ms > 4 * slow.cpu_ms * 2.0 / 10_000.0
    assert is_bound is not has_many
    assert (fast.cpu_prefill_ms == fast.cpu_ms) is not has_many


def test_a_card_of_unknown_size_is_predicted_from_its_bandwidth() -> None:
    known, unknown = card_rates(A100, 2039.0), card_rates(replace(A100, sm_count=None), 2039.0)
    assert unknown.tflops == pytest.approx(known.tflops, rel=0.3)
    assert card_rates(replace(A100, sm=None), 200.0).tflops > 0


def test_a_slice_has_no_power_of_its_own() -> None:
    cut = replace(A100, sm_count=42, mig_profile="3g.40gb")
    assert card_rates(cut, 1000.0) == card_rates(replace(cut, power_limit_w=None), 1000.0)


def test_cards_of_newer_kinds_count_as_the_next_older_one() -> None:
    assert class_of("103") == class_of("90")
    assert class_of("122") == class_of("121")
    assert class_of("50") == class_of("60")
    assert class_of("x") == class_of(None) == class_of("60")


def test_a_turing_card_without_tensor_cores_is_known_by_its_name() -> None:
    t4 = replace(A100, name="Tesla T4", sm="75")
    assert card_rates(replace(t4, name="NVIDIA GeForce GTX 1660"), 192.0).tflops < card_rates(t4, 192.0).tflops / 5


def test_unequal_cores_are_predicted_by_the_kinds_that_their_machine_has(compared: list[Compared]) -> None:
    """Small cores that count as large made the CP8180's prompt 4.6 times as fast as it is."""
    unequal = {name for name, machine in DATA.machines.items() if "groups" in machine.get("cpu", {})}
    assert unequal == {"cp8180", "dragon-q8b", "i3-1315u"}
    for name in unequal:
        facts = DATA.machines[name]["cpu"]
        assert sum(cores for _, cores in facts["groups"]) == facts["cores"]
    rows = [row for row in compared if row.result.machine in unequal]
    assert len(rows) == 12
    assert max(abs(row.error) for row in rows) < 0.3


def test_arm_cores_of_phones_and_laptops_are_slower_than_those_of_servers() -> None:
    isa = ("asimd", "asimddp", "i8mm")
    v2, a720, unknown = (cpu_rates(isa, 8, 60.0, part=part) for part in ("0x41.0xd4f", "0x41.0xd81", None))
    assert a720.tflops(8) < v2.tflops(8) / 2
    assert unknown == v2
    assert a720.gb_s(8) < v2.gb_s(8)
    # Without its matrix products, as an engine without kernels for them sees it
    plain = ("asimd", "asimddp")
    assert cpu_rates(plain, 8, 60.0, part="0x41.0xd81").tflops(8) == cpu_rates(plain, 8, 60.0).tflops(8)


def test_memory_saturates_with_cores_and_arithmetic_grows_with_them() -> None:
    found = {cores: cpu_rates(("avx2",), cores, 64.0) for cores in (2, 8, 16)}
    decode = {cores: cpu.gb_s(cores) for cores, cpu in found.items()}
    assert decode[2] < decode[8] <= decode[16] == 64.0
    assert found[16].tflops(16) == pytest.approx(8 * found[2].tflops(2))
    assert cpu_rates(("avx2", "avx512_vnni"), 8, 64.0).tflops(8) > found[8].tflops(8)
    # Zen 4 and what came after Cascade Lake keep more reads under way, at the same arithmetic
    cascade_lake, zen_4 = (cpu_rates(isa, 8, 96.0) for isa in (("avx512_vnni",), ("avx512_vnni", "avx512vbmi")))
    assert cascade_lake.gb_s(8) < zen_4.gb_s(8) / 2
    assert cascade_lake.tflops(8) == zen_4.tflops(8)
    assert cpu_rates((), 8, 64.0).tflops(8) < found[8].tflops(8)


@pytest.mark.thorough
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "rtx-4080|*"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("ggml-org/llama.cpp/discussions/15013") == 2
    assert printed.endswith(": met\n")
    assert main(["--only", "xeon-2|*"]) == 0
    assert re.search(r"^measured here +2 results: median error", capsys.readouterr().out, re.MULTILINE)


def test_a_missed_aim_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"machine": "rtx-4080", "model": "llama-3.1-8b", "quantization": "Q4_0", "test": "tg128", "figure": 1.0}
    row |= {"source": "https://example.org", "date": "2026-11-23", "held_out": True}
    data = {"machines": {"rtx-4080": DATA.machines["rtx-4080"]}, "models": {}, "results": [row]}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(data), "utf-8")
    assert main(["--data", str(tmp_path / "data.yaml")]) == 1
    assert capsys.readouterr().out.endswith(": missed\n")


def test_a_glob_that_matches_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nothing"])
    assert ended.value.code == 2
    assert "no result matches: nothing" in capsys.readouterr().err
