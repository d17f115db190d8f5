"""Silent losses: each named only when figures show it, and never because a figure is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan import Plan
from appliance.plan.plan import Interval
from appliance.probe.load.load import GpuMoment
from appliance.profile import Profile, losses
from appliance.tune.figures.speeds import predicted_speeds
from tests.builders import PLANS, card, key, measured, profile
from tests.unit.profile.test_profile_store import Shelf, shelf

__all__ = ["shelf"]  # a fixture

HOT = GpuMoment(index=0, uuid="GPU-0", reasons=0x40, utilization=90, sm_clock_mhz=1000, sm_clock_max_mhz=2000)
COOL = replace(HOT, reasons=0)


def predicted(low: float) -> Plan:
    speed = PLANS[0].speed
    assert speed is not None
    return replace(PLANS[0], speed=replace(speed, decode_interval=Interval(low=low, high=2 * low)))


def measured_at(faster: float, *, build: str = "b1", **changes: object) -> Profile:
    best = PLANS[0]
    found = replace(profile(key(build)), measurements=(measured(best, faster=faster),))
    return replace(found, **changes)  # type: ignore[arg-type]


def kinds(found: object) -> list[str]:
    return [loss.kind for loss in found]  # type: ignore[attr-defined]


def test_a_narrow_slot_and_a_power_limit_are_named_with_both_figures() -> None:
    (narrow, limit) = losses.of_machine([card(pcie_width=4, power_limit_w=200.0)])
    assert (narrow.kind, narrow.what) == ("pcie_narrow", "GPU 0 has 4 PCIe lanes of 16")
    assert (limit.kind, limit.what) == ("power_limit", "GPU 0 is limited to 200 W, by default 350 W")
    assert kinds(losses.of_machine([card()])) == []
    unknown = card(pcie_width=None, pcie_width_max=None, power_limit_default_w=None)
    assert kinds(losses.of_machine([unknown])) == []


def test_a_plan_far_below_its_prediction_is_named() -> None:
    found = measured_at(1.0)
    told = predicted_speeds(PLANS[0])
    assert told is not None
    depth = told.at[0].depth
    curve_speed = 1000 / (depth / 7)  # of the builder's curve at the depth of a chat
    (loss,) = losses.of_speed(predicted(low=10 * curve_speed), found)
    assert loss.kind == "below_prediction"
    assert f"decodes {curve_speed:.1f} tok/s at {depth} tokens" in loss.what
    assert kinds(losses.of_speed(predicted(low=curve_speed), found)) == []


def test_speed_that_was_not_measured_on_a_quiet_machine_is_no_loss() -> None:
    slow = predicted(low=1e6)
    assert kinds(losses.of_speed(slow, None)) == []
    assert kinds(losses.of_speed(slow, measured_at(1.0, disturbance="others worked"))) == []
    assert kinds(losses.of_speed(slow, measured_at(1.0, measurements=()))) == []
    assert kinds(losses.of_speed(replace(slow, speed=None), measured_at(1.0))) == []


@pytest.mark.parametrize(("faster", "named"), [(1.0, []), (1.2, []), (1.5, ["slower_build"])])
def test_an_image_that_was_much_faster_is_named(faster: float, named: list[str]) -> None:
    now, before = measured_at(1.0), measured_at(faster, build="b0")
    found = list(losses.of_builds(now.plan, now, [before]))
    assert kinds(found) == named
    if found:
        assert "the image of build b0 decoded" in found[0].what


def test_figures_that_cannot_be_compared_with_an_earlier_image_are_no_loss() -> None:
    now, fast = measured_at(1.0), measured_at(9.0, build="b0")
    assert kinds(losses.of_builds(now.plan, now, [])) == []
    assert kinds(losses.of_builds(now.plan, None, [fast])) == []
    assert kinds(losses.of_builds(now.plan, now, [replace(fast, disturbance="others worked")])) == []
    assert kinds(losses.of_builds(now.plan, now, [replace(fast, mode="speed")])) == []


def test_profiles_of_other_images_are_found_by_everything_but_the_build(shelf: Shelf) -> None:
    shelf.store.save(profile(key("b0")))
    shelf.store.save(profile(key("b1")))
    shelf.store.save(profile(key("b0", memory_mib=1024)))
    shelf.store.save(profile(key("b0", threads="2")))
    assert [each.key for each in shelf.store.of_other_builds(key("b1"))] == [key("b0")]


def test_heat_is_named_once_it_lasts() -> None:
    assert kinds(losses.of_clocks([(HOT,), (HOT,)])) == []
    (loss,) = losses.of_clocks([(HOT,), (COOL,), (HOT,), (HOT,)])
    assert loss.what == "GPU 0 is slowed down (thermal slowdown by hardware), at 50% of its clock"
    assert kinds(losses.of_clocks([(HOT,), (COOL,), (COOL,), (COOL,)])) == []


def test_a_gpu_that_rests_or_tells_no_reasons_is_not_slowed_down() -> None:
    assert kinds(losses.of_clocks([(replace(HOT, utilization=3),)] * 5)) == []
    assert kinds(losses.of_clocks([(replace(HOT, utilization=None),)] * 5)) == []
    assert kinds(losses.of_clocks([(replace(HOT, reasons=None),)] * 5)) == []
    assert kinds(losses.of_clocks([(replace(HOT, reasons=0x4),)] * 5)) == []  # a power cap is how a GPU works
    assert kinds(losses.of_clocks([])) == []


def test_a_gpu_that_is_gone_is_named_with_the_drivers_reason() -> None:
    both = [card(0), card(1)]
    assert kinds(losses.of_missing(both, both)) == []
    (loss,) = losses.of_missing(both, [card(0), card(1, problem="lost (15)")], "NVML: lost")
    assert loss.what == "GPU 1 (Test 9000) is gone since the start: NVML: lost"
    assert kinds(losses.of_missing([card(0, uuid=None)], [])) == []
