"""Slots for experts as the planner offers them, and the settings about experts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.engines.engine import ExpertFiles, Install
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.arguments.loader_check import Projection, refine
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.experts import keep_experts, rates_upkeep
from appliance.engines.llama.process.server import arguments, command, parse_allocated
from appliance.errors import ConfigError, ModelDoesNotFitError, VolumeError
from appliance.image_facts import EngineFacts
from appliance.model import Model
from appliance.moe.cost import Rates
from appliance.plan import Choice, Plan
from appliance.probe import GpuSpeed, Hardware, Speeds
from appliance.profile.record import parse_plan
from appliance.settings import resolve_settings
from tests.builders import examples, facts, machine, model
from tests.golden.machines import MACHINES
from tests.random_machines import gpu, layer_of, stacked, with_gpus

LAPTOP = ("laptop-5060", "qwen3-30b-a3b", "Q3_K_M")
IMAGE, ENGINE = facts(has_cuda=True)
OLD_ENGINE = replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if not flag.startswith("--moe-")))


def space(
    where: str | Hardware, shape: str | Model, quantization: str = "", *, engine: EngineFacts = ENGINE, **flags: Any
) -> Space:
    hardware = MACHINES[where] if isinstance(where, str) else where
    found = model(shape, quantization) if isinstance(shape, str) else shape
    return Space(resolve_settings(flags, {}), IMAGE, engine, hardware, found)


def told(plan: Plan) -> Choice | None:
    return next((choice for choice in plan.choices if choice.name == "moe_slots"), None)


def slotted(found: Space) -> list[Plan]:
    return [plan for plan in found.all() if launch_of(plan).slots]


def count_of(plan: Plan) -> int:
    slots = launch_of(plan).slots
    assert slots is not None
    return slots.count


def test_a_mixture_larger_than_the_gpu_is_measured_with_slots_and_predicted_without() -> None:
    found = space(*LAPTOP)
    assert launch_of(found.best).slots is None
    assert found.all()[0] is found.best
    choice = told(found.best)
    assert choice is not None
    assert "are measured beside it: modelled" in choice.reason
    assert "no GPU has run them yet" in choice.reason
    for part in ("slots a layer", "% hits", "MB copied", "tok/s (", "--n-cpu-moe ", "one prompt of Qwen3-30B-A3B"):
        assert part in choice.detail
    plan = slotted(found)[0]
    assert plan.context == found.best.context
    assert count_of(plan) >= 8
    assert ("moe_slots", count_of(plan)) in plan.knobs
    assert plan.placement.cpu_expert_layers == 48
    assert told(plan) == replace(choice, value=str(count_of(plan)), reason="measured beside others")
    assert plan.speed is not None
    assert plan.speed.decode_interval is None, "nothing was published of such plans"


def test_slots_shorten_the_predicted_decode_and_nothing_else() -> None:
    found = space(*LAPTOP)
    plan = slotted(found)[0]
    slots = launch_of(plan).slots
    assert slots is not None
    here, bare = found.costs(plan), found.costs(replace(plan, launch=replace(launch_of(plan), slots=None)))
    assert slots.speedup > 1.1
    assert here.decode_ms(0) < bare.decode_ms(0)
    assert here == replace(bare, cpu_ms=here.cpu_ms)


@pytest.mark.parametrize(
    ("where", "name", "quantization", "flags", "why"),
    [
        ("4090-measured", "qwen3.6-35b-a3b", "Q6_K", {}, "no routing of a qwen35moe model was recorded"),
        (*LAPTOP, {"moe_slots": "off"}, "asked for: experts in host memory are computed on the CPU"),
        (*LAPTOP, {"n_cpu_moe": "40"}, "n_cpu_moe decides what lies on the GPU (flag --n-cpu-moe)"),
        ("2x4090", "gpt-oss-120b", "MXFP4", {}, "their gain is modelled for one GPU only"),
    ],
)
def test_why_no_slots_are_measured(where: str, name: str, quantization: str, flags: dict[str, Any], why: str) -> None:
    found = space(where, name, quantization, **flags)
    choice = told(found.best)
    assert choice is not None
    assert (choice.value, choice.reason, choice.is_refusal) == ("off", why, False)
    assert not slotted(found)


def test_an_engine_without_the_flag_is_not_asked() -> None:
    found = space(*LAPTOP, engine=OLD_ENGINE)
    choice = told(found.best)
    assert choice is not None
    assert choice.reason == "the engine of this image has no --moe-slots"
    assert not slotted(found)
    with pytest.raises(ConfigError, match="the engine has no --moe-slots"):
        space(*LAPTOP, engine=OLD_ENGINE, moe_slots="16")


@pytest.mark.parametrize(
    ("where", "name", "quantization"),
    [
        ("cpu-16g", "qwen3-30b-a3b", "Q2_K"),
        ("h200", "gpt-oss-120b", "MXFP4"),
        ("laptop-5060", "llama-3.1-8b", "Q5_K_M"),
    ],
)
def test_nothing_is_said_of_slots_without_a_gpu_without_need_and_without_experts(
    where: str, name: str, quantization: str
) -> None:
    assert told(space(where, name, quantization).best) is None


@pytest.mark.parametrize(
    ("where", "name", "quantization", "why"),
    [
        ("cpu-16g", "qwen3-30b-a3b", "Q2_K", "there is no GPU to hold them"),
        ("h200", "gpt-oss-120b", "MXFP4", "all experts lie on the GPUs"),
        ("laptop-5060", "llama-3.1-8b", "Q5_K_M", "this model has no experts"),
        ("gb10", "qwen3-30b-a3b", "Q3_K_M", "GPU and host share one memory"),
    ],
)
def test_a_number_that_cannot_be_served_is_refused_with_the_reason(
    where: str, name: str, quantization: str, why: str
) -> None:
    choice = told(space(where, name, quantization, moe_slots="16").best)
    assert choice is not None
    assert (choice.value, choice.reason, choice.is_refusal) == ("off", why, True)
    assert choice.source == "flag --moe-slots"


def test_a_number_that_was_asked_for_is_served_at_once_and_kept() -> None:
    found = space(*LAPTOP, moe_slots="16")
    plan = found.best
    assert count_of(plan) == 16
    assert told(plan) == Choice(
        name="moe_slots",
        value="16",
        reason="asked for, and served although nothing was measured; speeds here are those without slots",
        source="flag --moe-slots",
        detail="rates of CPU and PCIe are those of each alone",
    )
    assert {count_of(each) for each in found.all()} == {16}
    smaller = found.at_context(plan, 16384)
    assert smaller is not None
    assert count_of(smaller) == 16
    again = found.now(plan)
    assert isinstance(again, Plan)
    assert launch_of(again).slots == launch_of(plan).slots


def test_more_slots_than_fit_and_fewer_than_a_token_uses_are_refused() -> None:
    with pytest.raises(
        ModelDoesNotFitError, match=r"moe_slots does not fit: 120 \(flag --moe-slots\) .* room for 23"
    ) as e:
        _ = space(*LAPTOP, moe_slots="120").best
    assert e.value.exit_code == 31
    with pytest.raises(ConfigError, match=r"below the 8 experts of one token: 7 \(flag --moe-slots\)"):
        space(*LAPTOP, moe_slots="7")
    assert count_of(space(*LAPTOP, moe_slots="6", experts_used="6").best) == 6


def test_a_replay_is_stretched_to_the_models_layers() -> None:
    layer, used = layer_of(dense_mib=20, expert_mib=800), 8
    shape = replace(stacked([layer] * 60, 40960, experts=128), architecture="qwen3moe", experts_used=used)
    held_mib = (shape.weights_bytes - shape.expert_bytes * 0.7) / 2**20
    hardware = replace(machine(total_mib=131072, logical=16, physical=8), speeds=Speeds(dram_gb_s=60.0))
    choice = told(space(with_gpus(hardware, [gpu(0, free_mib=int(held_mib) + 4000)]), shape).best)
    assert choice is not None
    of_layers = int(choice.detail.split("--n-cpu-moe ")[1].split()[0])
    assert of_layers > 36, "of 60 layers, where the replayed model has 48"
    assert float(choice.reason.split("modelled ")[1].split()[0]) < 3


def test_rates_that_were_measured_together_decide_and_bad_ones_are_ignored() -> None:
    hardware = MACHINES["laptop-5060"]
    uuid = hardware.gpus.gpus[0].uuid or ""

    def rates(pcie: float, dram: float) -> tuple[Rates, str]:
        speed = GpuSpeed(
            uuid=uuid,
            pinned_gb_s=25.0,
            pageable_gb_s=10.0,
            memory_gb_s=None,
            overlapped_pinned_gb_s=pcie,
            overlapped_dram_gb_s=dram,
        )
        measured = replace(hardware, speeds=Speeds(dram_gb_s=60.0, gpus=(speed,)))
        plan = space(measured, *LAPTOP[1:], moe_slots="16").best
        slots, choice = launch_of(plan).slots, told(plan)
        assert slots is not None
        assert choice is not None
        return slots.rates, choice.detail

    used, words = rates(20.0, 30.0)
    assert (used.pcie_gb_s, used.dram_gb_s) == (20.0, 50.0)
    assert words == "rates measured with CPU and PCIe at work at once"
    for pcie, dram in ((0.0, 30.0), (math.nan, 30.0), (20.0, -30.0)):
        used, words = rates(pcie, dram)
        assert (used.pcie_gb_s, used.cpu_gb_s) == (25.0, pytest.approx(49.2))
        assert words.startswith("the measured rates are ignored: a rate must be positive and finite: ")


@st.composite
def mixtures(draw: st.DrawFn) -> Model:
    """Mixtures of an architecture whose routing was recorded."""
    layer = layer_of(
        dense_mib=draw(st.sampled_from([20, 150])),
        expert_mib=draw(st.sampled_from([800, 2500])),
        k_elements=draw(st.sampled_from([256, 1024])),
    )
    dense = layer_of(dense_mib=200)
    stack = (*[dense] * draw(st.sampled_from([0, 0, 3])), *[layer] * draw(st.integers(2, 12)))
    return replace(
        stacked(stack, 40960, experts=128), architecture="qwen3moe", experts_used=draw(st.sampled_from([2, 8]))
    )


@given(st.data())
@settings(max_examples=examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_slots_always_fit_the_card_hold_a_tokens_experts_and_are_never_predicted(data: st.DataObject) -> None:
    shape = data.draw(mixtures())
    held_mib = (shape.weights_bytes - shape.expert_bytes * data.draw(st.sampled_from([0.7, 0.5, 0.3]))) / 2**20
    cards = [gpu(0, free_mib=int(held_mib) + 2500)] * data.draw(st.sampled_from([1, 1, 2]))
    dram_gb_s = data.draw(st.sampled_from([30.0, 60.0, 250.0]))
    hardware = replace(machine(total_mib=65536, logical=16, physical=8), speeds=Speeds(dram_gb_s=dram_gb_s))
    hardware = with_gpus(hardware, cards)
    asked: dict[str, Any] = data.draw(st.sampled_from([{}, {}, {"moe_slots": "8"}, {"moe_slots": "40"}]))
    try:
        found = space(hardware, shape, **asked)
        best = found.best
    except ModelDoesNotFitError:
        return
    assert asked or launch_of(best).slots is None
    for plan in {best.key: best, **{plan.key: plan for plan in slotted(found)}}.values():
        slots = launch_of(plan).slots
        if slots is None:
            continue
        assert shape.experts_used <= slots.count
        assert len(slots.mib) == len(plan.placement.shares)
        for share in plan.placement.shares:
            assert share.memory.total <= share.gpu.free_mib
        held = [layer for layer in shape.stack[: plan.placement.cpu_expert_layers] if layer.expert_bytes]
        on_cpu = [layer for layer in shape.stack[: plan.placement.cpu_layers] if layer.expert_bytes]
        bytes_of_one = sum(layer.expert_bytes for layer in held) - sum(layer.expert_bytes for layer in on_cpu)
        assert sum(slots.mib) == pytest.approx((min(slots.count, 128) + 1) * bytes_of_one / 128 / 2**20)


def test_the_engine_gets_the_slots_and_a_whole_file_of_rates(tmp_path: Path) -> None:
    plan = space(*LAPTOP, moe_slots="16").best
    install = Install(engine_dir=tmp_path, facts=ENGINE, cache_dir=tmp_path / "cache")
    started = command(plan, install, tmp_path / "e.sock")
    assert started.argv[started.argv.index("--moe-slots") + 1] == "16"
    path = Path(started.argv[started.argv.index("--moe-rates") + 1])
    assert not path.exists()
    assert started.upkeep is not None
    started.upkeep.begin()
    slots = launch_of(plan).slots
    assert slots is not None
    assert Rates(**json.loads(path.read_text())) == slots.rates
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing is left beside it"
    written = path.stat().st_ino
    started.upkeep.begin()
    assert path.stat().st_ino == written, "a restart writes nothing"
    path.write_text("{}")
    started.upkeep.begin()
    assert json.loads(path.read_text())["pcie_gb_s"] == slots.rates.pcie_gb_s
    bare = space(*LAPTOP).best
    assert rates_upkeep(bare, tmp_path) is None
    assert "--moe-slots" not in command(bare, install, tmp_path / "e.sock").argv


def test_a_volume_that_takes_no_rates_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "experts").write_text("a file in the place of the folder")
    upkeep = rates_upkeep(space(*LAPTOP, moe_slots="16").best, tmp_path)
    assert upkeep is not None
    with pytest.raises(VolumeError, match="rates of this machine cannot be written") as e:
        upkeep.begin()
    assert e.value.exit_code == 50


def test_only_an_engine_that_serves_keeps_uses_and_routes(tmp_path: Path) -> None:
    install = Install(engine_dir=tmp_path, facts=ENGINE, cache_dir=tmp_path)
    files = ExpertFiles(uses=tmp_path / "a.uses", trace=tmp_path / "a.csv")
    slots = command(space(*LAPTOP, moe_slots="16").best, install, tmp_path / "e")
    bare = command(space(*LAPTOP).best, install, tmp_path / "e")
    more = keep_experts(slots, ENGINE, files).argv[len(slots.argv) :]
    assert more == ("--moe-uses", str(files.uses), "--moe-trace", str(files.trace), "--metrics")
    assert keep_experts(bare, ENGINE, replace(files, trace=None)) == bare
    assert keep_experts(bare, ENGINE, files).argv[len(bare.argv) :] == ("--moe-trace", str(files.trace))


def test_a_plan_with_slots_is_read_back_from_a_profile() -> None:
    plan = space(*LAPTOP, moe_slots="16").best
    document: Any = json.loads(json.dumps(asdict(plan)))
    assert parse_plan(document) == plan
    document["launch"]["slots"]["rates"]["pcie_gb_s"] = -1
    with pytest.raises(ValueError, match="a rate must be positive"):
        parse_plan(document)


def test_the_loaders_figures_leave_the_slots_in() -> None:
    plan = space(*LAPTOP, moe_slots="16").best
    share = plan.placement.shares[0]
    slots = launch_of(plan).slots
    assert slots is not None
    sizes = (share.memory.weights - slots.mib[0], share.memory.kv + share.memory.state, share.memory.compute)
    (found,) = refine([plan], [Projection(devices=(sizes,), host=(0.0, 0.0, 0.0))])
    assert found.placement.shares[0].memory.weights == pytest.approx(share.memory.weights)


def test_the_log_counts_slots_as_weights() -> None:
    line = "0.00.852.532 I allocate:      CUDA0     expert slots =   123.50 MiB (12 a layer)"
    found = parse_allocated([line])
    assert (found.model, found.devices) == (123.5, (("CUDA0", 123.5),))


def test_fewer_experts_are_an_override_of_the_file_and_make_decode_faster() -> None:
    usual, fewer = space(*LAPTOP), space(*LAPTOP, experts_used="4")
    argv = arguments(fewer.best, ENGINE, Path("/tmp/e.sock"))
    assert argv[argv.index("--override-kv") + 1] == "qwen3moe.expert_used_count=int:4"
    assert "--override-kv" not in arguments(usual.best, ENGINE, Path("/tmp/e.sock"))
    assert fewer.costs(fewer.best).decode_ms(0) < usual.costs(usual.best).decode_ms(0)
    choice = next(choice for choice in fewer.best.choices if choice.name == "experts_used")
    assert (choice.value, choice.source) == ("4", "flag --experts-used")
    assert "answers change" in choice.reason


def test_fewer_experts_and_a_longer_context_are_one_argument() -> None:
    flags: dict[str, Any] = {"experts_used": "4", "ctx_size": "65536", "rope_scaling": "yarn"}
    argv = arguments(space(*LAPTOP, **flags).best, ENGINE, Path("/tmp/e.sock"))
    assert argv.count("--override-kv") == 1
    values = argv[argv.index("--override-kv") + 1]
    assert values == "qwen3moe.context_length=int:65536,qwen3moe.expert_used_count=int:4"


@pytest.mark.parametrize(
    ("name", "quantization", "flags", "says"),
    [
        (
            "qwen3-30b-a3b",
            "Q3_K_M",
            {"experts_used": "9"},
            "above the 8 that the model was trained with: 9",
        ),
        (
            "llama-3.1-8b",
            "Q5_K_M",
            {"experts_used": "2"},
            "experts_used is 2 (flag --experts-used), and this",
        ),
        (
            "llama-3.1-8b",
            "Q5_K_M",
            {"trace_experts": "on"},
            "trace_experts is on (flag --trace-experts), and",
        ),
        (
            "qwen3-30b-a3b",
            "Q3_K_M",
            {"engine_arg": "--override-kv qwen3moe.expert_used_count=int:2"},
            "a key that the setting experts_used stands for",
        ),
        ("qwen3-30b-a3b", "Q3_K_M", {"engine_arg": "--moe-trace a.csv"}, "that the setting trace_experts stands for"),
    ],
)
def test_settings_that_the_model_cannot_take_are_refused_before_the_start(
    name: str, quantization: str, flags: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as e:
        space("laptop-5060", name, quantization, **flags)
    assert says in e.value.message
    assert e.value.hint
    assert e.value.exit_code == 10


@pytest.mark.parametrize("flags", [{"moe_slots": "some"}, {"moe_slots": "0"}, {"experts_used": "0"}])
def test_values_that_are_no_numbers_of_slots_or_experts(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        resolve_settings(flags, {})


def test_a_trace_needs_an_engine_that_records() -> None:
    with pytest.raises(ConfigError, match="the engine has no --moe-trace"):
        space(*LAPTOP, engine=OLD_ENGINE, trace_experts="on")
