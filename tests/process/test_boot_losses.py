"""An appliance that loses speed without an error says so: on a described machine with a GPU, before a fake engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.nvml import PutMachine, laptop_home

HOT = {
    "gpu__0__pcie_width": 4,
    "gpu__0__pcie_width_max": 8,
    "gpu__0__sm_clock_mhz": 2000,
    "gpu__0__sm_clock_now": 500,
    "gpu__0__reasons": 0x40,
    "gpu__0__utilization": 90,
    "gpu__0__energy_mj": ",".join(str(1000 * at) for at in range(60)),
}


@pytest.fixture
def home(tmp_path: Path, machine_environment: PutMachine) -> Home:
    return laptop_home(tmp_path / "home", machine_environment("laptop-5060", **HOT))


def kinds(serving: Serving) -> set[str]:
    return {loss["kind"] for loss in serving.document("status")["losses"]}


def metric(serving: Serving, beginning: str) -> str | None:
    text: Any = serving.ask("GET", "/metrics", key=serving.home.key)[1]
    return next((line for line in text.splitlines() if line.startswith(beginning)), None)


def test_losses_and_energy_are_told_by_status_metrics_log_and_doctor(home: Home) -> None:
    home.set_engine("--chunks", "100000", "--chunk-interval", "0.02")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        (narrow,) = serving.document("status")["losses"]
        assert narrow == {
            "kind": "pcie_narrow",
            "what": "GPU 0 has 4 PCIe lanes of 8",
            "hint": "use another slot, or take out what shares its lanes",
        }
        with serving.stream():
            eventually(lambda: "gpu_throttled" in kinds(serving), what=lambda: serving.text)
            assert metric(serving, 'appliance_loss{kind="gpu_throttled",model_name="gqa"}')
            assert metric(serving, "appliance_joules_total{")
            status = serving.document("status")
            assert status["energy"]["joules"] > 0
            assert status["energy"]["why_unknown"] is None
            eventually(lambda: serving.document("status")["watts"] is not None)
            told = json.loads(home.command("doctor", "--json", beside=serving, port=str(serving.port)).stdout)
        checks = {check["name"]: check for check in told["checks"]}
        assert "thermal slowdown by hardware" in checks["loss gpu_throttled"]["value"]
        assert checks["energy"] == {**checks["energy"], "status": "pass", "value": "the GPUs tell it"}
        assert "fewer lanes" in checks["gpu 0 link"]["remedy"]
        assert [event["kind"] for event in serving.events if event["event"] == "loss"] == ["gpu_throttled"]
        serving.terminate()


def test_a_gpu_that_is_gone_when_the_engine_comes_back_is_named(home: Home) -> None:
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        machine = Path(home.variables["FAKE_NVML_MACHINE"])
        (pid,) = serving.engine_pids()
        eventually(lambda: metric(serving, "appliance_phase"))
        machine.write_text(machine.read_text().replace("gpus=1\n", "gpus=0\n"))
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "gpu_gone" in kinds(serving), what=lambda: serving.text)
        assert serving.chat()[0] == 200  # the fake engine needs no GPU
        serving.terminate()


def test_without_a_counter_energy_is_unknown(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        status = serving.document("status")
        energy = status["energy"]
        if energy["joules"] is not None:
            pytest.skip("this machine's CPUs tell their energy")
        assert (status["watts"], energy["wh_per_1000_tokens"]) == (None, None)
        assert energy["why_unknown"]
        assert metric(serving, "appliance_joules_total{") is None
        serving.terminate()
