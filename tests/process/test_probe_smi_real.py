"""A program called nvidia-smi beside a described machine: what the two say differently is a warning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.probe import GpuProbe
from appliance.probe.gpu.nvidia import query_gpus
from appliance.probe.gpu.smi import cross_check
from tests.process.stages.nvml import PutMachine

LOG = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>580.95.05</driver_version><cuda_version>13.0</cuda_version>
<gpu id="00000000:01:00.0"><product_name>NVIDIA GeForce RTX 4090</product_name>
<fb_memory_usage><total>24564 MiB</total></fb_memory_usage></gpu></nvidia_smi_log>
"""


def put_smi(folder: Path, script: str) -> Mapping[str, str]:
    """An environment in which `nvidia-smi` is that shell script and nothing else is."""
    (folder / "log.xml").write_text(LOG)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(folder / "log.xml")}


@pytest.fixture
def found(machine_environment: PutMachine) -> GpuProbe:
    probe = query_gpus(Path("/"), machine_environment("4090-shared"), timeout_s=60)
    assert probe.gpus
    return probe


def test_two_that_agree(found: GpuProbe, tmp_path: Path) -> None:
    assert cross_check(found, put_smi(tmp_path, 'test "$*" = "-q -x" && cat "$LOG"')) == found


def test_one_with_another_memory(found: GpuProbe, tmp_path: Path) -> None:
    checked = cross_check(found, put_smi(tmp_path, 'sed s/24564/49140/ "$LOG"'))
    assert checked.warnings == (*found.warnings, "GPU 0 has 24564 MiB by NVML and 49140 MiB by nvidia-smi")
    assert checked.gpus == found.gpus


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 600", "nvidia-smi gave no answer: nvidia-smi did not end within 1 s"),
        ("echo NVML: Driver/library version mismatch; exit 18", "nvidia-smi ended with 18: NVML: Driver/library"),
        ("kill -SEGV $$", "nvidia-smi ended with -11: it printed nothing"),
        ("echo hello", "nvidia-smi printed no readable report: it is not XML"),
        ("head -c 5000000 /dev/zero | tr '\\0' x", "nvidia-smi printed no readable report: it is not XML"),
    ],
)
def test_one_in_trouble(found: GpuProbe, tmp_path: Path, script: str, words: str) -> None:
    timeout_s = 1 if script.startswith("sleep") else 60
    checked = cross_check(found, put_smi(tmp_path, script), timeout_s=timeout_s)
    assert checked.gpus == found.gpus
    assert checked.warnings[-1].startswith(words)


def test_it_loads_nothing_from_the_volume(found: GpuProbe, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    environment = put_smi(tmp_path, 'test -z "$LD_LIBRARY_PATH" && cat "$LOG"')
    named = {**environment, "LD_LIBRARY_PATH": f"{tmp_path}/data"}
    known = replace(found, driver_dir=None)
    assert cross_check(known, named, tmp_path / "data") == known
    assert cross_check(known, named).warnings[-1].startswith("nvidia-smi ended with 1")


def test_without_it_nothing_is_said(found: GpuProbe, tmp_path: Path) -> None:
    assert cross_check(found, {"PATH": str(tmp_path)}) == found


def test_without_a_driver_it_is_not_asked(tmp_path: Path) -> None:
    mark = tmp_path / "asked"
    assert cross_check(GpuProbe(), put_smi(tmp_path, f"touch {mark}")) == GpuProbe()
    assert not mark.exists()


def test_it_sees_what_nvml_could_not(tmp_path: Path) -> None:
    broken = GpuProbe(problem="the NVML child ended with -11")
    checked = cross_check(broken, put_smi(tmp_path, 'cat "$LOG"'))
    assert checked.warnings == (
        "nvidia-smi shows a GPU at 00000000:01:00.0 (NVIDIA GeForce RTX 4090) that NVML does not show",
    )
