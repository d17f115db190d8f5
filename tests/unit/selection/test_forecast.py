"""What a choice of model assumes of host memory that was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.engines.engine import Inputs, load
from appliance.plan import Kernels
from appliance.probe import Speeds
from appliance.settings import resolve_settings
from tests.builders import ENGINE, IMAGE, SMALL, machine
from tests.golden.vllm_plans import hardware, inputs
from tests.shapes.folders import folder_model


def of_llama() -> Inputs:
    here = machine()
    return Inputs(
        settings=resolve_settings({}, {}),
        image=IMAGE,
        facts=ENGINE,
        hardware=here,
        model=SMALL,
        kernels=Kernels(variant=None, isa=here.cpu.isa),
    )


def of_vllm() -> Inputs:
    return inputs(hardware("cpu-16g"), folder_model("smollm2-135m"), {})


def decode_ms(given: Inputs) -> float:
    space = load(given.image.engine).space(given)
    return space.costs(space.predicted).cpu_ms


@pytest.mark.parametrize("given", [of_llama(), of_vllm()], ids=["llama", "vllm"])
def test_no_more_is_assumed_than_was_handed_over(given: Inputs) -> None:
    slow, usual = replace(given, dram_gb_s_max=7.0), replace(given, dram_gb_s_max=1000.0)
    assert decode_ms(slow) > 2 * decode_ms(given)
    assert decode_ms(usual) == decode_ms(given)


@pytest.mark.parametrize("given", [of_llama(), of_vllm()], ids=["llama", "vllm"])
def test_what_was_measured_is_not_assumed(given: Inputs) -> None:
    measured = replace(given, hardware=replace(given.hardware, speeds=Speeds(dram_gb_s=30.0, gpus=())))
    assert decode_ms(replace(measured, dram_gb_s_max=7.0)) == decode_ms(measured)
