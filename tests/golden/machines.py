"""Machines that golden plans are made for. Bandwidths are 2 x memory clock x bus width of the published clocks; free
memory is what a card without other work leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from appliance.probe import Cpu, Gpu, GpuHolder, GpuProbe, GpuSpeed, Hardware, Memory, Speeds, Volume


def _host(ram_gib: int, cores: int, *gpus: Gpu, speeds: Speeds | None = None, limit_gib: int | None = None) -> Hardware:
    total = ram_gib * 1024
    return Hardware(
        cpu=Cpu(model_name="a CPU", logical=2 * cores, physical=cores, quota=None, isa=("avx2", "fma")),
        memory=Memory(
            total_mib=total,
            available_mib=total - 2048,
            limit_mib=None if limit_gib is None else limit_gib * 1024,
            limit_used_mib=None if limit_gib is None else 64,
            memlock_limit_mib=8,
        ),
        numa=(),
        volume=Volume(path=Path("/data"), free_mib=100_000, total_mib=200_000, is_writable=True),
        gpus=GpuProbe(gpus=gpus, driver="580.95.05" if gpus else None),
        gpu_requested=bool(gpus),
        speeds=speeds,
    )


def _gpu(
    index: int, name: str, sm: str, total_mib: int, gb_s: float, *, pcie: tuple[int, int] = (4, 16),
    used_mib: int = 300, links: tuple[int, ...] = (), display: bool = False, holders: tuple[GpuHolder, ...] = (),
    mig: tuple[str, str] | None = None,
) -> Gpu:  # fmt: skip
    uuid = f"{'MIG' if mig else 'GPU'}-{index:08d}-0000-0000-0000-{total_mib:012d}"
    return Gpu(
        index=index,
        name=name,
        uuid=uuid,
        sm=sm,
        vram_total_mib=total_mib,
        vram_free_mib=total_mib - used_mib - sum(holder.used_mib or 0 for holder in holders),
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        bandwidth_gb_s=gb_s,
        bandwidth_source="memory clock x bus width",
        pcie_generation=1,
        pcie_width=pcie[1],
        pcie_generation_max=pcie[0],
        pcie_width_max=16,
        nvlink_peers=links,
        mig_profile=mig[0] if mig else None,
        mig_parent=mig[1] if mig else None,
        display=display,
        holders=holders,
    )


def _ti(index: int, count: int) -> Gpu:
    peers = tuple(other for other in range(count) if other != index)
    return _gpu(index, "NVIDIA GeForce RTX 2080 Ti", "75", 22528, 616.0, pcie=(3, 16), links=peers)


_GB10 = Gpu(
    index=0,
    name="NVIDIA GB10",
    uuid="GPU-00000010-0000-0000-0000-000000000000",
    sm="121",
    vram_total_mib=None,
    vram_free_mib=None,
    pci_bus_id="0000000F:01:00.0",
    is_unified=True,
    bandwidth_gb_s=273.0,
)
_H200 = _gpu(0, "NVIDIA H200", "90", 143771, 4800.0, pcie=(5, 16))
_BUSY = (GpuHolder(pid=4711, name="python3", used_mib=9000),)

MACHINES: Mapping[str, Hardware] = {
    "cpu-16g": _host(16, 8),
    "cpu-64g-limit-8g": _host(64, 16, limit_gib=8),
    "rtx5060-laptop-8g": _host(32, 8, _gpu(0, "NVIDIA GeForce RTX 5060 Laptop GPU", "120", 8151, 384.0, pcie=(4, 8))),
    "t4-16g": _host(32, 4, _gpu(0, "Tesla T4", "75", 15360, 320.0, pcie=(3, 16))),
    "rtx4070-rtx3060": _host(
        64,
        8,
        _gpu(0, "NVIDIA GeForce RTX 4070", "89", 12282, 504.0, display=True, used_mib=900),
        _gpu(1, "NVIDIA GeForce RTX 3060", "86", 12288, 360.0, pcie=(3, 4)),
    ),
    "rtx4090-24g-busy": _host(64, 16, _gpu(0, "NVIDIA GeForce RTX 4090", "89", 24564, 1008.0, holders=_BUSY)),
    "2x2080ti-22g-nvlink": _host(64, 8, _ti(0, 2), _ti(1, 2)),
    "4x2080ti-22g": _host(128, 16, *(_ti(index, 1) for index in range(4))),
    "2x4090": _host(128, 16, *(_gpu(i, "NVIDIA GeForce RTX 4090", "89", 24564, 1008.0) for i in range(2))),
    "3090-4090-5060": _host(
        64,
        16,
        _gpu(0, "NVIDIA GeForce RTX 3090", "86", 24576, 936.0),
        _gpu(1, "NVIDIA GeForce RTX 4090", "89", 24564, 1008.0),
        _gpu(2, "NVIDIA GeForce RTX 5060", "120", 8151, 448.0, pcie=(5, 8)),
    ),
    "24g-8g": _host(
        64,
        12,
        _gpu(0, "NVIDIA GeForce RTX 3060 Ti", "86", 8192, 448.0),
        _gpu(1, "NVIDIA GeForce RTX 3090", "86", 24576, 936.0),
    ),
    "a100-mig": _host(
        256,
        32,
        _gpu(0, "NVIDIA A100-SXM4-80GB", "80", 40192, 1019.5, mig=("3g.40gb", "GPU-parent"), used_mib=50),
        _gpu(0, "NVIDIA A100-SXM4-80GB", "80", 9728, 254.9, mig=("1g.10gb", "GPU-parent"), used_mib=20),
    ),
    "h200": _host(512, 64, _H200),
    "gb10-unified": _host(120, 20, _GB10),
    "rtx4090-measured": _host(
        128,
        16,
        _gpu(0, "NVIDIA GeForce RTX 4090", "89", 24564, 1008.0),
        speeds=Speeds(
            dram_gb_s=74.0,
            gpus=(
                GpuSpeed(
                    uuid="GPU-00000000-0000-0000-0000-000000024564",
                    pinned_gb_s=25.6,
                    pageable_gb_s=11.0,
                    memory_gb_s=921.0,
                    overlapped_pinned_gb_s=20.0,
                    overlapped_dram_gb_s=50.0,
                ),
            ),
        ),
    ),
}
