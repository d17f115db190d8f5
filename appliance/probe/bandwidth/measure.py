"""Measure the bandwidths that plans are computed from, within seconds.

Runs by `appliance probe --measure`, and once on a new machine while idle (serve/background/bandwidths.py). All threads
that this container may run read the host memory. Each GPU is measured by its own child process with a time limit, so a
driver that hangs or crashes loses only that GPU's figures.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from appliance.probe.bandwidth.dram import buffer_mib, measure_dram
from appliance.probe.bandwidth.speeds import LIMIT_GB_S
from appliance.probe.gpu.driver import reaching
from appliance.probe.machine.hardware import Gpu, GpuSpeed, Hardware, Speeds
from appliance.run import Finished, RunTimeout, run

TIMEOUT_S = 60.0  # for one GPU; creating the context with a cold driver can take ten seconds
CHILD = (sys.executable, "-m", "appliance.probe.bandwidth.cuda")
DRAM_CHILD = (sys.executable, "-m", "appliance.probe.bandwidth.dram")
# While an engine is loaded: a quarter of this is read, more than the last-level cache of all but the largest servers.
BESIDE_MIB = 2048
LEAST_FREE_MIB = 640  # room for a CUDA context, and for buffers of a quarter of the rest
_LIBRARY = re.compile(r"libcudart\.so(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result. `problems` says which figures are missing and why."""

    speeds: Speeds
    problems: tuple[str, ...] = ()


def find_cudart(engine_dir: Path) -> Path | None:
    """Return the CUDA runtime in the engine's folder, the newest major version; None in an image without CUDA."""
    found = [(int(match[1] or 0), path) for path in engine_dir.glob("libcudart.so*") if (match := _match(path))]
    return max(found, default=(0, None))[1]


def measure(
    hardware: Hardware,
    engine_dir: Path,
    environment: Mapping[str, str],
    tell: Callable[[str], None],
    *,
    child: Sequence[str] = CHILD,
    timeout_s: float = TIMEOUT_S,
) -> Measured:
    """Measure host memory (about three seconds) and each GPU (about five). `tell` gets a line before each step."""
    threads, usable_mib = hardware.cpu.threads_max, hardware.memory.usable_mib
    tell(f"reading memory with {threads} threads")
    problems: list[str] = []
    dram = _dram(threads, usable_mib, problems)
    ask = _Ask(child=tuple(child), timeout_s=timeout_s, usable_mib=usable_mib)
    return _with_gpus(hardware, engine_dir, environment, tell, ask, dram, problems)


def measure_beside(
    hardware: Hardware,
    engine_dir: Path,
    environment: Mapping[str, str],
    *,
    is_wanted: Callable[[], bool],
    child: Sequence[str] = CHILD,
    dram_child: Sequence[str] = DRAM_CHILD,
    timeout_s: float = TIMEOUT_S,
) -> Measured | None:
    """Like `measure`, but while an engine is loaded: uses little memory and works in child processes only.

    Returns None within 0.1 s after `is_wanted` turns False; no child is left then. A GPU with little free memory is not
    measured.
    """
    threads, usable_mib = hardware.cpu.threads_max, min(hardware.memory.usable_mib, BESIDE_MIB)
    problems: list[str] = []
    words = ("--threads", str(threads), "--usable-mib", str(usable_mib))
    ask = _Ask(child=tuple(child), timeout_s=timeout_s, usable_mib=usable_mib, is_wanted=is_wanted, beside=True)
    try:
        dram = _dram_beside((*dram_child, *words), environment, problems, ask)
        return _with_gpus(hardware, engine_dir, environment, lambda _: None, ask, dram, problems)
    except RunTimeout:
        return None


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """How to call the child process for one GPU."""

    child: tuple[str, ...]
    timeout_s: float
    usable_mib: int
    is_wanted: Callable[[], bool] = lambda: True
    beside: bool = False  # True while a loaded engine holds the GPU's memory


def _with_gpus(
    hardware: Hardware,
    engine_dir: Path,
    environment: Mapping[str, str],
    tell: Callable[[str], None],
    ask: _Ask,
    dram: float | None,
    problems: list[str],
) -> Measured:
    threads = hardware.cpu.threads_max
    speeds = []
    library = find_cudart(engine_dir)
    around = reaching(environment, hardware.gpus.driver_dir, hardware.volume.path)
    for gpu in hardware.gpus.gpus:
        name = f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")
        if gpu.uuid is None or library is None:
            why = "its uuid is unknown" if gpu.uuid is None else f"no libcudart in the engine folder: {engine_dir}"
            problems.append(f"{name} is not measured: {why}")
            continue
        if ask.beside and not gpu.is_unified and (gpu.vram_free_mib or 0) < LEAST_FREE_MIB:
            free_mib = gpu.vram_free_mib or 0
            problems.append(f"{name} is not measured: only {free_mib:,} MiB are free while the engine is loaded")
            continue
        tell(f"copying to, from and within {name}")
        argv = (*ask.child, str(library), *_options(gpu, threads, ask.usable_mib))
        speed, troubles = _ask_child(argv, around | {"CUDA_VISIBLE_DEVICES": gpu.uuid}, gpu.uuid, ask)
        speeds.append(speed)
        problems += [f"{name}: {trouble}" for trouble in troubles]
    return Measured(speeds=Speeds(dram_gb_s=dram, gpus=tuple(speeds)), problems=tuple(problems))


def describe(measured: Measured) -> str:
    """Return one line per figure; a missing figure is shown as unknown."""
    lines = [f"host memory, read by all cores: {_gb_s(measured.speeds.dram_gb_s)}"]
    for gpu in measured.speeds.gpus:
        lines += [
            f"{gpu.uuid}",
            f"  its own memory, copied within it, read + written: {_gb_s(gpu.memory_gb_s)}",
            f"  host to device, page-locked: {_gb_s(gpu.pinned_gb_s)}",
            f"  host to device, pageable: {_gb_s(gpu.pageable_gb_s)}",
            f"  both at once: {_gb_s(gpu.overlapped_pinned_gb_s)} to the device, "
            f"{_gb_s(gpu.overlapped_dram_gb_s)} read by the cores",
        ]
    return "\n".join([*lines, *(f"problem: {problem}" for problem in measured.problems)])


def parse_report(text: str, uuid: str) -> tuple[GpuSpeed, list[str]]:
    """Parse the child's output into figures and problems. Other output becomes a problem."""
    unknown: dict[str, float | None] = {field.name: None for field in fields(GpuSpeed) if field.name != "uuid"}
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return GpuSpeed(uuid=uuid, **unknown), [f"the child printed no report: {text[:80]!r}"]
    if not isinstance(report, dict) or not isinstance(report.get("problems", []), list):
        return GpuSpeed(uuid=uuid, **unknown), [f"the child's output is not a report: {text[:80]!r}"]
    rates = {name: _rate(report.get(name)) for name in unknown}
    return GpuSpeed(uuid=uuid, **rates), [str(problem) for problem in report.get("problems", [])]


def _dram(threads: int, usable_mib: int, problems: list[str]) -> float | None:
    try:
        rate = measure_dram(threads, usable_mib)
    except MemoryError as error:
        problems.append(f"host memory is not measured: {error}")
        return None
    if rate is None:
        problems.append(f"host memory is not measured: a quarter of the usable {usable_mib} MiB is too little")
    return rate


def _dram_beside(
    argv: Sequence[str],
    environment: Mapping[str, str],
    problems: list[str],
    ask: _Ask,
) -> float | None:
    """Measure host memory in a child process. Raises RunTimeout if `is_wanted` turns False."""
    try:
        finished = run(argv, timeout_s=ask.timeout_s, environment=environment, is_wanted=ask.is_wanted)
        report = json.loads(finished.stdout)
        rate = _rate(report.get("dram_gb_s") if isinstance(report, dict) else None)
    except RunTimeout:
        if not ask.is_wanted():
            raise
        rate = None
    except (OSError, ValueError):
        rate = None
    if rate is None:
        problems.append("host memory is not measured: the measuring child process printed no figure")
    return rate


def _options(gpu: Gpu, threads: int, usable_mib: int) -> tuple[str, ...]:
    # Leave room for the page-locked buffer, 512 MiB or less if memory is short.
    host_mib = max(1, min(512, usable_mib // 8))
    each_mib = buffer_mib(threads, usable_mib - host_mib) or 1
    sizes = ("--threads", str(threads), "--dram-mib", str(each_mib), "--host-mib", str(host_mib))
    return (*sizes, "--no-pcie") if gpu.is_unified else sizes


def _ask_child(argv: Sequence[str], environment: Mapping[str, str], uuid: str, ask: _Ask) -> tuple[GpuSpeed, list[str]]:
    try:
        finished = run(argv, timeout_s=ask.timeout_s, environment=environment, is_wanted=ask.is_wanted)
    except RunTimeout:
        if not ask.is_wanted():
            raise
        return _nothing(uuid, f"CUDA did not answer within {ask.timeout_s:g} s: the driver hangs")
    except OSError as error:
        return _nothing(uuid, f"the child could not be started: {error}")
    return parse_report(finished.stdout, uuid) if finished.returncode == 0 else _nothing(uuid, _ending(finished))


def _nothing(uuid: str, why: str) -> tuple[GpuSpeed, list[str]]:
    return parse_report(json.dumps({"problems": [why]}), uuid)


def _ending(finished: Finished) -> str:
    last = (finished.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return f"the child ended with {finished.returncode}: {last[:200]}"


def _rate(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < LIMIT_GB_S else None


def _gb_s(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:,.1f} GB/s"


def _match(path: Path) -> re.Match[str] | None:
    return _LIBRARY.fullmatch(path.name)
