"""Checks of the machine without its GPUs: CPU, memory, and what the kernel allows this container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.errors import FatalError
from appliance.plan import Kernels, RuledOut
from appliance.probe import Cpu, Hardware
from appliance.settings import Settings

MIB = 1024 * 1024
LITTLE_MIB = 1024  # with less memory no useful model can be served
SWAPPED_MIB = 1024  # more swap is in use than idle services account for
SHM_MIB = 1024  # each pair of GPUs exchanges tens of MiB through it; Docker's default of 64 MiB is too little


def host_checks(
    root: Path,
    settings: Settings,
    hardware: Hardware,
    kernels: Kernels | FatalError | None,
    ruled_out: RuledOut | None = None,
) -> Iterator[Check]:
    """Yield the checks. `root` is the folder with /proc and /sys. `kernels` are those that a start would use, or the
    error that it would end with; None: the image does not tell."""
    yield _cpu(hardware, kernels, ruled_out or RuledOut())
    yield _quota(hardware)
    yield _memory(hardware)
    yield _memlock(settings, hardware)
    yield _shm(root / "dev/shm", hardware)
    yield _swap(root)
    yield _hugepages(root)


def _cpu(hardware: Hardware, kernels: Kernels | FatalError | None, ruled_out: RuledOut) -> Check:
    if isinstance(kernels, FatalError):
        return failed("cpu", kernels)
    cpu = hardware.cpu
    seen = f"{cpu.model_name or 'unnamed'}; {' '.join(cpu.isa) or 'no vector extensions known'}"
    if kernels is None or kernels.variant is None:
        return passed("cpu", seen)
    seen += f"; kernels: {kernels.variant}"
    if not ruled_out.seen:
        return passed("cpu", seen)
    out = "; ".join(f"{name}: {why}" for name, why in sorted(ruled_out.seen.items()))
    return warned("cpu", f"{seen}; ruled out: {out}", f"to try them again, remove {ruled_out.where}")


def _quota(hardware: Hardware) -> Check:
    cpu = hardware.cpu
    cores = f"{cpu.logical} CPUs on {cpu.physical or 'an unknown number of'} cores{_kinds(cpu)}"
    if cpu.quota is None:
        return passed("cpu limit", f"{cores}, no quota")
    seen = f"{cores}, a quota of {cpu.quota:g}"
    return judged("cpu limit", seen, "give it more with --cpus" if cpu.quota < 1 else None)


def _kinds(cpu: Cpu) -> str:
    if cpu.groups_problem:
        return f" that are assumed equal ({cpu.groups_problem})"
    kinds = ", ".join(f"{group.cores} of {group.capacity:.0%}" for group in cpu.groups)
    return f" ({kinds} of the fastest's speed)" if cpu.is_unequal else ""


def _memory(hardware: Hardware) -> Check:
    memory = hardware.memory
    limit = "no limit" if memory.limit_mib is None else f"{memory.limit_mib:,} MiB is this container's limit"
    seen = f"{memory.usable_mib:,} MiB usable of {memory.total_mib:,}; {limit}"
    return judged("memory", seen, "raise --memory, or stop other programs" if memory.usable_mib < LITTLE_MIB else None)


def _memlock(settings: Settings, hardware: Hardware) -> Check:
    limit = hardware.memory.memlock_limit_mib
    seen = "no limit" if limit is None else f"{limit:,} MiB"
    is_wanted = "mlock" in settings.load_mode and limit is not None
    return judged("memlock", seen, "load_mode locks the weights: start with --ulimit memlock=-1" if is_wanted else None)


def _shm(folder: Path, hardware: Hardware) -> Check:
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return warned("shared memory", f"cannot be examined: {error.strerror}", "give the container its own /dev/shm")
    total_mib = space.f_blocks * space.f_frsize // MIB
    is_little = len(hardware.gpus.gpus) > 1 and total_mib < SHM_MIB
    remedy = "several GPUs exchange data through it: start with --shm-size 1g" if is_little else None
    return judged("shared memory", f"{total_mib:,} MiB", remedy)


def _swap(root: Path) -> Check:
    found = dict(re.findall(r"^(Swap\w+):\s+(\d{1,20}) kB$", _text(root / "proc/meminfo"), re.MULTILINE))
    if "SwapTotal" not in found or "SwapFree" not in found:
        return passed("swap", "unknown")
    total_mib, free_mib = int(found["SwapTotal"]) // 1024, int(found["SwapFree"]) // 1024
    used_mib = total_mib - free_mib
    remedy = "the host is short of memory: weights in swap are read back for every token"
    return judged("swap", f"{used_mib:,} MiB used of {total_mib:,}", remedy if used_mib > SWAPPED_MIB else None)


def _hugepages(root: Path) -> Check:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text)
    if match is None:
        return passed("huge pages", "unknown")
    remedy = (
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled on the host makes reading weights somewhat faster"
    )
    return judged("huge pages", match[1], remedy if match[1] == "never" else None)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
