"""CPU, memory, NUMA and the volume, from /proc and /sys. Under 15 ms, because every start runs it.

The `query_` functions take the folder that contains /proc and /sys, so that tests can use a recorded machine.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from appliance.probe.machine.cgroup import query_limits
from appliance.probe.machine.cores import query_core_groups, query_cores
from appliance.probe.machine.hardware import Cpu, Memory, NumaNode, Volume
from appliance.probe.machine.sysfs import first_bytes, parse_cpulist

MIB = 1024 * 1024
_ISA = re.compile(
    r"sse4_2|avx|avx2|f16c|fma|bmi2|avx512\w*|avx_vnni\w*|avx10\w*|amx_\w+"  # x86
    r"|asimd|asimdhp|asimddp|i8mm|bf16|sve\w*|sme\d?|sme_\w+"  # Arm
)

# Arm's fields are "CPU architecture" to "CPU revision".
_STEPPING = ("cpu family", "model", "stepping", "CPU architecture", "CPU part", "CPU variant", "CPU revision")


def parse_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Parse model name and ISA flags of the first CPU in /proc/cpuinfo. Flags that select no kernel are left out."""
    fields = _fields_of_first(text)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name") or None, tuple(sorted({flag for flag in flags if _ISA.fullmatch(flag)}))


def parse_stepping(text: str) -> tuple[str | None, str | None]:
    """Parse vendor and silicon revision of the first CPU in /proc/cpuinfo; None if they are not reported."""
    fields = _fields_of_first(text)
    numbers = [fields[name] for name in _STEPPING if fields.get(name)]
    return fields.get("vendor_id") or fields.get("CPU implementer") or None, ".".join(numbers) or None


def _fields_of_first(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo, or a NUMA node's, into MiB by name; lines without a number of kB are skipped."""
    found = re.findall(r"^(?:Node \d+ )?([\w()]+):\s*(\d{1,20}) kB$", text, re.MULTILINE | re.ASCII)
    return {name: int(kib) // 1024 for name, kib in found}


def parse_choice(text: str) -> str | None:
    """Return the word in brackets: sysfs shows a setting as "always [madvise] never"."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else None


def query_cpu(root: Path, affinity: frozenset[int], quota: float | None) -> Cpu:
    """Query the CPU. `affinity` is the set of CPUs that this process may run on, `quota` its share of time in cores."""
    text = first_bytes(root / "proc/cpuinfo")
    model_name, isa = parse_cpuinfo(text)
    vendor, stepping = parse_stepping(text)
    cores = query_cores(root, affinity)
    groups, problem = query_core_groups(root, cores) if cores else ((), None)
    return Cpu(
        model_name=model_name,
        logical=len(affinity),
        physical=len(cores) if cores else None,
        quota=quota,
        isa=isa,
        vendor=vendor,
        stepping=stepping,
        groups=groups,
        groups_problem=problem,
    )


def query_memory(root: Path, limit_bytes: int | None, headroom_bytes: int | None) -> Memory:
    """Query the memory. Raises OSError if /proc/meminfo does not report it: a plan needs it."""
    meminfo = parse_meminfo((root / "proc/meminfo").read_text("utf-8", "replace"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    used_mib = None
    if limit_bytes is not None and headroom_bytes is not None:
        # An outer limit may leave less than the tightest limit: memory taken by others under it counts as used.
        used_mib = -((headroom_bytes - limit_bytes) // MIB)
    return Memory(
        total_mib=_first_of(meminfo, "MemTotal"),
        # Kernels before 3.14 have no MemAvailable; free memory alone is a safe lower bound.
        available_mib=_first_of(meminfo, "MemAvailable", "MemFree"),
        limit_mib=None if limit_bytes is None else limit_bytes // MIB,
        limit_used_mib=used_mib,
        memlock_limit_mib=None if soft == resource.RLIM_INFINITY else soft // MIB,
        shm_mib=_size_mib(root / "dev/shm"),
        hugetlb_mib=meminfo.get("Hugetlb"),
        transparent_hugepages=parse_choice(first_bytes(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def query_numa(root: Path) -> tuple[NumaNode, ...]:
    """List the NUMA nodes by number; empty if the kernel shows none."""
    folder = root / "sys/devices/system/node"
    try:
        nodes = [node for node in folder.iterdir() if re.fullmatch(r"node\d+", node.name, re.ASCII)]
    except OSError:
        return ()
    return tuple(_numa_node(node) for node in sorted(nodes, key=lambda node: int(node.name[4:])))


def query_numa_node(root: Path, pci_bus_id: str | None) -> int | None:
    """NUMA node nearest to a PCI device; None if there is only one node or sysfs does not report it.

    NVML's nvmlDeviceGetNumaNodeId is not used: it returns the node that a GPU's own memory forms on Grace.
    """
    match = re.fullmatch(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", (pci_bus_id or "").lower())
    if match is None:
        return None
    # NVML writes the domain with eight digits, the kernel with four, and more only if needed.
    address = f"{int(match[1], 16):04x}{match[2]}"
    text = first_bytes(root / f"sys/bus/pci/devices/{address}/numa_node").strip()
    # -1: the device belongs to no node
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None


def query_volume(path: Path) -> Volume:
    try:
        space = os.statvfs(path)
    except OSError:
        return Volume(path=path, free_mib=None, total_mib=None, is_writable=False)
    return Volume(
        path=path,
        free_mib=space.f_bavail * space.f_frsize // MIB,
        total_mib=space.f_blocks * space.f_frsize // MIB,
        is_writable=os.access(path, os.W_OK | os.X_OK),
    )


def query_host(root: Path, volume: Path) -> tuple[Cpu, Memory, tuple[NumaNode, ...], Volume]:
    limits = query_limits(root)
    return (
        query_cpu(root, frozenset(os.sched_getaffinity(0)), limits.quota),
        query_memory(root, limits.memory_bytes, limits.memory_headroom_bytes),
        query_numa(root),
        query_volume(volume),
    )


def _size_mib(path: Path) -> int | None:
    try:
        space = os.statvfs(path)
    except OSError:
        return None
    return space.f_blocks * space.f_frsize // MIB


def _first_of(meminfo: dict[str, int], *names: str) -> int:
    for name in names:
        if name in meminfo:
            return meminfo[name]
    message = f"/proc/meminfo has no line {names[0]}"
    raise OSError(message)


def _numa_node(folder: Path) -> NumaNode:
    return NumaNode(
        id=int(folder.name[4:]),
        cpus=parse_cpulist(first_bytes(folder / "cpulist")),
        memory_mib=parse_meminfo(first_bytes(folder / "meminfo")).get("MemTotal"),
    )
