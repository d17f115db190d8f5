"""This machine, real children, and a libnvidia-ml that is a real library, built here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.probe import as_document, fingerprint, probe
from appliance.probe.hardware import GpuProbe
from appliance.probe.host import query_host
from appliance.probe.nvidia import query_gpus
from appliance.run import OUTPUT_LIMIT_BYTES, RunTimeout, run

COMPILER = shutil.which("cc") or shutil.which("gcc")
NVML_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
static int is(const char *mode) { const char *set = getenv("FAKE_NVML"); return set && !strcmp(set, mode); }
int nvmlInitWithFlags(unsigned flags) {
    if (is("hang")) for (;;) sleep(1);
    if (is("crash")) abort();
    return is("mismatch") ? 18 : 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.82.07"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, is("name") ? "\xff\xfe" : "NVIDIA GeForce RTX 2080 Ti"); return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { snprintf(text, size, "GPU-1"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 7; *minor = 5; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    if (is("silent")) return 3;
    memory->total = 22ULL << 30; memory->free = 21ULL << 30; memory->used = 1ULL << 30; return 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci) {
    memset(pci, 0, sizeof *pci); strcpy(pci->bus_id, "00000000:0A:00.0"); return 0;
}
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def is_gone(pid: int, deadline_s: float = 5.0) -> bool:
    """Whether `pid` ends, or is a zombie of somebody else's, within the time."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_this_machine() -> None:
    hardware = probe(Path("/tmp"), os.environ)
    assert hardware.cpu.logical == len(os.sched_getaffinity(0))
    assert 1 <= hardware.cpu.cores <= hardware.cpu.logical
    assert hardware.cpu.threads_max <= hardware.cpu.logical
    assert 0 < hardware.memory.usable_mib <= hardware.memory.total_mib
    assert hardware.volume.is_writable
    assert as_document(hardware)["cpu"]["cores"] == hardware.cpu.cores
    assert fingerprint(hardware) == fingerprint(probe(Path("/tmp"), os.environ))


def test_no_heavy_module_is_imported() -> None:
    code = "import sys, appliance.probe, appliance.model; print(*sorted(sys.modules))"
    modules = set(run(python(code), timeout_s=30).stdout.split())
    assert not modules & {"pynvml", "asyncio", "pydantic", "yaml", "numpy", "aiohttp", "ctypes", "rich"}


def test_the_host_is_asked_quickly() -> None:
    took_s = []
    for _ in range(20):
        start = time.perf_counter()
        query_host(Path("/"), Path("/tmp"))
        took_s.append(time.perf_counter() - start)
    assert min(took_s) < 0.015


def test_a_command_ends_with_its_code_and_its_words() -> None:
    code = "import sys, os; print('aé', os.environ.get('X')); sys.stderr.buffer.write(b'b\\xff'); sys.exit(3)"
    finished = run(python(code), timeout_s=30, environment={"X": "y", "PYTHONUTF8": "1"})
    assert (finished.returncode, finished.stdout, finished.stderr, finished.is_cut) == (3, "aé y\n", "b\ufffd", False)


def test_a_command_that_is_killed_has_a_negative_code() -> None:
    assert run(python("import os; os.kill(os.getpid(), 9)"), timeout_s=30).returncode == -9


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run(("/nowhere/command",), timeout_s=1)


def test_output_without_end_is_cut() -> None:
    code = f"import sys; sys.stdout.write('x' * {OUTPUT_LIMIT_BYTES + 1}); sys.stderr.write('y' * 3)"
    finished = run(python(code), timeout_s=30)
    assert (len(finished.stdout), finished.stderr, finished.is_cut) == (OUTPUT_LIMIT_BYTES, "yyy", True)


def test_a_hanging_command_dies_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "print('hanging', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RunTimeout, match=r"did not end within 2 s") as caught:
        run(python(code, str(pids)), timeout_s=2)
    assert "hanging" in caught.value.stderr
    written = [int(line) for line in pids.read_text().split()]
    assert len(written) == 2
    assert all(is_gone(pid) for pid in written)


def test_a_grandchild_that_holds_the_pipe_does_not_hold_us() -> None:
    code = "import os, time\nif os.fork(): print('done', flush=True); os._exit(0)\ntime.sleep(600)\n"
    start = time.monotonic()
    finished = run(python(code), timeout_s=60)
    assert time.monotonic() - start < 30
    assert (finished.returncode, finished.stdout) == (0, "done\n")


@pytest.fixture(scope="module")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler to build a libnvidia-ml with")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML_SOURCE)
    command = [COMPILER, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return folder


def ask(folder: Path, mode: str = "", timeout_s: float = 30.0) -> GpuProbe:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_NVML": mode}
    return query_gpus(Path("/"), environment, timeout_s=timeout_s)


def test_a_card_through_nvml(nvml_folder: Path) -> None:
    found = ask(nvml_folder)
    assert (found.driver, found.cuda_driver, found.problem) == ("580.82.07", "13.0", None)
    card = found.gpus[0]
    assert (card.index, card.name, card.uuid, card.sm) == (0, "NVIDIA GeForce RTX 2080 Ti", "GPU-1", "75")
    assert (card.vram_total_mib, card.vram_free_mib, card.pci_bus_id) == (22528, 21504, "00000000:0A:00.0")


def test_nvml_that_is_silent_or_garbles(nvml_folder: Path) -> None:
    assert (ask(nvml_folder, "silent").gpus[0].vram_total_mib, ask(nvml_folder, "name").gpus[0].name) == (None, None)


@pytest.mark.parametrize(
    ("mode", "timeout_s", "problem"),
    [
        ("crash", 30, "the NVML child ended with -6"),
        ("hang", 2, "NVML did not answer within 2 s"),
        ("mismatch", 30, "NVML: RM has detected an NVML/RM version mismatch"),
    ],
)
def test_a_driver_in_trouble_is_a_problem_in_words(
    nvml_folder: Path, mode: str, timeout_s: float, problem: str
) -> None:
    found = ask(nvml_folder, mode, timeout_s)
    assert found.gpus == ()
    assert (found.problem or "").startswith(problem)


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    assert (ask(tmp_path).problem or "").startswith("NVML: ")


def test_a_child_that_prints_garbage(nvml_folder: Path) -> None:
    environment = {"LD_LIBRARY_PATH": str(nvml_folder)}
    found = query_gpus(Path("/"), environment, child=python("print('hello')"))
    assert (found.problem or "").startswith("the NVML child printed no report")
    missing = query_gpus(Path("/"), environment, child=("/nowhere/python",))
    assert (missing.problem or "").startswith("the NVML child could not be started")
