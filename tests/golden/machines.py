"""Machines that golden plans are made for: tests/fakes/machines, some without a GPU, one with more measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.probe import GpuSpeed, Hardware, Speeds
from tests.builders import machine
from tests.fakes.machines import hardware_of

_DESCRIBED = (
    "laptop-5060", "2x2080ti-22g", "4x2080ti-22g", "4070+3060", "3090+4090+5060", "24+8", "2x4090", "4090-shared",
    "a100-mig", "h100", "h200", "gb10", "t4", "2-socket",
)  # fmt: skip


HASWELL = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")


def without_gpu(memory_mib: int, cores: int, *, limit_mib: int | None = None) -> Hardware:
    return machine(
        total_mib=memory_mib, limit_mib=limit_mib, logical=2 * cores, physical=cores, isa=HASWELL, taken_mib=2048,
        limit_used_mib=64, volume_mib=200_000,
    )  # fmt: skip


def _alone(name: str) -> Hardware:
    """Return the machine with its first GPU only."""
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
    "cpu-16g": without_gpu(16384, 8),
    "cpu-limit-8g": without_gpu(65536, 16, limit_mib=8192),
    **{name: hardware_of(name) for name in _DESCRIBED},
    "4090": _alone("2x4090"),
    "4090-measured": _measured("2x4090"),
}
