"""NVIDIA GPUs, asked for in a child process with a time limit: a hung driver cannot take the server with it.

Nothing here raises for what a driver does; it becomes `GpuProbe.problem`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.probe.hardware import Gpu, GpuProbe
from appliance.run import RunTimeout, run

TIMEOUT_S = 15.0
LIBRARY = "libnvidia-ml.so.1"
CHILD = (sys.executable, "-m", "appliance.probe.nvml")
# Where container runtimes put it: Debian and Ubuntu, Red Hat, GKE and old nvidia-docker, WSL.
_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "usr/local/nvidia/lib",
    "usr/lib/wsl/lib",
)
_NO_DEVICE = ("", "void", "none")


def is_gpu_requested(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether this container was given a GPU: by the NVIDIA runtime's variable, or by its device files."""
    return environment.get("NVIDIA_VISIBLE_DEVICES", "") not in _NO_DEVICE or any((root / "dev").glob("nvidia*"))


def has_library(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether the dynamic loader would find NVML. `ctypes.util.find_library` asks gcc and ldconfig: 100 ms and more."""
    searched = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if any((folder / LIBRARY).exists() for folder in [*searched, *(root / folder for folder in _FOLDERS)]):
        return True
    try:
        return LIBRARY.encode() in (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return False


def query_gpus(
    root: Path, environment: Mapping[str, str], *, child: Sequence[str] = CHILD, timeout_s: float = TIMEOUT_S
) -> GpuProbe:
    """What NVML says. Without its library no child is started, and no GPU is known."""
    if has_library(root, environment):
        return _ask_child(environment, child, timeout_s)
    if (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia").exists():
        return GpuProbe(problem=f"the NVIDIA driver is here but {LIBRARY} is not: start the container with --gpus all")
    return GpuProbe()


def parse_nvidia_report(text: str) -> GpuProbe:
    """What the child printed. Anything else than its report is a problem, never an exception."""
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return GpuProbe(problem=f"the NVML child printed no report: {text[:80]!r}")
    entries = report.get("gpus", []) if isinstance(report, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return GpuProbe(problem=f"the NVML child printed another thing than its report: {text[:80]!r}")
    return GpuProbe(
        gpus=tuple(_parse_gpu(entry, position) for position, entry in enumerate(entries)),
        driver=_word(report.get("driver")),
        cuda_driver=_word(report.get("cuda_driver")),
        problem=_word(report.get("problem")),
    )


def _ask_child(environment: Mapping[str, str], child: Sequence[str], timeout_s: float) -> GpuProbe:
    try:
        finished = run(child, timeout_s=timeout_s, environment=environment)
    except RunTimeout:
        return GpuProbe(problem=f"NVML did not answer within {timeout_s:g} s: the driver hangs")
    except OSError as error:
        return GpuProbe(problem=f"the NVML child could not be started: {error}")
    if finished.returncode != 0:
        last = (finished.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return GpuProbe(problem=f"the NVML child ended with {finished.returncode}: {last[:200]}")
    return parse_nvidia_report(finished.stdout)


def _parse_gpu(entry: dict[str, Any], position: int) -> Gpu:
    index = _count(entry.get("index"))
    return Gpu(
        index=position if index is None else index,
        name=_word(entry.get("name")),
        uuid=_word(entry.get("uuid")),
        sm=_word(entry.get("sm")),
        vram_total_mib=_count(entry.get("vram_total_mib")),
        vram_free_mib=_count(entry.get("vram_free_mib")),
        pci_bus_id=_word(entry.get("pci_bus_id")),
    )


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
