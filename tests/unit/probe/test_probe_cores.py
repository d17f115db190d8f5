"""Kinds of cores: from cpu_capacity, Intel's two PMUs, and clocks; and from contradictory files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from appliance.probe import CoreGroup
from appliance.probe.machine.cores import CAPACITY, CLOCK, IDENTITY, PERFORMANCE, query_core_groups, query_cores
from appliance.probe.machine.host import query_cpu
from tests.unit.probe.machine import put

CPU = "/sys/devices/system/cpu/cpu{}/{}"
SIBLINGS = "topology/core_cpus_list"
# Cix P1 as the kernel shows it: four A520, four A720 at 2.6 GHz and four at 2.3
CIX = {**dict.fromkeys(range(4), "279"), **dict.fromkeys(range(4, 8), "1024"), **dict.fromkeys(range(8, 12), "905")}


def files_of(name: str, values: Mapping[int, str]) -> dict[str, str]:
    return {CPU.format(cpu, name): f"{value}\n" for cpu, value in values.items()}


def of_single_threads(root: Path, count: int, *values: dict[str, str]) -> Path:
    files = {CPU.format(cpu, SIBLINGS): f"{cpu}\n" for cpu in range(count)}
    files["/sys/devices/system/cpu/online"] = f"0-{count - 1}\n"
    for more in values:
        files |= more
    return put(root, files)


def hybrid(root: Path, *values: dict[str, str]) -> Path:
    """Write a machine with two large cores of two threads (0 and 1, 2 and 3) and four small ones."""
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", **{cpu: str(cpu) for cpu in range(4, 8)}}
    files = files_of(SIBLINGS, siblings)
    files |= {"/sys/devices/cpu_core/cpus": "0-3\n", "/sys/devices/cpu_atom/cpus": "4-7\n"}
    files["/sys/devices/system/cpu/online"] = "0-7\n"
    for more in values:
        files |= more
    return put(root, files)


def groups(root: Path, affinity: Collection[int]) -> tuple[tuple[CoreGroup, ...], str | None]:
    cores = query_cores(root, affinity)
    assert cores is not None
    return query_core_groups(root, cores)


def test_of_a_core_that_is_half_allowed_only_that_half_counts(tmp_path: Path) -> None:
    assert query_cores(hybrid(tmp_path), {1, 2, 3, 6}) == ((1,), (2, 3), (6,))


def test_arm_tells_the_capacity_of_each_core(tmp_path: Path) -> None:
    found, problem = groups(of_single_threads(tmp_path, 12, files_of(CAPACITY, CIX)), range(12))
    assert found == (
        CoreGroup(capacity=1.0, cores=4, cpus=(4, 5, 6, 7)),
        CoreGroup(capacity=0.884, cores=4, cpus=(8, 9, 10, 11)),
        CoreGroup(capacity=0.272, cores=4, cpus=(0, 1, 2, 3)),
    )
    assert problem is None


def test_arms_kinds_have_maker_and_part(tmp_path: Path) -> None:
    parts = {cpu: f"0x00000000410f{'d80' if value == '279' else 'd81'}1" for cpu, value in CIX.items()}
    parts[8] = "0x" + "f" * 5000
    root = of_single_threads(tmp_path, 12, files_of(CAPACITY, CIX), files_of(IDENTITY, parts))
    assert [group.part for group in groups(root, range(12))[0]] == ["0x41.0xd81", None, "0x41.0xd80"]


@pytest.mark.parametrize(
    ("affinity", "expected"),
    [
        ((0, 1, 4), ((1.0, (4,)), (0.272, (0, 1)))),
        ((0, 1), ((0.272, (0, 1)),)),  # beside the fastest of the machine, which others have
        ((9, 8), ((0.884, (8, 9)),)),
    ],
)
def test_only_cores_of_the_cpuset_count(
    tmp_path: Path, affinity: tuple[int, ...], expected: tuple[tuple[float, tuple[int, ...]], ...]
) -> None:
    cpu = query_cpu(of_single_threads(tmp_path, 12, files_of(CAPACITY, CIX)), frozenset(affinity), None)
    assert tuple((group.capacity, group.cpus) for group in cpu.groups) == expected
    assert cpu.is_unequal == (len(expected) > 1)


def test_a_quota_leaves_the_fastest_cores(tmp_path: Path) -> None:
    cpu = query_cpu(of_single_threads(tmp_path, 12, files_of(CAPACITY, CIX)), frozenset(range(12)), 5.0)
    assert cpu.capacities == (1.0, 1.0, 1.0, 1.0, 0.884)


def test_intels_kinds_are_compared_by_what_acpi_counts(tmp_path: Path) -> None:
    perf = files_of(PERFORMANCE, {**dict.fromkeys(range(4), "57"), **dict.fromkeys(range(4, 8), "33")})
    clock = files_of(CLOCK, {**dict.fromkeys(range(4), "4500000"), **dict.fromkeys(range(4, 8), "3300000")})
    equal = files_of(CAPACITY, dict.fromkeys(range(8), "1024"))  # what the kernel says where threads share cores
    found, problem = groups(hybrid(tmp_path / "perf", perf, clock, equal), range(8))
    assert found == (
        CoreGroup(capacity=1.0, cores=2, cpus=(0, 1, 2, 3)),
        CoreGroup(capacity=0.579, cores=4, cpus=(4, 5, 6, 7)),
    )
    same = files_of(PERFORMANCE, dict.fromkeys(range(8), "57"))
    found, problem = groups(hybrid(tmp_path / "clock", same, clock), range(8))
    assert [group.capacity for group in found] == [1.0, 0.733]
    found, problem = groups(hybrid(tmp_path / "small", clock), [5, 6])
    assert ([(group.capacity, group.cores) for group in found], problem) == ([(0.733, 2)], None)
    found, problem = groups(hybrid(tmp_path / "same", same), range(8))
    assert (found, problem) == (
        (),
        "sysfs has cpu_core and cpu_atom, and does not say how fast these kinds of cores are",
    )


def test_elsewhere_the_highest_clock_tells_and_the_best_of_a_kind_are_no_kind(tmp_path: Path) -> None:
    clocks = {0: "5100000", 1: "5000000", 2: "4900000", 3: "3300000"}
    found, _ = groups(of_single_threads(tmp_path, 4, files_of(CLOCK, clocks)), range(4))
    assert [(group.capacity, group.cpus) for group in found] == [(1.0, (0, 1, 2)), (0.647, (3,))]
    equal = of_single_threads(tmp_path / "equal", 4, files_of(CLOCK, dict.fromkeys(range(4), "3000000")))
    assert groups(equal, range(4)) == ((CoreGroup(capacity=1.0, cores=4, cpus=(0, 1, 2, 3)),), None)


def test_a_machine_that_says_no_clock_has_equal_cores_where_they_are_of_one_kind(tmp_path: Path) -> None:
    same = files_of(IDENTITY, dict.fromkeys(range(2), "0x00000000410fd4f0"))
    assert groups(of_single_threads(tmp_path / "a", 2, same), range(2))[0][0].cores == 2
    two = files_of(IDENTITY, {0: "0x00000000410fd801", 1: "0x00000000410fd811"}) | files_of(
        CAPACITY, {0: "1024", 1: "1024"}
    )
    found, problem = groups(of_single_threads(tmp_path / "b", 2, two), range(2))
    assert (found, problem) == ((), "cores are of 2 kinds by midr_el1, and their speeds are unknown")
    assert groups(of_single_threads(tmp_path / "c", 2), range(2)) == ((), None)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "cpu_capacity of CPU 1 is '0'"),
        ("1025", "cpu_capacity of CPU 1 is '1025'"),
        ("-5", "cpu_capacity of CPU 1 is '-5'"),
        ("fast\x1b[31m", r"cpu_capacity of CPU 1 is 'fast\x1b[31m'"),
        ("٣", "cpu_capacity of CPU 1 is '٣'"),
        ("9" * 5000, "cpu_capacity of CPU 1 is '99"),
        ("", "CPU 1 has no cpu_capacity, but others have"),
    ],
)
def test_a_file_that_cannot_be_leaves_the_kinds_unknown_and_says_why(tmp_path: Path, value: str, words: str) -> None:
    capacities = files_of(CAPACITY, {0: "1024", 1: value})
    clocks = files_of(CLOCK, {0: "2600000", 1: "1800000"})
    cpu = query_cpu(of_single_threads(tmp_path, 2, capacities, clocks), frozenset({0, 1}), None)
    assert (cpu.groups, cpu.capacities, cpu.physical) == ((), (), 2)
    assert (cpu.groups_problem or "").startswith(words)
    assert len(cpu.groups_problem or "") < 100


def test_a_core_that_is_missing_from_the_files_of_the_machine(tmp_path: Path) -> None:
    root = of_single_threads(tmp_path, 3, files_of(CAPACITY, {0: "1024", 2: "512"}))
    assert groups(root, range(3)) == ((), "CPU 1 has no cpu_capacity, but others have")
    assert query_cores(root, [0, 7]) is None
