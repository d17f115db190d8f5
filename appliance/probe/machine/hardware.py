"""Results of a probe. Facts only: None means unknown, unless a field's comment says that it means "no limit"."""

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

    capacity: float  # speed relative to the fastest core of the machine, above 0 and up to 1
    cores: int  # number of cores that this process may use
    cpus: tuple[int, ...] = ()  # CPUs of these cores; empty if unknown
    part: str | None = None  # Arm: maker and part, "0x41.0xd81"; None if the CPU does not report it


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The CPU as far as this process may use it."""

    model_name: str | None
    logical: int  # CPUs in the affinity mask, which a cpuset limits
    physical: int | None  # distinct cores among those
    quota: float | None  # CPU time in cores, the tightest limit of the cgroup path; None: no limit
    isa: tuple[str, ...]  # the kernel's names of the CPU flags that select an engine's kernels, sorted
    vendor: str | None = None
    stepping: str | None = None  # family, model and stepping, or Arm's equivalent: "6.85.7", "8.0xd0c.0x3.1"
    groups: tuple[CoreGroup, ...] = ()  # fastest first; empty if unknown whether the cores are equal
    groups_problem: str | None = None  # contradiction in what sysfs reports about the cores

    @property
    def threads_max(self) -> int:
        """Upper limit of useful threads: more are throttled or share a CPU."""
        return _whole_cores(self.logical, self.quota)

    @property
    def cores(self) -> int:
        """Physical cores within the quota, where tuning of the thread count starts: SMT siblings rarely help matrix
        work."""
        return _whole_cores(self.physical or self.logical, self.quota)

    @property
    def prompt_threads_more(self) -> int:
        """1 if the quota holds a quarter more than `cores`, else 0. Decode is slowed by a thread above the quota, since
        all wait for the one that is held; a prompt is not: with 1.5 CPUs, 2 threads read it 1.46 times as fast as 1."""
        cores = self.cores
        return 0 if self.quota is None else int(min(self.physical or self.logical, self.quota) >= 1.25 * cores)

    @property
    def capacities(self) -> tuple[float, ...]:
        """Capacity of each of these cores, fastest first; empty if unknown."""
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
    # used part of that limit; file cache is not counted, because the kernel drops it on demand
    limit_used_mib: int | None
    memlock_limit_mib: int | None  # RLIMIT_MEMLOCK; None: no limit
    shm_mib: int | None = None  # the size of /dev/shm; a container's is 64 unless --shm-size says otherwise
    hugetlb_mib: int | None = None  # reserved for explicit huge pages: other allocations cannot use it
    transparent_hugepages: str | None = None  # "always", "madvise" or "never"

    @property
    def usable_mib(self) -> int:
        """Memory that can be allocated now without swapping or being killed."""
        if self.limit_mib is None:
            return self.available_mib
        return max(0, min(self.available_mib, self.limit_mib - (self.limit_used_mib or 0)))


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    id: int
    cpus: tuple[int, ...]  # all CPUs of the node, not only those that this process may use
    memory_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Volume:
    path: Path
    free_mib: int | None  # for this user; None if the folder does not exist
    total_mib: int | None
    is_writable: bool  # by permission and mount; a full disk still counts as writable


@dataclass(frozen=True, kw_only=True)
class GpuHolder:
    """A process that holds GPU memory. In a container its name is usually unknown, because its pid is the host's."""

    pid: int
    name: str | None
    used_mib: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device that an engine can use: a whole GPU, or a MIG slice, which is a device of its own."""

    index: int  # NVML's index, in PCI order; for a slice, its parent's
    name: str | None
    uuid: str | None
    sm: str | None  # "90" for compute capability 9.0
    vram_total_mib: int | None  # None also if the GPU has no memory of its own, see is_unified
    vram_free_mib: int | None
    pci_bus_id: str | None
    sm_count: int | None = None  # streaming multiprocessors; for a slice, its own
    sm_clock_mhz: int | None = None  # the highest, which not every card sustains under load
    is_unified: bool = False  # uses the host's memory: plan with MemAvailable, and count it once
    problem: str | None = None  # why the device cannot be planned for: "does not answer: …"; None if it can
    bus_bits: int | None = None
    memory_clock_mhz: int | None = None  # the highest; NVML's clock, half the transfer rate of double data rate memory
    bandwidth_gb_s: float | None = None  # of its memory, 10^9 bytes/s; for a slice, its share
    bandwidth_source: str | None = None  # "memory clock x bus width", or "table: …" if NVML does not report them
    pcie_generation: int | None = None  # current value; an idle card steps down
    pcie_width: int | None = None
    pcie_generation_max: int | None = None  # the most that card and slot support
    pcie_width_max: int | None = None
    nvlink_peers: tuple[int, ...] = ()  # indices of GPUs at the other end of active links
    mig_profile: str | None = None  # "1g.10gb" for a slice; None for a whole GPU
    mig_parent: str | None = None  # uuid of the slice's GPU
    ecc: bool | None = None
    display: bool | None = None  # a screen is attached, or a desktop runs on it
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    numa_node: int | None = None  # NUMA node of its slot
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """NVML's answers. `problem` says why less is known than expected; None together with no GPUs means that there are
    none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: str | None = None  # newest CUDA release that the driver supports: "13.0"
    problem: str | None = None
    warnings: tuple[str, ...] = ()  # two sources that differ, with both values
    libcuda: str | None = None  # path of the driver's CUDA library
    driver_dir: str | None = None  # needed in LD_LIBRARY_PATH for it; None if the loader finds it by default

    @property
    def driver_folder(self) -> Path | None:
        return None if self.driver_dir is None else Path(self.driver_dir)


@dataclass(frozen=True, kw_only=True)
class GpuSpeed:
    """Measured bandwidths of one GPU, GB/s (10^9)."""

    uuid: str
    pinned_gb_s: float | None  # host to device from page-locked memory
    pageable_gb_s: float | None
    memory_gb_s: float | None  # read + write of its own memory
    overlapped_pinned_gb_s: float | None  # host to device while the CPU reads its memory
    overlapped_dram_gb_s: float | None  # the CPU's reads during the same time


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Bandwidths that `probe --measure` found on this machine; kept on the volume."""

    dram_gb_s: float | None  # read by all cores that this container may use
    gpus: tuple[GpuSpeed, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    cpu: Cpu
    memory: Memory
    numa: tuple[NumaNode, ...]
    volume: Volume
    gpus: GpuProbe
    gpu_requested: bool  # True if this container was given a GPU, even if it cannot be used
    speeds: Speeds | None = None  # None if never measured here


def as_document(hardware: Hardware) -> dict[str, Any]:
    """Return all facts and the values that follow from them, as JSON types."""
    document = asdict(hardware)
    document["volume"]["path"] = str(hardware.volume.path)
    document["cpu"] |= {"threads_max": hardware.cpu.threads_max, "cores": hardware.cpu.cores}
    document["memory"]["usable_mib"] = hardware.memory.usable_mib
    return document


def fingerprint(hardware: Hardware, gpus: Sequence[Gpu] | None = None) -> dict[str, Any]:
    """Return the parts of a profile's key: kinds and limits, no serial numbers and nothing that changes at run time."""
    cpu, memory = hardware.cpu, hardware.memory
    kinds = {"cores": [[group.capacity, group.cores] for group in cpu.groups]} if cpu.is_unequal else {}
    more = {"prompt_threads_more": cpu.prompt_threads_more} if cpu.prompt_threads_more else {}
    return {
        "cpu": cpu.model_name,
        "threads_max": cpu.threads_max,
        "physical": cpu.physical,
        **kinds,  # only if the cores differ
        **more,  # only if the quota has room for one
        "isa": list(cpu.isa),
        "memory_mib": memory.total_mib if memory.limit_mib is None else min(memory.limit_mib, memory.total_mib),
        "gpus": [_kind(gpu) for gpu in _in_pci_order(hardware, gpus)],
        "driver": hardware.gpus.driver,
    }


def gpu_uuids(hardware: Hardware, gpus: Sequence[Gpu] | None = None) -> tuple[str, ...]:
    """Return the uuids in the order of the fingerprint, without GPUs that have none."""
    return tuple(gpu.uuid for gpu in _in_pci_order(hardware, gpus) if gpu.uuid is not None)


def _in_pci_order(hardware: Hardware, gpus: Sequence[Gpu] | None) -> list[Gpu]:
    """Sort the given GPUs, or all of them, by PCI address."""
    return sorted(hardware.gpus.gpus if gpus is None else gpus, key=lambda gpu: (gpu.pci_bus_id or "", gpu.index))


def _kind(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "sm": gpu.sm,
        "vram_mib": gpu.vram_total_mib,
        "bus_bits": gpu.bus_bits,
        # The negotiated width, which depends on the slot. The generation is left out: it steps down when idle.
        "pcie_width": gpu.pcie_width,
        "power_limit_w": gpu.power_limit_w,
    }


def _whole_cores(count: int, quota: float | None) -> int:
    return max(1, math.floor(count if quota is None else min(count, quota)))
