"""Machines that golden plans are made for: tests/fakes/machines, some without a GPU, one with more measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from appliance.probe import Cpu, GpuProbe, GpuSpeed, Hardware, Memory, Speeds, Volume
from tests.fakes.machines import hardware_of

_DESCRIBED = (
    "laptop-5060", "2x2080ti-22g", "4x2080ti-22g", "4070+3060", "3090+4090+5060", "24+8", "2x4090", "4090-shared",
    "a100-mig", "h100", "h200", "gb10", "t4", "2-socket",
)  # fmt: skip


HASWELL = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")


def _without_gpu(memory_mib: int, cores: int, *, limit_mib: int | None = None) -> Hardware:
    return Hardware(
        cpu=Cpu(model_name="described", logical=2 * cores, physical=cores, quota=None, isa=HASWELL),
        memory=Memory(
            total_mib=memory_mib,
            available_mib=memory_mib - 2048,
            limit_mib=limit_mib,
            limit_used_mib=None if limit_mib is None else 64,
            memlock_limit_mib=8,
        ),
        numa=(),
        volume=Volume(path=Path("/data"), free_mib=100_000, total_mib=500_000, is_writable=True),
        gpus=GpuProbe(),
        gpu_requested=False,
    )


def _alone(name: str) -> Hardware:
    """With its first card only."""
    found = hardware_of(name)
    return replace(found, gpus=replace(found.gpus, gpus=found.gpus.gpus[:1]))


def _measured(name: str) -> Hardware:
    """With one card, and what `probe --measure` could find there."""
    found = hardware_of(name)
    card = found.gpus.gpus[0]
    speed = GpuSpeed(
        uuid=card.uuid or "",
        pinned_gb_s=25.6,
        pageable_gb_s=11.0,
        memory_gb_s=921.0,
        overlapped_pinned_gb_s=20.0,
        overlapped_dram_gb_s=50.0,
    )
    gpus = replace(found.gpus, gpus=(card,))
    return replace(found, gpus=gpus, speeds=Speeds(dram_gb_s=74.0, gpus=(speed,)))


MACHINES: Mapping[str, Hardware] = {
    "cpu-16g": _without_gpu(16384, 8),
    "cpu-limit-8g": _without_gpu(65536, 16, limit_mib=8192),
    **{name: hardware_of(name) for name in _DESCRIBED},
    "4090": _alone("2x4090"),
    "4090-measured": _measured("2x4090"),
}
