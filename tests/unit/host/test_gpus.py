"""Which GPUs there are, by which way a container gets them, and whether an image is for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import DriverTooOldError, FatalError, GpuUnusableError, NoKernelError, UsageError
from appliance.host.docker.gpus import HostGpu, Ways, check_image, parse_smi, query_gpus, request, runs_on, sms_of, ways
from appliance.host.docker.launch import GpuRequest
from appliance.run import Finished

RTX = HostGpu(name="RTX 4090", driver="580.95.05", sm="89")
H100 = HostGpu(name="H100", driver="580.95.05", sm="90")
BY_RUNTIME = Ways(has_runtime=True, cdi=())
BY_CDI = Ways(has_runtime=False, cdi=("nvidia.com/gpu=all", "nvidia.com/gpu=0"))


def smi(text: str, code: int = 0, err: str = "") -> Finished:
    return Finished(returncode=code, stdout=text, stderr=err)


def test_rows_of_nvidia_smi() -> None:
    found = parse_smi(smi("NVIDIA RTX, 580.1, 8.9\nNVIDIA Old, 580.1, [N/A]\n"))
    assert [(gpu.name, gpu.driver, gpu.sm) for gpu in found] == [
        ("NVIDIA RTX", "580.1", "89"),
        ("NVIDIA Old", "580.1", None),
    ]


def test_an_old_driver_tells_no_number() -> None:
    assert parse_smi(smi("Tesla T4, 470.256.02\n")) == (HostGpu(name="Tesla T4", driver="470.256.02", sm=None),)


@pytest.mark.parametrize("code", [0, 15])
def test_a_gpu_that_fell_silent_hides_no_other(code: int) -> None:
    lost = "Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost."
    assert parse_smi(smi(f"RTX 4090, 580.95.05, 8.9\n{lost}\n", code)) == (RTX,)
    assert parse_smi(smi("RTX 4090, 580.95.05, 8.9\nWARNING: infoROM is corrupted at gpu 0000:01:00.0\n")) == (RTX,)
    with pytest.raises(GpuUnusableError, match="GPU is lost"):
        parse_smi(smi(f"{lost}\n", code))


@pytest.mark.parametrize("finished", [smi("No devices were found\n"), smi("", 6, "No devices were found")])
def test_no_device_is_no_gpu(finished: Finished) -> None:
    assert parse_smi(finished) == ()


@pytest.mark.parametrize(
    "finished", [smi("", 9, "NVIDIA-SMI has failed"), smi(""), smi("one two\n"), smi("a, b, c", 1)]
)
def test_a_failure_is_not_the_same_as_none(finished: Finished) -> None:
    with pytest.raises(GpuUnusableError, match="nvidia-smi failed with exit"):
        parse_smi(finished)


def program(folder: Path, text: str) -> str:
    """A folder for PATH with an nvidia-smi in it."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_driver_that_is_loaded_at_the_first_question_takes_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "sleep 2; echo RTX 4090, 580.95.05, 8.9"))
    assert query_gpus() == (RTX,)


def test_a_driver_that_fails_is_told_from_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", program(tmp_path, "echo NVIDIA-SMI has failed; exit 9"))
    with pytest.raises(GpuUnusableError, match="nvidia-smi failed with exit 9: NVIDIA-SMI has failed"):
        query_gpus()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert query_gpus() == ()


def none(_: str) -> str | None:
    return None


def test_ways_of_a_daemon(tmp_path: Path) -> None:
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}, {"Source": "cdi", "ID": "vendor.com/x=0"}]
    assert ways({"Runtimes": {"nvidia": {}}}, which=none) == BY_RUNTIME
    assert ways({"Runtimes": {"runc": {}}}, which=lambda _: "/usr/bin/hook") == BY_RUNTIME
    assert ways({"DiscoveredDevices": devices}, which=none) == Ways(has_runtime=False, cdi=("nvidia.com/gpu=0",))
    assert ways({"CDISpecDirs": [str(tmp_path), "/none"]}, which=none) == Ways(has_runtime=False, cdi=())
    (tmp_path / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu"}))
    assert ways({"CDISpecDirs": [str(tmp_path)]}, which=none).cdi == ("nvidia.com/gpu=all",)


@pytest.mark.parametrize(
    ("asked", "gpus", "by", "expected"),
    [
        (None, (), BY_RUNTIME, None),
        ("none", (RTX,), BY_RUNTIME, None),
        (None, (RTX,), BY_RUNTIME, GpuRequest(driver="nvidia")),
        ("all", (RTX,), BY_RUNTIME, GpuRequest(driver="nvidia")),
        ("0,GPU-1a", (RTX,), BY_RUNTIME, GpuRequest(driver="nvidia", devices=("0", "GPU-1a"))),
        (None, (RTX,), BY_CDI, GpuRequest(driver="cdi", devices=("nvidia.com/gpu=all",))),
        ("0", (RTX,), BY_CDI, GpuRequest(driver="cdi", devices=("nvidia.com/gpu=0",))),
        ("nvidia.com/gpu=0", (), BY_CDI, GpuRequest(driver="cdi", devices=("nvidia.com/gpu=0",))),
    ],
)
def test_what_is_asked_of_docker(
    asked: str | None, gpus: tuple[HostGpu, ...], by: Ways, expected: GpuRequest | None
) -> None:
    assert request(asked, gpus, by) == expected


@pytest.mark.parametrize(
    ("asked", "gpus", "by", "kind"),
    [
        ("all", (), BY_RUNTIME, GpuUnusableError),
        (None, (RTX,), Ways(has_runtime=False, cdi=()), GpuUnusableError),
        ("nvidia.com/gpu=0", (RTX,), BY_RUNTIME, GpuUnusableError),
        ("nvidia.com/gpu=5", (RTX,), BY_CDI, GpuUnusableError),
        ("0,,1", (RTX,), BY_RUNTIME, UsageError),
    ],
)
def test_what_cannot_be(asked: str | None, gpus: tuple[HostGpu, ...], by: Ways, kind: type[FatalError]) -> None:
    with pytest.raises(kind) as caught:
        request(asked, gpus, by)
    assert caught.value.hint


ALL = GpuRequest(driver="nvidia")


def labels(sm: str, floor: str = "580") -> dict[str, str]:
    return {"io.appliance.sm": sm, "io.appliance.driver.floor.sass": floor}


@pytest.mark.parametrize(
    ("given", "gpus", "asked"),
    [(labels("none", "none"), (), None), (labels("89"), (RTX,), ALL), (labels("86, 120"), (RTX,), ALL),
     (labels("90"), (RTX, H100), ALL), (labels("75"), (HostGpu(name="x", driver="600", sm=None),), ALL),
     ({}, (), None)],
)  # fmt: skip
def test_an_image_that_is_for_this_machine(
    given: dict[str, str], gpus: tuple[HostGpu, ...], asked: GpuRequest | None
) -> None:
    check_image("i", given, gpus, asked)
    # What let it pass is what its labels say: with kernels for no chip here, and for a later driver, it is refused.
    with pytest.raises(FatalError):
        check_image("i", labels("12", "700"), gpus or (RTX,), asked)


@pytest.mark.parametrize(
    ("given", "gpus", "asked", "kind"),
    [
        (labels("none", "none"), (RTX,), ALL, GpuUnusableError),
        (labels("89"), (), None, GpuUnusableError),
        (labels("90"), (RTX,), ALL, NoKernelError),
        (labels("90", "590"), (H100,), ALL, DriverTooOldError),
    ],
)
def test_an_image_that_is_not(
    given: dict[str, str], gpus: tuple[HostGpu, ...], asked: GpuRequest | None, kind: type[FatalError]
) -> None:
    with pytest.raises(kind) as caught:
        check_image("i", given, gpus, asked)
    assert caught.value.hint


def test_every_label_of_a_rendered_image_is_read() -> None:
    root = Path(__file__).parents[3] / "images/rendered"
    found: dict[str, Any] = {}
    for path in sorted(root.glob("*/Dockerfile")):
        [line] = [line for line in path.read_text().splitlines() if "io.appliance.sm=" in line]
        found[path.parent.name] = sms_of(line.partition("=")[2])
    assert found["llama-cpu"] == ()
    assert found["llama-cu130-sm86-sm120"] == ("86", "120")
    assert all(sms for cell, sms in found.items() if "-cu" in cell)


@pytest.mark.parametrize(
    ("form", "sm", "runs"),
    [
        ("86", "86", True),
        ("86", "89", True),
        ("89", "86", False),
        ("90", "100", False),
        ("120", "121", True),
        ("75", "80", False),
    ],
)
def test_machine_code_runs_within_its_generation(form: str, sm: str, runs: bool) -> None:
    assert runs_on(form, sm) is runs
