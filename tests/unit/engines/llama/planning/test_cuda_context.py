"""What is held back of a GPU: the CUDA context as published, and room beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.hardware.cuda_context import PUBLISHED, context_mib, held_back_mib
from appliance.engines.llama.planning.hardware.devices import usable_devices
from appliance.probe import Gpu
from tests.builders import facts
from tests.golden.machines import MACHINES

CARD = replace(MACHINES["2x4090"].gpus.gpus[0], display=False)


@pytest.mark.parametrize(("sm_count", "mib", "driver", "source"), PUBLISHED)
def test_no_published_context_is_larger_than_planned_or_far_below(
    sm_count: int, mib: int, driver: str | None, source: str
) -> None:
    sm = "100" if "B200" in source else "89"
    assert mib <= context_mib(replace(CARD, sm_count=sm_count, sm=sm)) <= 1.15 * mib, (source, driver)


@given(st.one_of(st.none(), st.integers(1, 200)), st.booleans(), st.sampled_from(["75", "89", "100", "103", "120"]))
def test_the_margin_is_never_below_llama_cpps_own_and_keeps_room_beside_the_context(
    sm_count: int | None, display: bool, sm: str
) -> None:
    gpu: Gpu = replace(CARD, sm_count=sm_count, display=display, sm=sm)
    held = held_back_mib(gpu)
    assert held >= 1024
    assert held - context_mib(gpu) >= 512 + (256 if display else 0) - 1e-6
    assert context_mib(gpu) > 0


def test_devices_tell_the_context_apart_from_the_margin() -> None:
    hardware = MACHINES["2x4090"]
    large = replace(CARD, sm_count=188)
    hardware = replace(hardware, gpus=replace(hardware.gpus, gpus=(large,)))
    image, engine = facts(has_cuda=True)
    (device,), _ = usable_devices(hardware, image, engine)
    assert device.context_mib == pytest.approx(188 * 3.3)
    assert device.held_back_mib == pytest.approx(188 * 3.3 + 512)
    assert device.free_mib + device.held_back_mib == pytest.approx(large.vram_free_mib)
