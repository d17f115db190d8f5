"""Step 1: this machine's hardware, as far as this process may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from appliance.probe.bandwidth.speeds import load_speeds
from appliance.probe.gpu.driver import CUDA, Found, find
from appliance.probe.gpu.nvidia import is_gpu_requested, query_gpus
from appliance.probe.machine.cgroup import query_oom_kills
from appliance.probe.machine.hardware import (
    CoreGroup,
    Cpu,
    Gpu,
    GpuHolder,
    GpuProbe,
    GpuSpeed,
    Hardware,
    Memory,
    NumaNode,
    Speeds,
    Volume,
    as_document,
    fingerprint,
    gpu_uuids,
)
from appliance.probe.machine.host import query_host, query_numa_node

__all__ = [
    "CoreGroup",
    "Cpu",
    "Gpu",
    "GpuHolder",
    "GpuProbe",
    "GpuSpeed",
    "Hardware",
    "Memory",
    "NumaNode",
    "Speeds",
    "Volume",
    "as_document",
    "count_oom_kills",
    "fingerprint",
    "gpu_uuids",
    "probe",
]

SPEEDS_FOLDER = "profiles"  # folder on the volume
_ROOT = Path("/")


def count_oom_kills() -> int | None:
    """Number of processes of our control group that a memory killer has ended so far; None if nothing counts them."""
    return query_oom_kills(_ROOT)


def probe(volume: Path, environment: Mapping[str, str]) -> Hardware:
    """Inspect the machine. Raises OSError if /proc is missing. GPU problems do not raise: see `gpus.problem`."""
    cpu, memory, numa, space = query_host(_ROOT, volume)
    gpus = _with_driver(query_gpus(_ROOT, environment, volume), find(CUDA, _ROOT, environment, volume))
    hardware = Hardware(
        cpu=cpu,
        memory=memory,
        numa=numa,
        volume=space,
        gpus=_placed(_ROOT, gpus),
        gpu_requested=is_gpu_requested(_ROOT, environment),
    )
    return replace(hardware, speeds=load_speeds(volume / SPEEDS_FOLDER, hardware))


def _with_driver(found: GpuProbe, library: Found) -> GpuProbe:
    return replace(
        found,
        libcuda=str(library.library) if library.library else None,
        driver_dir=str(library.folder) if library.folder else None,
        warnings=(*found.warnings, *library.refused),
    )


def _placed(root: Path, found: GpuProbe) -> GpuProbe:
    gpus = (replace(gpu, numa_node=query_numa_node(root, gpu.pci_bus_id)) for gpu in found.gpus)
    return replace(found, gpus=tuple(gpus))
