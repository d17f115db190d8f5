"""Described machines through a real libnvidia-ml, nvidia-ml-py and the real child: what is there is what is found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from appliance.probe import Gpu, GpuProbe
from appliance.probe.gpu.nvidia import query_gpus
from tests.fakes.machines import MACHINES, SOURCE, gpus_of
from tests.process.stages.nvml import PutMachine


def ask(environment: Any, timeout_s: float = 60.0) -> GpuProbe:
    return query_gpus(Path("/"), environment, timeout_s=timeout_s)


@pytest.mark.parametrize("name", MACHINES)
def test_a_described_machine_is_found_as_it_is(machine_environment: PutMachine, name: str) -> None:
    found = ask(machine_environment(name))
    assert (found.problem, found.driver, found.cuda_driver) == (None, MACHINES[name]["driver"], MACHINES[name]["cuda"])
    assert found.gpus == gpus_of(name)


def test_published_bandwidths_come_out_of_clock_and_bus() -> None:
    """GB/s that NVIDIA prints for these cards."""
    published = {"2x2080ti-22g": 616, "2x4090": 1008, "24+8": 936, "t4": 320, "laptop-5060": 384}
    assert {name: round(gpus_of(name)[0].bandwidth_gb_s or 0) for name in published} == published


def test_a_slice_has_its_own_share(machine_environment: PutMachine) -> None:
    large, small = ask(machine_environment("a100-mig")).gpus
    assert (large.mig_profile, small.mig_profile) == ("3g.40gb", "1g.10gb")
    assert (large.bandwidth_gb_s, small.bandwidth_gb_s) == (2039.04 / 2, 2039.04 / 8)


def test_a_slice_has_its_share_where_the_memory_of_the_whole_is_refused(machine_environment: PutMachine) -> None:
    """A container that was given slices only is refused the memory of the whole. The chip's name tells its size."""
    refused = {"gpu__0__memory_total": None, "gpu__0__memory_free": None}
    large, small = ask(machine_environment("a100-mig", **refused)).gpus
    assert (large.bandwidth_gb_s, small.bandwidth_gb_s) == (2039.04 / 2, 2039.04 / 8)


@pytest.mark.parametrize(("name", "shares"), [("NVIDIA H200", (4, 8)), ("NVIDIA FUTURE", (2, 8))])
def test_a_slice_of_a_chip_that_names_no_memory_has_its_share(
    machine_environment: PutMachine, name: str, shares: tuple[int, int]
) -> None:
    """The table gives 39 and 9.5 GB of an H200's 141. For a chip in no table the profiles 3g and 1g tell."""
    refused = {"gpu__0__memory_total": None, "gpu__0__memory_free": None}
    large, small = ask(machine_environment("a100-mig", gpu__0__name=name, **refused)).gpus
    assert (large.bandwidth_gb_s, small.bandwidth_gb_s) == (2039.04 / shares[0], 2039.04 / shares[1])


def test_multiprocessors_are_counted_by_compute_capability(machine_environment: PutMachine) -> None:
    """NVML counts CUDA cores: 64 an SM on a T4, 128 on a 4090. Of a slice it counts multiprocessors, or the profile
    tells them."""
    found = {name: ask(machine_environment(name)).gpus[0].sm_count for name in ("t4", "2x4090", "h200", "a100-mig")}
    assert found == {"t4": 40, "2x4090": 128, "h200": 132, "a100-mig": 42}
    silent = {"return__nvmlDeviceGetAttributes_v2": pynvml.NVML_ERROR_NOT_SUPPORTED}
    assert [gpu.sm_count for gpu in ask(machine_environment("a100-mig", **silent)).gpus] == [46, 15]
    unknown = {"return__nvmlDeviceGetNumGpuCores": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    assert ask(machine_environment("t4", **unknown)).gpus[0].sm_count is None


@pytest.mark.parametrize(("cores", "gb_s"), [(2048, 204.8), (1024, 68.0), (512, 34.0), (None, 68.0)])
def test_modules_of_one_name_have_bandwidths_by_their_cores(
    machine_environment: PutMachine, cores: int | None, gb_s: float
) -> None:
    """NVML calls every Orin "Orin (nvgpu)"."""
    orin = {"gpu__0__name": "Orin (nvgpu)", "gpu__0__sm": 87, "gpu__0__cores": cores}
    found = ask(machine_environment("gb10", **orin)).gpus[0]
    assert (found.is_unified, found.bandwidth_gb_s, found.bandwidth_source) == (True, gb_s, "table: Jetson Orin")


def test_more_free_memory_than_there_is_is_not_believed(machine_environment: PutMachine) -> None:
    found = ask(machine_environment("4090-shared", gpu__0__memory_free=40 << 30))
    (gpu,) = found.gpus
    assert gpu.vram_free_mib == gpu.vram_total_mib == 24564
    assert found.warnings == (
        "NVML says that 40,960 of 24,564 MiB of NVIDIA GeForce RTX 4090 are free: the total is used instead",
    )


def test_a_gpu_in_mig_mode_without_slices_cannot_be_used(machine_environment: PutMachine) -> None:
    found = ask(machine_environment("h200", gpu__0__mig_mode=1, gpu__0__mig_max=7))
    assert (found.gpus, found.warnings) == ((), ("GPU 0 is in MIG mode and has no slices: it cannot be used",))


def test_a_chip_that_shares_the_host_s_memory_has_none_of_its_own(machine_environment: PutMachine) -> None:
    """Some drivers answer with the host's memory."""
    found = ask(machine_environment("gb10", gpu__0__memory_total=128 << 30, gpu__0__memory_free=100 << 30)).gpus[0]
    assert (found.is_unified, found.vram_total_mib, found.bandwidth_gb_s) == (True, None, 273.0)


NEW_CHIP = {"gpu__0__name": "NVIDIA GB20", "gpu__0__sm": 122}


def test_an_integrated_chip_that_no_table_names_shares_the_host_s_memory(machine_environment: PutMachine) -> None:
    """Its driver tells of no memory, no memory bus and no PCIe link; or of the host's memory as the chip's own."""
    kib = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert kib is not None
    of_host = int(kib[1]) * 1024
    for memory in ({}, {"gpu__0__memory_total": 0, "gpu__0__memory_free": 0},
                   {"gpu__0__memory_total": of_host, "gpu__0__memory_free": of_host // 2}):  # fmt: skip
        (found,) = ask(machine_environment("gb10", **NEW_CHIP, **memory)).gpus
        assert (found.is_unified, found.vram_total_mib, found.problem, found.bandwidth_gb_s) == (True, None, None, None)
    (own,) = ask(
        machine_environment("gb10", **NEW_CHIP, gpu__0__memory_total=8 << 30, gpu__0__memory_free=1 << 30)
    ).gpus
    assert (own.is_unified, own.vram_total_mib) == (False, 8192)


@pytest.mark.parametrize(("integrated", "is_unified"), [(1, True), (0, False), (None, True)])
def test_the_cuda_driver_says_whether_a_chip_is_integrated(
    machine_environment: PutMachine, tmp_path: Path, integrated: int | None, is_unified: bool
) -> None:
    """The CUDA driver tells if it knows the device. Else NVML's missing answers tell."""
    described = machine_environment("gb10", **NEW_CHIP)
    if integrated is not None:
        source = tmp_path / "cuda.c"
        source.write_text(
            "int cuInit(unsigned f) { return (int)f; }\n"
            "int cuDeviceGetByPCIBusId(int *d, const char *bus) { *d = 7; return bus[0] != '0'; }\n"
            f"int cuDeviceGetAttribute(int *v, int name, int d) {{ *v = {integrated}; return name != 18 || d != 7; }}\n"
        )
        (tmp_path / "cuda").mkdir()
        library = tmp_path / "cuda/libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        described = {**described, "LD_LIBRARY_PATH": f"{described['LD_LIBRARY_PATH']}:{library.parent}"}
    (found,) = ask(described).gpus
    assert found.is_unified is is_unified
    assert found.problem == (None if is_unified else "does not report its memory: NVML: Not Supported (3)")


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_card_that_does_not_tell_its_memory_says_why(machine_environment: PutMachine, code: int) -> None:
    """It has a bus and a link, so its memory is its own."""
    silent = {f"gpu__0__return__nvmlDeviceGetMemoryInfo{version}": code for version in ("", "_v2")}
    (found,) = ask(machine_environment("4090", **silent)).gpus
    assert (found.is_unified, found.vram_total_mib, found.vram_free_mib) == (False, None, None)
    assert found.problem == f"does not report its memory: NVML: {pynvml.NVMLError(code)} ({code})"


def test_no_memory_at_all_is_no_reading(machine_environment: PutMachine) -> None:
    (found,) = ask(machine_environment("4090", gpu__0__memory_total=0, gpu__0__memory_free=0)).gpus
    assert (found.vram_total_mib, found.problem) == (None, "does not report its memory: NVML says 0")
    (full,) = ask(machine_environment("4090", gpu__0__memory_free=0)).gpus
    assert (full.vram_total_mib, full.vram_free_mib, full.problem) == (24564, 0, None)


@pytest.mark.parametrize(
    "knobs", [{"gpu__0__name": "GRID A100-10C"}, {"gpu__0__name": "NVIDIA A100-2-10C"}, {"gpu__0__virtualization": 2}]
)
def test_a_virtual_gpu_is_not_given_the_whole_card_s_figures(
    machine_environment: PutMachine, knobs: dict[str, Any]
) -> None:
    (found,) = ask(
        machine_environment("h100", gpu__0__memory_total=10 << 30, gpu__0__memory_free=9 << 30, **knobs)
    ).gpus
    assert (found.vram_total_mib, found.problem) == (10240, None)
    assert (found.bandwidth_gb_s, found.bandwidth_source, found.sm_count, found.bus_bits) == (None, None, None, None)
    (passed_through,) = ask(machine_environment("h100", gpu__0__virtualization=1)).gpus
    assert passed_through == gpus_of("h100")[0]


def test_a_slice_that_only_its_name_tells_of_is_no_whole_card(machine_environment: PutMachine) -> None:
    """Its parent's name has a size, too: 80GB."""
    silent = {f"return__nvmlDeviceGet{name}": 3 for name in ("MemoryInfo", "MemoryInfo_v2", "Attributes_v2")}
    large, small = ask(machine_environment("a100-mig", **silent)).gpus
    assert (large.vram_total_mib, small.vram_total_mib) == (40 * 1024, 10 * 1024)
    assert (large.bandwidth_gb_s, small.bandwidth_gb_s) == (2039.04 / 2, 2039.04 / 8)
    assert (large.sm_count, small.sm_count) == (46, 15)
    assert small.problem == "does not report its memory: NVML: Not Supported (3)"


def test_the_second_count_of_memory_is_used_where_the_driver_has_it(machine_environment: PutMachine) -> None:
    name, missing = "24+8", {"return__nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    assert ask(machine_environment(name, **missing)).gpus == gpus_of(name)


def test_all_that_may_be_unsupported_is_unknown(machine_environment: PutMachine) -> None:
    functions = set(re.findall(r"^(?:int |UNSIGNED\()(nvmlDevice\w+)", SOURCE.read_text(), re.MULTILINE))
    needed = {"nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"}
    silent = {f"return__{name}": pynvml.NVML_ERROR_NOT_SUPPORTED for name in functions - needed}
    assert len(silent) > 20
    nothing: dict[str, Any] = dict.fromkeys(("name", "uuid", "sm", "vram_total_mib", "vram_free_mib", "pci_bus_id"))
    why = "does not report its memory: NVML: Not Supported (3)"
    expected = tuple(Gpu(index=index, problem=why, **nothing) for index in (0, 1))
    assert ask(machine_environment("2x4090", **silent)).gpus == expected


def test_counts_that_cannot_be(machine_environment: PutMachine) -> None:
    found = ask(machine_environment("2x4090", gpu__0__mig_mode=1, gpu__0__mig_max=2**32 - 1, gpus=2**32 - 1))
    assert found.gpus[:1] == gpus_of("2x4090")[1:]
    assert found.warnings[0] == f"NVML counts {2**32 - 1} GPUs: only the first 256 are queried"


def test_a_slice_whose_memory_only_its_attributes_tell(machine_environment: PutMachine) -> None:
    silent = {
        f"gpu__0__mig__1__return__{name}": 3 for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
    }
    small = ask(machine_environment("a100-mig", **silent)).gpus[1]
    assert (small.vram_total_mib, small.vram_free_mib, small.bandwidth_gb_s) == (9728, None, 2039.04 / 8)


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_one_lost_gpu_does_not_cost_the_other(machine_environment: PutMachine, code: int) -> None:
    lost, other = ask(machine_environment("2x4090", gpu__0__return__nvmlDeviceGetHandleByIndex_v2=code)).gpus
    assert (lost.name, lost.vram_total_mib) == (None, None)
    assert lost.problem == f"does not answer: NVML: {pynvml.NVMLError(code)} ({code})"
    assert other == gpus_of("2x4090")[1]


def test_names_that_are_not_utf_8_are_unknown(machine_environment: PutMachine) -> None:
    card = ask(machine_environment("4090-shared", gpu__0__name=r"\xff\xfe", process__4242=r"/opt/\xff")).gpus[0]
    assert (card.name, card.holders[0].name, card.holders[0].used_mib) == (None, None, 14500)


@pytest.mark.parametrize(
    ("knobs", "timeout_s", "problem"),
    [
        ({"crash__nvmlDeviceGetName": 1}, 60, "the NVML child ended with -11"),
        ({"hang__nvmlDeviceGetCount_v2": 1}, 3, "NVML did not answer within 3 s: the driver hangs"),
        ({"return__nvmlInitWithFlags": 18}, 60, "NVML: RM has detected an NVML/RM version mismatch"),
        ({"return__nvmlInitWithFlags": 9}, 60, "NVML: Driver Not Loaded"),
        ({"return__nvmlDeviceGetCount_v2": 999}, 60, "NVML: Unknown Error (999)"),
    ],
)
def test_a_driver_in_trouble_is_a_problem_in_words(
    machine_environment: PutMachine, knobs: dict[str, Any], timeout_s: float, problem: str
) -> None:
    found = ask(machine_environment("2x4090", **knobs), timeout_s)
    assert found.gpus == ()
    assert (found.problem or "").startswith(problem)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    found = ask({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert (found.problem or "").startswith("NVML: ")


def test_a_library_on_the_volume_is_not_loaded(machine_environment: PutMachine, tmp_path: Path) -> None:
    """It comes first in the library path that the child would inherit, and is still not loaded."""
    described = machine_environment("2x4090")
    (tmp_path / "data/lib").mkdir(parents=True)
    (tmp_path / "data/lib/libnvidia-ml.so.1").write_text("not a library")
    named = {**described, "LD_LIBRARY_PATH": f"{tmp_path}/data/lib:{described['LD_LIBRARY_PATH']}"}
    assert (ask(named).problem or "").startswith("NVML: ")
    found = query_gpus(Path("/"), named, tmp_path / "data", timeout_s=60)
    assert (found.problem, found.gpus) == (None, gpus_of("2x4090"))
    assert f"{tmp_path}/data/lib, which holds libnvidia-ml.so.1 and is not used: it is on" in found.warnings[-1]
    nowhere = query_gpus(tmp_path, {"LD_LIBRARY_PATH": f"{tmp_path}/data/lib"}, tmp_path / "data", child=("/nowhere",))
    assert (nowhere.problem, nowhere.warnings) == (None, found.warnings[-1:])


def test_a_child_that_prints_garbage(nvml_library: Path) -> None:
    environment = {"LD_LIBRARY_PATH": str(nvml_library.parent)}
    found = query_gpus(Path("/"), environment, child=(sys.executable, "-c", "print('hello')"))
    assert (found.problem or "").startswith("the NVML child printed no report")
    unwanted = query_gpus(Path("/"), environment, child=("sleep", "3600"), timeout_s=3600, is_wanted=lambda: False)
    assert unwanted.problem is not None
    missing = query_gpus(Path("/"), environment, child=("/nowhere/python",))
    assert (missing.problem or "").startswith("the NVML child could not be started")
