"""Energy and clocks of described GPUs, through the real child. No GPU is here: only the fake NVML was seen."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.probe import Hardware, probe
from appliance.probe.gpu.nvidia import query_gpus
from appliance.probe.load.meter import Meter
from appliance.run import Dialog, RunTimeout
from tests.process.stages.nvml import PutMachine

NOWHERE = Path("/nowhere")
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"


@pytest.fixture
def hardware() -> Hardware:
    return probe(NOWHERE, {})


def meter_on(hardware: Hardware, put: PutMachine, tmp_path: Path, name: str, **knobs: object) -> Meter:
    """Return a meter of a described machine whose CPUs tell nothing."""
    environment = put(name, **knobs)
    seen = query_gpus(Path("/"), environment, timeout_s=60)
    return Meter(replace(hardware, gpus=seen), environment, seen.gpus, root=tmp_path, first_s=5)


def test_joules_are_those_of_all_gpus_since_the_first_reading(
    hardware: Hardware, machine_environment: PutMachine, tmp_path: Path
) -> None:
    meter = meter_on(
        hardware, machine_environment, tmp_path, "2x4090", gpu__0__energy_mj="5000,6500", gpu__1__energy_mj="100,600"
    )
    assert meter.last is None
    first = meter.read()
    assert (first.joules, meter.watts, meter.why_unknown) == (0.0, None, "")
    assert meter.read(fresh_s=60) is first
    time.sleep(1)
    second = meter.read()
    assert second.joules == 2.0
    watts = meter.watts
    assert watts is not None
    assert 2.0 / 5.0 < watts < 2.0
    meter.rest()
    assert meter.read().joules is not None  # another child
    meter.stop()


def test_clocks_and_reasons_are_read_with_it(
    hardware: Hardware, machine_environment: PutMachine, tmp_path: Path
) -> None:
    knobs = {"sm_clock_mhz": 2000, "sm_clock_now": 500, "reasons": 0x40, "utilization": 90}
    meter = meter_on(
        hardware, machine_environment, tmp_path, "h200", **{f"gpu__0__{name}": value for name, value in knobs.items()}
    )
    (gpu,) = meter.read().gpus
    assert (gpu.clock_share, gpu.reasons, gpu.utilization, gpu.joules) == (0.25, 0x40, 90, None)
    assert meter.why_unknown == "the driver tells no energy of GPU 0"
    meter.stop()


def test_a_slice_has_no_energy_of_its_own(hardware: Hardware, machine_environment: PutMachine, tmp_path: Path) -> None:
    meter = meter_on(hardware, machine_environment, tmp_path, "a100-mig", gpu__0__energy_mj=5)
    assert meter.read().joules is None
    assert "not of a MIG slice" in meter.why_unknown
    meter.stop()


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_a_driver_that_hangs_or_crashes_is_given_up(
    hardware: Hardware, machine_environment: PutMachine, tmp_path: Path, fault: str
) -> None:
    meter = meter_on(hardware, machine_environment, tmp_path, "h200", **{f"{fault}__{ENERGY}": 1})
    assert meter.read().joules is None
    assert meter.why_unknown == meter.problem != ""
    began = time.monotonic()
    assert meter.read().gpus == ()  # it is not asked again
    assert time.monotonic() - began < 1
    meter.stop()


def test_a_refused_reading_is_unknown(hardware: Hardware, machine_environment: PutMachine, tmp_path: Path) -> None:
    meter = meter_on(
        hardware, machine_environment, tmp_path, "h200", **{"gpu__0__energy_mj": 5, f"return__{ENERGY}": 4}
    )
    assert meter.read().joules is None
    assert meter.why_unknown == "the driver tells no energy of GPU 0"
    meter.stop()


def test_a_child_that_ends_or_stays_silent_is_told_apart() -> None:
    silent = Dialog((sys.executable, "-c", "import time; time.sleep(600)"))
    with pytest.raises(RunTimeout):
        silent.ask("", timeout_s=0.1)
    silent.close()
    silent.close()
    gone = Dialog((sys.executable, "-c", ""))
    with pytest.raises(OSError, match=r"without an answer|Broken pipe"):
        gone.ask("", timeout_s=60)
    gone.close()
