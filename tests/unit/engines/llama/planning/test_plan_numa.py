"""NUMA: where threads run on machines with several memory nodes, and what the engine is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.arguments.numa import cpu_mask, usable_nodes
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import arguments
from appliance.errors import ConfigError
from appliance.plan import Plan
from appliance.probe import GpuProbe, Hardware
from appliance.settings import resolve_settings
from tests.builders import facts_for, model
from tests.golden.machines import MACHINES

TWO = MACHINES["2-socket"]
WITHOUT_GPU = replace(TWO, gpus=GpuProbe(), gpu_requested=False)
SECOND = "ffffff000000ffffff000000"  # CPUs 24 to 47 and 72 to 95


def space(hardware: Hardware, of: str = "gpt-oss-120b", quantization: str = "MXFP4", **flags: str) -> Space:
    image, engine = facts_for(hardware)
    return Space(resolve_settings(flags, {}), image, engine, hardware, model(of, quantization))


def flags_of(plan: Plan, hardware: Hardware) -> dict[str, str]:
    _, engine = facts_for(hardware)
    argv = arguments(plan, engine, Path("/tmp/s"))
    names = ("--numa", "--cpu-mask", "--cpu-mask-batch", "--threads")
    return {name: argv[argv.index(name) + 1] for name in names if name in argv}


def reason(plan: Plan) -> Any:
    return next((choice for choice in plan.choices if choice.name == "numa"), None)


def test_experts_beside_a_gpu_are_computed_on_its_node() -> None:
    best = space(TWO).best
    assert best.placement.cpu_expert_layers
    assert flags_of(best, TWO) == {"--cpu-mask": SECOND, "--cpu-mask-batch": SECOND, "--threads": "24"}
    assert reason(best).value == "node 1"
    assert reason(best).reason.startswith("threads stay on the GPU's node")


def test_without_a_gpu_threads_are_dealt_out_to_all_nodes() -> None:
    best = space(WITHOUT_GPU, "llama-3.1-8b", "Q4_K_M").best
    assert flags_of(best, WITHOUT_GPU) == {"--numa": "distribute", "--threads": "48"}


@pytest.mark.thorough
def test_every_way_is_among_what_is_measured_and_another_plan() -> None:
    found = {launch_of(plan).numa for plan in space(TWO).all()}
    assert found == {"node", "distribute", "isolate", "off"}
    keys = {plan.key for plan in space(WITHOUT_GPU, "llama-3.1-8b", "Q4_K_M").all() if launch_of(plan).threads == 48}
    assert len(keys) >= 3


def test_weights_that_one_node_cannot_hold_are_spread_over_all() -> None:
    small = replace(TWO, numa=tuple(replace(node, memory_mib=16000) for node in TWO.numa))
    assert launch_of(space(small).best).numa == "distribute"


def test_a_plan_that_is_all_on_the_gpu_needs_none_of_it() -> None:
    best = space(TWO, "llama-3.1-8b", "Q4_K_M").best
    assert (launch_of(best).numa, reason(best)) == ("off", None)
    assert set(flags_of(best, TWO)) == {"--threads"}


@pytest.mark.parametrize("mode", ["distribute", "isolate", "numactl", "off"])
@pytest.mark.parametrize("machine", ["2-socket", "cpu-16g"])
def test_what_is_asked_for_is_done_on_one_node_too(mode: str, machine: str) -> None:
    here = space(MACHINES[machine], "llama-3.1-8b", "Q4_K_M", numa=mode, gpu_layers="0")
    assert flags_of(here.best, MACHINES[machine]).get("--numa") == (None if mode == "off" else mode)
    assert len({launch_of(plan).numa for plan in here.all()}) == 1


def test_one_node_has_nothing_of_it_and_keeps_its_keys() -> None:
    best = space(MACHINES["cpu-16g"], "llama-3.1-8b", "Q4_K_M").best
    assert launch_of(best).numa is None
    assert [name for name, _ in launch_of(best).knobs] == ["threads", "ubatch", "load_mode"]


def test_a_process_whose_cpus_fit_on_one_node_has_one() -> None:
    assert len(usable_nodes(TWO)) == 2
    pinned = replace(TWO, cpu=replace(TWO.cpu, logical=48, physical=24))
    assert usable_nodes(pinned) == ()
    assert usable_nodes(replace(TWO, numa=(TWO.numa[0], replace(TWO.numa[1], cpus=())))) == ()


def test_an_engine_without_the_flag_refuses_the_setting_and_plans_without_it() -> None:
    image, engine = facts_for(WITHOUT_GPU)
    old = replace(engine, flags=tuple(flag for flag in engine.flags if flag not in ("--numa", "--cpu-mask")))
    of = model("llama-3.1-8b", "Q4_K_M")
    with pytest.raises(ConfigError, match="setting numa is not offered by this engine: 'isolate'"):
        _ = Space(resolve_settings({"numa": "isolate"}, {}), image, old, WITHOUT_GPU, of).best
    assert launch_of(Space(resolve_settings({}, {}), image, old, WITHOUT_GPU, of).best).numa == "off"


def test_a_mask_is_hexadecimal() -> None:
    assert cpu_mask((0, 1, 4)) == "13"
