"""Whether a GPU computes while no process is seen to work, by what the child that looks at GPUs prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

from appliance.engines.gpu_work import gpus_at_work
from appliance.probe.load.load import GpuLoad, GpuLoads
from tests.process.stages.nvml import PutMachine

OURS = ("GPU-a", "GPU-b")


def looks(*utilizations: dict[str, int | None]) -> GpuLoads:
    samples = tuple(
        tuple(GpuLoad(index=at, uuid=uuid, utilization=found) for at, (uuid, found) in enumerate(each.items()))
        for each in utilizations
    )
    return GpuLoads(samples=samples)


@pytest.mark.parametrize(
    ("report", "is_at_work"),
    [
        (looks({"GPU-a": 100, "GPU-b": 0}, {"GPU-a": 97, "GPU-b": 0}), True),
        (looks({"GPU-a": 100, "GPU-b": 0}, {"GPU-a": 0, "GPU-b": 100}), False),
        (looks({"GPU-a": 100}, {"GPU-a": 1}), False),
        (looks({"GPU-other": 100}, {"GPU-other": 100}), False),
        (looks({"GPU-a": None}, {"GPU-a": None}), False),
        (GpuLoads(problem="NVML: not found"), False),
        (GpuLoads(), False),
    ],
)
def test_a_gpu_of_ours_that_computes_all_the_time_is_at_work(report: GpuLoads, is_at_work: bool) -> None:
    child = (sys.executable, "-c", f"print({json.dumps(asdict(report))!r})")
    assert gpus_at_work(OURS, {}, child=child) is is_at_work


@pytest.mark.parametrize("child", [("/nonexistent",), (sys.executable, "-c", "import time; time.sleep(600)")])
def test_one_that_cannot_be_asked_or_never_answers_is_not(child: tuple[str, ...]) -> None:
    assert gpus_at_work(OURS, {}, child=child) is False


def test_the_real_child_answers(machine_environment: PutMachine) -> None:
    assert gpus_at_work(OURS, machine_environment("2x4090")) is False
