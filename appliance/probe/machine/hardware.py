"""What a probe found. Facts only: None means unknown, unless a field's comment says that it means "no limit"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class CoreGroup:
    """Cores of one kind."""

    capacity: float  # what one of them computes beside the fastest core of the machine, above 0 and up to 1
    cores: int  # those that this process may use
    cpus: tuple[int, ...] = ()  # of these cores; empty: unknown which they are
    part: str | None = None  # of Arm: maker and part, "0x41.0xd81"; None where a CPU says no such thing


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The CPU as far as this process may use it."""

    model_name: str | None
    logical: int  # CPUs in the affinity mask, which a cpuset narrows
    physical: int | None  # distinct cores among those
    quota: float | None  # cores' worth of time, the tightest of the cgroup path; None: no limit
    isa: tuple[str, ...]  # the kernel's names of the flags that an engine's kernels are chosen by, sorted
    vendor: str | None = None
    stepping: str | None = None  # family, model and stepping, or what Arm has instead: "6.85.7", "8.0xd0c.0x3.1"
    groups: tuple[CoreGroup, ...] = ()  # of cores, the fastest first; empty: unknown whether they are equal
    groups_problem: str | None = None  # what sysfs says of them and cannot be

    @property
    def threads_max(self) -> int:
        """More threads than this are throttled or share a CPU."""
        return _whole_cores(self.logical, self.quota)

    @property
    def cores(self) -> int:
        """Where tuning of the thread count starts: SMT siblings rarely help matrix work."""
        return _whole_cores(self.physical or self.logical, self.quota)

    @property
    def capacities(self) -> tuple[float, ...]:
        """Of each of these cores, the fastest first; empty where they are unknown."""
        return tuple(group.capacity for group in self.groups for _ in range(group.cores))[: self.cores]

    @property
    def is_unequal(self) -> bool:
        return len({group.capacity for group in self.groups}) > 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Host memory and what the cgroups leave of it."""

    total_mib: int
    available_mib: int  # the kernel's own estimate (MemAvailable)
    limit_mib: int | None  # the tightest limit of the cgroup path; None: no limit
    limit_used_mib: int | None  # of that limit; cache of files, which the kernel drops on demand, is not counted
    memlock_limit_mib: int | None  # RLIMIT_MEMLOCK, which always can be read; None: no limit
    shm_mib: int | None = None  # the size of /dev/shm; a container's is 64 unless --shm-size says otherwise
    hugetlb_mib: int | None = None  # set aside for explicit huge pages: nobody else can allocate it
    transparent_hugepages: str | None = None  # "always", "madvise" or "never"

    @property
    def usable_mib(self) -> int:
        """What can be allocated now without swapping and without being killed."""
        if self.limit_mib is None:
            return self.available_mib
        return max(0, min(self.available_mib, self.limit_mib - (self.limit_used_mib or 0)))


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    id: int
    cpus: tuple[int, ...]  # all of the node, not only those that this process may use
    memory_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Volume:
    path: Path
    free_mib: int | None  # for this user; None: the folder is not there
    total_mib: int | None
    is_writable: bool  # by permission and mount; a full disk still counts as writable


@dataclass(frozen=True, kw_only=True)
class GpuHolder:
    """A process that has memory on a GPU. Inside a container the name is mostly unknown: its pid is the host's."""

    pid: int
    name: str | None
    used_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device that an engine could use: a whole GPU, or a slice of one (MIG), which is a device of its own."""

    index: int  # NVML's, which is PCI order; of a slice its parent's
    name: str | None
    uuid: str | None
    sm: str | None  # "90" for compute capability 9.0
    vram_total_mib: int | None  # None also where the GPU has no memory of its own, see is_unified
    vram_free_mib: int | None
    pci_bus_id: str | None
    sm_count: int | None = None  # streaming multiprocessors; of a slice its own
    sm_clock_mhz: int | None = None  # the highest, which no load sustains on every card
    is_unified: bool = False  # its memory is the host's: plan with MemAvailable, and count it once
    problem: str | None = None  # why nothing can be planned on it: "does not answer: …"; None: nothing is wrong
    bus_bits: int | None = None
    memory_clock_mhz: int | None = None  # the highest; NVML's clock, half the transfers of a double data rate
    bandwidth_gb_s: float | None = None  # of its memory, 10^9 bytes; of a slice the slice's own
    bandwidth_source: str | None = None  # "memory clock x bus width", or "table: …" where NVML is silent
    pcie_generation: int | None = None  # now; a sleeping card steps down
    pcie_width: int | None = None
    pcie_generation_max: int | None = None  # the most that card and slot can
    pcie_width_max: int | None = None
    nvlink_peers: tuple[int, ...] = ()  # indices of GPUs that an active link leads to
    mig_profile: str | None = None  # "1g.10gb" of a slice; None: a whole GPU
    mig_parent: str | None = None  # uuid of the GPU that it is cut from
    ecc: bool | None = None
    display: bool | None = None  # a screen is attached, or a desktop runs on it
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    numa_node: int | None = None  # that its slot hangs on
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """What NVML said. `problem` says in words why less is known than should be; None with no GPUs: there is none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None  # the newest CUDA release that the driver runs: "13.0"
    problem: str | None = None
    warnings: tuple[str, ...] = ()  # two sources that disagree, with both values
    libcuda: str | None = None  # the driver's library for programs that compute
    driver_dir: str | None = None  # what a program's LD_LIBRARY_PATH needs for it; None: the loader finds it unasked

    @property
    def driver_folder(self) -> Path | None:
        return None if self.driver_dir is None else Path(self.driver_dir)


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """Bandwidths of one GPU as measured, GB/s (10^9)."""

    uuid: str
    pinned_gb_s: float | None  # host to device from page-locked memory
    pageable_gb_s: float | None
    memory_gb_s: float | None  # reads of its own memory
    overlapped_pinned_gb_s: float | None  # host to device while the CPU streams its memory
    overlapped_dram_gb_s: float | None  # what the CPU still reads meanwhile


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What `probe --measure` found on this machine; kept on the volume."""

    dram_gb_s: float | None  # reads by all cores that this container may use
    gpus: tuple[GpuSpeed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    cpu: Cpu
    memory: Memory
    numa: tuple[NumaNode, ...]
    volume: Volume
    gpus: GpuProbe
    gpu_requested: bool  # somebody gave this container a GPU, whether or not it can be used
    speeds: Speeds | None = None  # None: never measured here


def as_document(hardware: Hardware) -> dict[str, Any]:
    """All facts, with what follows from them, as values that JSON knows."""
    document = asdict(hardware)
    document["volume"]["path"] = str(hardware.volume.path)
    document["cpu"] |= {"threads_max": hardware.cpu.threads_max, "cores": hardware.cpu.cores}
    document["memory"]["usable_mib"] = hardware.memory.usable_mib
    return document


def fingerprint(hardware: Hardware, gpus: Sequence[Gpu] | None = None) -> dict[str, Any]:
    """The parts that a profile is keyed by: kinds and limits; no serial numbers, nothing that changes while it runs."""
    cpu, memory = hardware.cpu, hardware.memory
    kinds = {"cores": [[group.capacity, group.cores] for group in cpu.groups]} if cpu.is_unequal else {}
    return {
        "cpu": cpu.model_name,
        "threads_max": cpu.threads_max,
        "physical": cpu.physical,
        **kinds,  # of equal cores all is said
        "isa": list(cpu.isa),
        "memory_mib": memory.total_mib if memory.limit_mib is None else min(memory.limit_mib, memory.total_mib),
        "gpus": [_kind(gpu) for gpu in _in_pci_order(hardware, gpus)],
        "driver": hardware.gpus.driver,
    }


def gpu_uuids(hardware: Hardware, gpus: Sequence[Gpu] | None = None) -> tuple[str, ...]:
    """In the order of the fingerprint; without those that have none."""
    return tuple(gpu.uuid for gpu in _in_pci_order(hardware, gpus) if gpu.uuid is not None)


def _in_pci_order(hardware: Hardware, gpus: Sequence[Gpu] | None) -> list[Gpu]:
    """Of all GPUs, or of those that are given."""
    return sorted(hardware.gpus.gpus if gpus is None else gpus, key=lambda gpu: (gpu.pci_bus_id or "", gpu.index))


def _kind(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "sm": gpu.sm,
        "vram_mib": gpu.vram_total_mib,
        "bus_bits": gpu.bus_bits,
        # The width that was negotiated, which a card in another slot changes; the generation steps down in sleep.
        "pcie_width": gpu.pcie_width,
        "power_limit_w": gpu.power_limit_w,
    }


def _whole_cores(count: int, quota: float | None) -> int:
    return max(1, math.floor(count if quota is None else min(count, quota)))
