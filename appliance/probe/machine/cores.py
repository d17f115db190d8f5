"""CPU cores, and the speed of each relative to the fastest core of the machine.

On Arm, `cpu_capacity` reports it, of 1024: instructions per cycle x highest clock (Linux, sched-capacity.rst). All CPUs
have 1024 if the kernel has no data. Intel's hybrid CPUs name their core kinds by two PMUs, cpu_core and cpu_atom.
ACPI's `highest_perf` rates both kinds in one unit, but has the same value for all on some machines
(sched-ext/scx#1903). In that case, and everywhere else, the highest clock is used. AMD's `highest_perf` ranks equal
cores, so it is not used there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from appliance.probe.machine.hardware import CoreGroup
from appliance.probe.machine.sysfs import first_bytes, parse_cpulist

CPUS = "sys/devices/system/cpu"
CAPACITY, PERFORMANCE, CLOCK = "cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq"
IDENTITY = "regs/identification/midr_el1"  # Arm: maker, part and revision
_MOST: Mapping[str, int] = {CAPACITY: 1024, PERFORMANCE: 2**32 - 1, CLOCK: 10**8}
# Cores of one kind differ by less: the best cores of a chip are allowed a higher clock.
SAME_KIND = 0.9
_MOST_CPUS = 4096  # read from a list; no kernel is built for more than 8,192

Core = tuple[int, ...]  # the CPUs of one core


def query_cores(root: Path, affinity: Collection[int]) -> tuple[Core, ...] | None:
    """Return the cores with CPUs in `affinity`, each with those CPUs. None if a CPU does not report its siblings."""
    folder = root / CPUS
    cores: list[Core] = []
    remaining = set(affinity)
    while remaining:
        cpu = min(remaining)
        siblings = _siblings(folder / f"cpu{cpu}/topology")
        if cpu not in siblings:
            return None
        cores.append(tuple(sorted(remaining & set(siblings))))
        remaining -= set(siblings)
    return tuple(cores) or None


def query_core_groups(root: Path, cores: tuple[Core, ...]) -> tuple[tuple[CoreGroup, ...], str | None]:
    """Return groups of `cores`, fastest first, and a problem.

    No groups if their speeds are unknown. The problem says why, if sysfs reports speeds that contradict each other.
    """
    try:
        speeds = _query_speeds(root, cores)
    except ValueError as error:
        return (), str(error)
    if not speeds:
        return (), None
    return _grouped(root / CPUS, cores, speeds), None


def _grouped(folder: Path, cores: tuple[Core, ...], speeds: Mapping[int, int]) -> tuple[CoreGroup, ...]:
    fastest = max(speeds.values())
    kinds: list[tuple[int, list[Core]]] = []
    for core in sorted(cores, key=lambda core: (-speeds[core[0]], core)):
        if not kinds or speeds[core[0]] < SAME_KIND * kinds[-1][0]:
            kinds.append((speeds[core[0]], []))
        kinds[-1][1].append(core)
    return tuple(
        CoreGroup(
            capacity=max(0.001, round(speed / fastest, 3)),
            cores=len(members),
            cpus=tuple(sorted(cpu for core in members for cpu in core)),
            part=parse_part(first_bytes(folder / f"cpu{members[0][0]}/{IDENTITY}")),
        )
        for speed, members in kinds
    )


def parse_part(text: str) -> str | None:
    """Parse maker and part from Arm's midr_el1: "0x00000000410fd811" gives "0x41.0xd81"."""
    match = re.fullmatch(r"0x0{8}([0-9a-f]{2})[0-9a-f]{2}([0-9a-f]{3})[0-9a-f]", text.strip())
    return f"0x{match[1]}.0x{match[2]}" if match else None


def _query_speeds(root: Path, cores: tuple[Core, ...]) -> dict[int, int]:
    """Speed of the first CPU of each core, and of every other online CPU, as numbers without a unit.

    Other CPUs are included because the fastest may be one that this process must not use. Raises ValueError for
    contradictory files.
    """
    folder = root / CPUS
    own = {cpu for core in cores for cpu in core}
    online = parse_cpulist(first_bytes(folder / "online"))[:_MOST_CPUS]
    cpus = sorted({core[0] for core in cores} | (set(online) - own))
    capacities = _numbers(folder, CAPACITY, cpus)
    if len(set(capacities.values())) > 1:
        return capacities
    kinds = [set(parse_cpulist(first_bytes(root / f"sys/devices/{kind}/cpus"))) for kind in ("cpu_core", "cpu_atom")]
    if all(kinds):
        return _of_hybrid(folder, cpus, *kinds)
    return _numbers(folder, CLOCK, cpus) or _equal(folder, cpus, capacities)


def _of_hybrid(folder: Path, cpus: list[int], large: set[int], small: set[int]) -> dict[int, int]:
    """Speeds of a hybrid CPU. If only one kind is online, the first file that exists is used."""
    for name in (PERFORMANCE, CLOCK):
        found = _numbers(folder, name, cpus)
        of_large, of_small = ([found[cpu] for cpu in kind if cpu in found] for kind in (large, small))
        if found and (not of_small or not of_large or max(of_small) < max(of_large)):
            return found
    message = "sysfs has cpu_core and cpu_atom, and does not say how fast these kinds of cores are"
    raise ValueError(message)


def _equal(folder: Path, cpus: list[int], capacities: dict[int, int]) -> dict[int, int]:
    """Speeds if no CPU reports its clock, as in virtual machines: equal. Raises ValueError if the cores are of several
    kinds."""
    kinds = {first_bytes(folder / f"cpu{cpu}/{IDENTITY}").strip() for cpu in cpus}
    if len(kinds) > 1:
        message = f"cores are of {len(kinds)} kinds by midr_el1, and their speeds are unknown"
        raise ValueError(message)
    return capacities if kinds == {""} else dict.fromkeys(cpus, 1)


def _numbers(folder: Path, name: str, cpus: list[int]) -> dict[int, int]:
    """Read this file of each CPU; empty if no CPU has it. Raises ValueError if only some have it or a number is
    invalid."""
    texts = {cpu: first_bytes(folder / f"cpu{cpu}/{name}").strip() for cpu in cpus}
    if not any(texts.values()):
        return {}
    for cpu, text in texts.items():
        is_number = text.isascii() and text.isdecimal() and len(text) <= 10
        if not is_number or not 0 < int(text) <= _MOST[name]:
            message = f"{name} of CPU {cpu} is {text!r:.40}" if text else f"CPU {cpu} has no {name}, but others have"
            raise ValueError(message)
    return {cpu: int(text) for cpu, text in texts.items()}


def _siblings(folder: Path) -> tuple[int, ...]:
    for name in ("core_cpus_list", "thread_siblings_list"):  # thread_siblings_list is the name before Linux 5.3
        text = first_bytes(folder / name)
        if text:
            return parse_cpulist(text)
    return ()
