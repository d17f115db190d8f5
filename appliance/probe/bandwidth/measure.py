"""The bandwidths that plans are made of, measured within seconds instead of believed: by `appliance probe --measure`,
and once on a new machine while nobody asks (serve/background/bandwidths.py).

Host memory is read by all threads that this container may run. Each GPU is measured by a child process of its own,
with a time limit: a driver that hangs or crashes costs its figures and nothing else.
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

TIMEOUT_S = 60.0  # for one GPU; the context of a cold driver alone can take ten
CHILD = (sys.executable, "-m", "appliance.probe.bandwidth.cuda")
DRAM_CHILD = (sys.executable, "-m", "appliance.probe.bandwidth.dram")
# Beside an engine: a quarter of this is read, beyond the last-level cache of all but the largest servers.
BESIDE_MIB = 2048
LEAST_FREE_MIB = 640  # a CUDA context, and buffers of a quarter of what is left
_LIBRARY = re.compile(r"libcudart\.so(?:\.(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`problems` says in words which figures are missing, and why."""

    speeds: Speeds
    problems: tuple[str, ...] = ()


def find_cudart(engine_dir: Path) -> Path | None:
    """The CUDA runtime beside the engine, the newest major there; None in an image without CUDA."""
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
    """Takes some three seconds and, for each GPU, about five; `tell` is given a line before each step."""
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
    """The same beside an engine that is loaded: in little memory, and all of it in children, so that nothing is left of
    it a tenth of a second after `is_wanted` says no, which returns None. A GPU with little memory left is not measured.
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
    """How the child for one GPU is asked."""

    child: tuple[str, ...]
    timeout_s: float
    usable_mib: int
    is_wanted: Callable[[], bool] = lambda: True
    beside: bool = False  # an engine that has the GPU's memory


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
            why = "its uuid is unknown" if gpu.uuid is None else f"no libcudart beside the engine: {engine_dir}"
            problems.append(f"{name} is not measured: {why}")
            continue
        if ask.beside and not gpu.is_unified and (gpu.vram_free_mib or 0) < LEAST_FREE_MIB:
            free_mib = gpu.vram_free_mib or 0
            problems.append(f"{name} is not measured: {free_mib:,} MiB of its memory are free beside the engine")
            continue
        tell(f"copying to, from and within {name}")
        argv = (*ask.child, str(library), *_options(gpu, threads, ask.usable_mib))
        speed, troubles = _ask_child(argv, around | {"CUDA_VISIBLE_DEVICES": gpu.uuid}, gpu.uuid, ask)
        speeds.append(speed)
        problems += [f"{name}: {trouble}" for trouble in troubles]
    return Measured(speeds=Speeds(dram_gb_s=dram, gpus=tuple(speeds)), problems=tuple(problems))


def describe(measured: Measured) -> str:
    """A line a figure; what could not be measured is said and not left out."""
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
    """What the child printed: figures, and problems in words. Anything else is one more problem."""
    unknown: dict[str, float | None] = {field.name: None for field in fields(GpuSpeed) if field.name != "uuid"}
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return GpuSpeed(uuid=uuid, **unknown), [f"the child printed no report: {text[:80]!r}"]
    if not isinstance(report, dict) or not isinstance(report.get("problems", []), list):
        return GpuSpeed(uuid=uuid, **unknown), [f"the child printed another thing than its report: {text[:80]!r}"]
    rates = {name: _rate(report.get(name)) for name in unknown}
    return GpuSpeed(uuid=uuid, **rates), [str(problem) for problem in report.get("problems", [])]


def _dram(threads: int, usable_mib: int, problems: list[str]) -> float | None:
    try:
        rate = measure_dram(threads, usable_mib)
    except MemoryError as error:
        problems.append(f"host memory is not measured: {error}")
        return None
    if rate is None:
        problems.append(f"host memory is not measured: {usable_mib} MiB are left, and a quarter of it is too little")
    return rate


def _dram_beside(
    argv: Sequence[str],
    environment: Mapping[str, str],
    problems: list[str],
    ask: _Ask,
) -> float | None:
    """Raises RunTimeout where it is no longer wanted."""
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
        problems.append("host memory is not measured: the child that reads it printed no figure")
    return rate


def _options(gpu: Gpu, threads: int, usable_mib: int) -> tuple[str, ...]:
    # The child needs its share beside page-locked memory, which is 512 MiB unless little is left.
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
