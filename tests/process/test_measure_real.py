"""Bandwidths of this machine, and of a GPU whose CUDA runtime is a real library, built here, that copies memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.probe import Gpu, GpuProbe, Hardware, probe
from appliance.probe.bandwidth.dram import Stream, buffer_mib, measure_dram
from appliance.probe.bandwidth.measure import DRAM_CHILD, LEAST_FREE_MIB, Measured, measure, measure_beside
from tests.process.stages.supervisor import is_alive

SOURCE = Path(__file__).parents[1] / "fakes/cudart/cudart.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
NAMES = ("pinned_gb_s", "pageable_gb_s", "memory_gb_s", "overlapped_pinned_gb_s", "overlapped_dram_gb_s")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler to build a libcudart with")
    folder = tmp_path_factory.mktemp("engine")
    flags = ("-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC")
    subprocess.run([COMPILER, *flags, "-o", str(folder / "libcudart.so.13"), str(SOURCE)], check=True)
    return folder


@pytest.fixture(scope="module")
def machine() -> Hardware:
    """Return this machine with one fake GPU, and with so little free memory that a test is quick."""
    found = probe(Path("/tmp"), os.environ)
    card = Gpu(index=0, name="Fake", uuid="GPU-fake-0", sm="90", vram_total_mib=512, vram_free_mib=256, pci_bus_id=None)
    memory = replace(found.memory, available_mib=600, limit_mib=None, limit_used_mib=None)
    return replace(found, memory=memory, gpus=GpuProbe(gpus=(card,), driver="580"))


def measured(
    machine: Hardware, engine_dir: Path, knobs: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Measured:
    said: list[str] = []
    found = measure(machine, engine_dir, {**os.environ, **(knobs or {})}, said.append, timeout_s=timeout_s)
    assert said[0].startswith("reading memory")
    return found


def test_all_cores_read_this_machines_memory() -> None:
    rate = measure_dram(len(os.sched_getaffinity(0)), 2048, windows=2)
    assert rate is not None
    assert 0.1 < rate < 10_000


def test_threads_read_what_they_say_and_end() -> None:
    stream = Stream(2, 8)
    with stream.running():
        while stream.bytes_read < 64 * 2**20:
            time.sleep(0.001)
    at_the_end = stream.bytes_read
    assert at_the_end % (8 * 2**20) == 0
    assert stream.bytes_read == at_the_end


def test_memory_that_cannot_be_had_is_an_error_and_no_hang() -> None:
    with pytest.raises(MemoryError, match="memory for the measurement cannot be allocated"), Stream(2, 2**34).running():
        pytest.fail("there is no such memory")


def test_with_little_memory_nothing_is_claimed(machine: Hardware, engine_dir: Path) -> None:
    assert measure_dram(2, 200) is None
    assert buffer_mib(2, 256) == 32
    assert buffer_mib(256, 10**6) == 32
    poor = replace(machine, memory=replace(machine.memory, available_mib=100), gpus=GpuProbe())
    found = measured(poor, engine_dir)
    assert found.speeds.dram_gb_s is None
    assert "a quarter of the usable 100 MiB is too little" in found.problems[0]


def test_every_figure_of_a_gpu(machine: Hardware, engine_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    found = measured(machine, engine_dir, {"FAKE_CUDART_LOG": str(log)})
    assert found.problems == ()
    assert found.speeds.gpus[0].uuid == "GPU-fake-0"
    for name in NAMES:
        rate = getattr(found.speeds.gpus[0], name)
        assert rate is not None, name
        assert 0.01 < rate < 10_000, name
    calls = [line.split() for line in log.read_text().splitlines()]
    assert {visible for visible, _ in calls} == {"GPU-fake-0"}
    names = [name for _, name in calls]
    assert names[:2] == ["cudaSetDevice", "cudaFree"]
    assert names.count("cudaMalloc") == names.count("cudaFree") - 1 == 5
    assert names.count("cudaMallocHost") == names.count("cudaFreeHost") == 2


def test_unified_memory_has_no_pcie(machine: Hardware, engine_dir: Path) -> None:
    unified = replace(machine, gpus=GpuProbe(gpus=(replace(machine.gpus.gpus[0], is_unified=True),)))
    speed = measured(unified, engine_dir).speeds.gpus[0]
    assert speed.memory_gb_s
    assert (speed.pinned_gb_s, speed.pageable_gb_s, speed.overlapped_dram_gb_s) == (None, None, None)


def test_a_figure_that_cuda_refuses_costs_no_other(machine: Hardware, engine_dir: Path) -> None:
    found = measured(machine, engine_dir, {"FAKE_CUDART_FAIL": "cudaMallocHost"})
    speed = found.speeds.gpus[0]
    assert (speed.pinned_gb_s, speed.overlapped_pinned_gb_s) == (None, None)
    assert speed.memory_gb_s
    assert speed.pageable_gb_s
    assert found.problems == ("GPU 0 (Fake): cudaMallocHost: out of memory (2)",) * 2


def test_a_driver_that_is_too_old_is_said_in_cudas_words(machine: Hardware, engine_dir: Path) -> None:
    found = measured(machine, engine_dir, {"FAKE_CUDART_FAIL": "cudaSetDevice", "FAKE_CUDART_CODE": "35"})
    assert found.speeds.dram_gb_s
    assert all(getattr(found.speeds.gpus[0], name) is None for name in NAMES)
    assert "CUDA driver version is insufficient" in found.problems[0]


@pytest.mark.parametrize(
    ("knob", "timeout_s", "words"),
    [
        ("FAKE_CUDART_HANG", 3.0, "CUDA did not answer within 3 s"),
        ("FAKE_CUDART_CRASH", 60.0, "the child ended with -6"),
    ],
)
def test_a_driver_that_hangs_or_crashes_costs_only_its_figures(
    machine: Hardware, engine_dir: Path, knob: str, timeout_s: float, words: str
) -> None:
    began = time.monotonic()
    found = measured(machine, engine_dir, {knob: "cudaFree"}, timeout_s)
    assert time.monotonic() - began < timeout_s + 30
    assert found.speeds.dram_gb_s
    assert found.speeds.gpus[0].memory_gb_s is None
    assert words in found.problems[0]


def test_a_gpu_that_cannot_be_named_or_has_no_runtime_is_said(
    machine: Hardware, engine_dir: Path, tmp_path: Path
) -> None:
    nameless = replace(machine, gpus=GpuProbe(gpus=(replace(machine.gpus.gpus[0], uuid=None, name=None),)))
    assert measured(nameless, engine_dir).problems == ("GPU 0 is not measured: its uuid is unknown",)
    assert "no libcudart in the engine folder" in measured(machine, tmp_path).problems[0]


def test_a_library_that_is_none(machine: Hardware, tmp_path: Path) -> None:
    (tmp_path / "libcudart.so.13").write_text("not a library")
    assert "libcudart.so.13" in measured(machine, tmp_path).problems[0]


def with_free(machine: Hardware, free_mib: int) -> Hardware:
    (card,) = machine.gpus.gpus
    return replace(machine, gpus=replace(machine.gpus, gpus=(replace(card, vram_free_mib=free_mib),)))


def test_beside_an_engine_every_figure_is_measured_in_children(machine: Hardware, engine_dir: Path) -> None:
    found = measure_beside(with_free(machine, 2048), engine_dir, os.environ, is_wanted=lambda: True)
    assert found is not None
    assert found.problems == ()
    assert found.speeds.dram_gb_s is not None
    (speed,) = found.speeds.gpus
    assert all(getattr(speed, name) is not None for name in NAMES)


def test_a_gpu_that_an_engine_has_filled_is_left_alone(machine: Hardware, engine_dir: Path) -> None:
    found = measure_beside(with_free(machine, LEAST_FREE_MIB - 1), engine_dir, os.environ, is_wanted=lambda: True)
    assert found is not None
    assert found.speeds.gpus == ()
    assert found.problems == ("GPU 0 (Fake) is not measured: only 639 MiB are free while the engine is loaded",)


@pytest.mark.parametrize("hangs", ["dram", "gpu"])
def test_what_is_no_longer_wanted_is_ended_at_once(
    machine: Hardware, engine_dir: Path, tmp_path: Path, hangs: str
) -> None:
    """The memory's child hangs, or the GPU's child does. Either is ended."""
    pid = tmp_path / "pid"
    asleep = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    sleeper = (sys.executable, "-I", "-c", asleep)
    quick = (sys.executable, "-I", "-S", "-c", "print('{\"dram_gb_s\": 10}')")
    ends: list[float] = []

    def is_wanted() -> bool:
        """True until half a second after the hanging child has begun."""
        if pid.exists() and not ends:
            ends.append(time.monotonic() + 0.5)
        return not ends or time.monotonic() < ends[0]

    found = measure_beside(
        with_free(machine, 2048),
        engine_dir,
        os.environ,
        is_wanted=is_wanted,
        dram_child=sleeper if hangs == "dram" else quick,
        child=sleeper,
    )
    assert found is None
    assert time.monotonic() < ends[0] + 30.0  # what hangs does so for a minute
    assert not is_alive(int(pid.read_text()))


def test_a_child_that_prints_no_figure_costs_the_figure_alone(machine: Hardware, engine_dir: Path) -> None:
    for words in ("no figure", "[1]", '{"dram_gb_s": -1}'):
        child = (sys.executable, "-I", "-S", "-c", f"print({words!r})")
        alone = replace(machine, gpus=GpuProbe())
        found = measure_beside(alone, engine_dir, os.environ, is_wanted=lambda: True, dram_child=child)
        assert found is not None
        assert found.speeds.dram_gb_s is None
        assert found.problems == ("host memory is not measured: the measuring child process printed no figure",)
    missing = measure_beside(alone, engine_dir, os.environ, is_wanted=lambda: True, dram_child=("/no/such",))
    assert missing is not None
    assert missing.speeds.dram_gb_s is None
    assert DRAM_CHILD[-1] == "appliance.probe.bandwidth.dram"
