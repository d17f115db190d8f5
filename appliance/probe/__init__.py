"""Step 1: what machine this is, as far as this process may use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from appliance.probe.cgroup import query_oom_kills
from appliance.probe.hardware import (
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
)
from appliance.probe.host import query_host
from appliance.probe.nvidia import is_gpu_requested, query_gpus

__all__ = [
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
    "probe",
]

_ROOT = Path("/")


def count_oom_kills() -> int | None:
    """How many processes of our control group a memory killer has ended so far; None where nobody counts."""
    return query_oom_kills(_ROOT)


def probe(volume: Path, environment: Mapping[str, str]) -> Hardware:
    """Ask the machine. Raises OSError where there is no /proc; a GPU's trouble is in `gpus.problem`."""
    cpu, memory, numa, space = query_host(_ROOT, volume)
    return Hardware(
        cpu=cpu,
        memory=memory,
        numa=numa,
        volume=space,
        gpus=query_gpus(_ROOT, environment),
        gpu_requested=is_gpu_requested(_ROOT, environment),
    )
