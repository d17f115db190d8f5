"""Find who holds the memory, when a plan that was measured here no longer fits."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from appliance.probe.load.processes import query_tree
from appliance.probe.machine.hardware import Gpu, GpuHolder, Hardware

NOTABLE_MIB = 256  # smaller amounts do not decide whether a plan fits
NAMED_MAX = 3
_FIELDS = re.compile(r"^(Name|VmRSS|RssAnon|RssShmem):\s*(.*?)(?: kB)?$", re.MULTILINE)


def who_holds(hardware: Hardware, root: Path = Path("/")) -> str:
    """Describe the holders, such as "5,120 MiB of GPU 0 are held by python (pid 4711)". Our own process tree is left
    out."""
    own = frozenset(query_tree(os.getpid()))
    parts = [words for gpu in hardware.gpus.gpus for words in _of_gpu(gpu, own)]
    parts += _of_host(hardware, query_residents(root, own))
    return "; ".join(parts) or "no other process is seen to hold memory"


def own_pids(gpu: Gpu, tree: Collection[int], before: Gpu) -> frozenset[int]:
    """Return the pids in `tree` that hold this GPU's memory.

    If the driver uses the host's pids, none is in the tree. Then the only holder that was absent `before` our engine
    started is returned. Empty if that is ambiguous.
    """
    ours = frozenset(holder.pid for holder in gpu.holders if holder.pid in tree)
    others = frozenset(holder.pid for holder in gpu.holders) - {holder.pid for holder in before.holders}
    return ours or (others if len(others) == 1 else frozenset())


def held_mib(gpu: Gpu, pids: Collection[int]) -> int | None:
    """Memory held by all of these processes, MiB. None if one is gone or the driver does not report it."""
    used = {holder.pid: holder.used_mib for holder in gpu.holders if holder.pid in pids and holder.used_mib is not None}
    return sum(used.values()) if used and len(used) == len(pids) else None


def parse_resident(text: str) -> tuple[str | None, int | None]:
    """Parse name and MiB from /proc/<pid>/status. Mapped files are left out if the kernel reports them apart: they are
    cache."""
    fields = dict(_FIELDS.findall(text))
    counted = [fields.get(name) for name in ("RssAnon", "RssShmem")]
    sizes = [each for each in (counted if counted[0] else [fields.get("VmRSS")]) if each]
    kib = [int(size) for size in sizes if size.isascii() and size.isdecimal() and len(size) < 20]
    return fields.get("Name") or None, sum(kib) // 1024 if kib else None


def query_residents(root: Path, own: frozenset[int]) -> tuple[GpuHolder, ...]:
    """List visible processes with a notable amount of host memory, largest first, without `own`."""
    found = []
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            text = (folder / "status").read_text("utf-8", "replace")
        except OSError:
            continue  # the process ended meanwhile
        name, mib = parse_resident(text)
        if folder.name.isdecimal() and int(folder.name) not in own and mib is not None and mib >= NOTABLE_MIB:
            found.append(GpuHolder(pid=int(folder.name), name=name, used_mib=mib))
    return tuple(sorted(found, key=lambda holder: -(holder.used_mib or 0)))


def _of_gpu(gpu: Gpu, own: frozenset[int]) -> Iterator[str]:
    if gpu.vram_total_mib is None or gpu.vram_free_mib is None:
        return
    ours_mib = sum(holder.used_mib or 0 for holder in gpu.holders if holder.pid in own)
    held_mib = gpu.vram_total_mib - gpu.vram_free_mib - ours_mib
    others = [holder for holder in gpu.holders if holder.pid not in own]
    if held_mib >= NOTABLE_MIB or others:
        who = _names(others, held_mib) if others else "processes that cannot be seen from here"
        slice_ = f" slice {gpu.mig_profile}" if gpu.mig_profile else ""
        yield f"{held_mib:,} MiB of GPU {gpu.index}{slice_} are held by {who}"


def _of_host(hardware: Hardware, others: Sequence[GpuHolder]) -> Iterator[str]:
    memory = hardware.memory
    held_mib, whose = memory.total_mib - memory.available_mib, "the host's memory"
    if memory.limit_mib is not None and memory.usable_mib < memory.available_mib:
        held_mib, whose = memory.limit_used_mib or 0, f"this container's {memory.limit_mib:,} MiB"
    if held_mib >= NOTABLE_MIB:
        who = _names(others, held_mib) if others else "other processes on this machine"
        yield f"{held_mib:,} MiB of {whose} are held by {who}"


def _names(holders: Sequence[GpuHolder], held_mib: int) -> str:
    named = sorted(holders, key=lambda holder: -(holder.used_mib or 0))
    words = [_name(holder, held_mib) for holder in named[:NAMED_MAX]]
    more = [f"{len(named) - NAMED_MAX} more"] if len(named) > NAMED_MAX else []
    return ("others, the largest first: " if len(named) > 1 else "") + ", ".join([*words, *more])


def _name(holder: GpuHolder, held_mib: int) -> str:
    name = (holder.name or "a process").rsplit("/", 1)[-1]
    size = "" if holder.used_mib in (None, held_mib) else f", {holder.used_mib:,} MiB"
    return f"{name} (pid {holder.pid}{size})"
