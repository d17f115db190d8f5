"""NVIDIA GPUs, queried in a child process with a time limit, so that a hung driver cannot block the server.

Driver problems never raise here; they become `GpuProbe.problem`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from appliance.probe.gpu.driver import NVML, find, reaching
from appliance.probe.machine.hardware import Gpu, GpuHolder, GpuProbe
from appliance.run import RunTimeout, run

TIMEOUT_S = 15.0
CHILD = (sys.executable, "-m", "appliance.probe.gpu.nvml")
_ABSURD = 1e6  # GB/s and watts above this are not real readings
_UUIDS = ("GPU-", "MIG-")
_NO_DEVICE = ("", "void", "none")


def is_gpu_requested(root: Path, environment: Mapping[str, str]) -> bool:
    """True if this container was given a GPU: by the NVIDIA runtime's variable or by device files (dxg is WSL's)."""
    has_device = any((root / "dev").glob("nvidia*")) or (root / "dev/dxg").exists()
    return has_device or environment.get("NVIDIA_VISIBLE_DEVICES", "") not in _NO_DEVICE


def query_gpus(
    root: Path,
    environment: Mapping[str, str],
    volume: Path | None = None,
    *,
    child: Sequence[str] = CHILD,
    timeout_s: float = TIMEOUT_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> GpuProbe:
    """Query NVML. Without its library no child is started and no GPU is reported.

    The child is ended as soon as `is_wanted` returns False; another thread may change that.
    """
    found, seen = find(NVML, root, environment, volume), GpuProbe()
    if found.library is not None:
        told = _ask_child(reaching(environment, found.folder, volume), child, timeout_s, is_wanted)
        seen = only_visible(told, environment)
    elif (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia").exists():
        seen = GpuProbe(problem=f"the NVIDIA driver is here but {NVML} is missing: start the container with --gpus all")
    return replace(seen, warnings=(*seen.warnings, *found.refused))


def parse_nvidia_report(text: str) -> GpuProbe:
    """Parse the child's output. Any other output becomes a problem, never an exception."""
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        return GpuProbe(problem=f"the NVML child printed no report: {text[:80]!r}")
    entries = report.get("gpus", []) if isinstance(report, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return GpuProbe(problem=f"the NVML child's output is not a report: {text[:80]!r}")
    gpus = [_parse_gpu(entry, position) for position, entry in enumerate(entries)]
    said = [words for each in _entries(report.get("warnings")) if (words := _word(each))]
    return GpuProbe(
        gpus=tuple(map(_clipped, gpus)),
        driver=_word(report.get("driver")),
        cuda_driver=_word(report.get("cuda_driver")),
        problem=_word(report.get("problem")),
        warnings=(*said, *(words for gpu in gpus if (words := _beyond(gpu)))),
    )


def _beyond(gpu: Gpu) -> str | None:
    """Return a warning if the GPU reports more free memory than it has in total, else None."""
    if gpu.vram_free_mib is None or gpu.vram_total_mib is None or gpu.vram_free_mib <= gpu.vram_total_mib:
        return None
    return (
        f"NVML says that {gpu.vram_free_mib:,} of {gpu.vram_total_mib:,} MiB of {gpu.name or f'GPU {gpu.index}'} are "
        "free: the total is used instead"
    )


def _clipped(gpu: Gpu) -> Gpu:
    return replace(gpu, vram_free_mib=gpu.vram_total_mib) if _beyond(gpu) else gpu


def only_visible(found: GpuProbe, environment: Mapping[str, str]) -> GpuProbe:
    """Keep the devices that CUDA_VISIBLE_DEVICES selects, if it is set, and add a warning.

    A uuid may be abbreviated, and everything after an unknown entry is ignored, both as in CUDA. Numbers follow the PCI
    order used everywhere here; CUDA's own default order is fastest first. NVIDIA_VISIBLE_DEVICES is read by the
    container runtime. If NVML shows more GPUs than its uuids name, as in a privileged container, only the named ones
    are kept. Its numbers are ignored: they are the host's and cannot be mapped to the container's.
    """
    given = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    if given.startswith(_UUIDS):
        found = _left(found, "NVIDIA_VISIBLE_DEVICES", given, is_silent_if_all=True)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    return found if wanted is None else _left(found, "CUDA_VISIBLE_DEVICES", wanted)


def is_narrowed(environment: Mapping[str, str]) -> bool:
    """True if `only_visible` may leave out some of the GPUs."""
    given = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return "CUDA_VISIBLE_DEVICES" in environment or given.startswith(_UUIDS)


def _left(found: GpuProbe, variable: str, value: str, *, is_silent_if_all: bool = False) -> GpuProbe:
    if not found.gpus:
        return found
    named = [word.strip() for word in value.split(",")]
    words = list(takewhile(lambda word: any(_is_named(gpu, word) for gpu in found.gpus), named))
    seen = tuple(gpu for gpu in found.gpus if any(_is_named(gpu, word) for word in words))
    if is_silent_if_all and len(seen) == len(found.gpus):
        return found
    said = f"{variable}={value} leaves {len(seen)} of {len(found.gpus)} devices"
    return replace(found, gpus=seen, warnings=(*found.warnings, said))


def _is_named(gpu: Gpu, word: str) -> bool:
    if word.startswith(_UUIDS):
        return (gpu.uuid or "").startswith(word) or (gpu.mig_parent or "").startswith(word)
    return gpu.mig_profile is None and word == str(gpu.index)


def _ask_child(
    environment: Mapping[str, str], child: Sequence[str], timeout_s: float, is_wanted: Callable[[], bool]
) -> GpuProbe:
    try:
        finished = run(child, timeout_s=timeout_s, environment=environment, is_wanted=is_wanted)
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
        sm_count=_count(entry.get("sm_count")) or None,
        sm_clock_mhz=_count(entry.get("sm_clock_mhz")) or None,
        is_unified=entry.get("is_unified") is True,
        problem=_word(entry.get("problem")),
        bus_bits=_count(entry.get("bus_bits")),
        memory_clock_mhz=_count(entry.get("memory_clock_mhz")),
        bandwidth_gb_s=_size(entry.get("bandwidth_gb_s")),
        bandwidth_source=_word(entry.get("bandwidth_source")),
        pcie_generation=_count(entry.get("pcie_generation")),
        pcie_width=_count(entry.get("pcie_width")),
        pcie_generation_max=_count(entry.get("pcie_generation_max")),
        pcie_width_max=_count(entry.get("pcie_width_max")),
        nvlink_peers=tuple(peer for each in _entries(entry.get("nvlink_peers")) if (peer := _count(each)) is not None),
        mig_profile=_word(entry.get("mig_profile")),
        mig_parent=_word(entry.get("mig_parent")),
        ecc=_switch(entry.get("ecc")),
        display=_switch(entry.get("display")),
        power_limit_w=_size(entry.get("power_limit_w")),
        power_limit_default_w=_size(entry.get("power_limit_default_w")),
        holders=tuple(_holder(each) for each in _entries(entry.get("holders")) if isinstance(each, dict)),
    )


def _holder(entry: dict[str, Any]) -> GpuHolder:
    return GpuHolder(
        pid=_count(entry.get("pid")) or 0, name=_word(entry.get("name")), used_mib=_count(entry.get("used_mib"))
    )


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _size(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < _ABSURD else None  # type: ignore[operator,arg-type]


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
