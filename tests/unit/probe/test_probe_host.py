"""CPU, memory, NUMA and volume, from recorded trees and from the parsers alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe import (
    CoreGroup,
    Cpu,
    Gpu,
    GpuProbe,
    Hardware,
    Memory,
    NumaNode,
    Volume,
    as_document,
    fingerprint,
    gpu_uuids,
)
from appliance.probe.machine.host import (
    parse_cpuinfo,
    parse_meminfo,
    query_cpu,
    query_memory,
    query_numa,
    query_numa_node,
    query_volume,
)
from appliance.probe.machine.sysfs import parse_cpulist
from tests.unit.probe.machine import MIB, put

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Core(TM) Ultra 7 155H: a colon
flags\t\t: fpu sse sse2 smep sse4_2 avx avx2 f16c fma bmi2 avx_vnni avx512f amx_tile md_clear

processor\t: 1
model name\t: another
flags\t\t: avx512_bf16
"""
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def machine_with_smt(root: Path, name: str = "core_cpus_list") -> Path:
    """Write a machine with four cores of two threads; siblings are 0 and 4, 1 and 5, and so on."""
    files = {TOPOLOGY.format(cpu, name): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    return put(root, files | {"/proc/cpuinfo": CPUINFO})


def test_the_first_cpu_speaks_for_all() -> None:
    model_name, isa = parse_cpuinfo(CPUINFO)
    assert model_name == "Intel(R) Core(TM) Ultra 7 155H: a colon"
    assert isa == ("amx_tile", "avx", "avx2", "avx512f", "avx_vnni", "bmi2", "f16c", "fma", "sse4_2")


def test_an_arm_cpu_has_no_model_name() -> None:
    text = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd aes asimddp sve i8mm bf16 sm3\nCPU part\t: 0xd40\n"
    assert parse_cpuinfo(text) == (None, ("asimd", "asimddp", "bf16", "i8mm", "sve"))
    assert parse_cpuinfo("") == (None, ())


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("affinity", "quota", "physical", "threads_max", "cores"),
    [
        (range(8), None, 4, 8, 4),
        ([0, 4], None, 1, 2, 1),
        ([0, 1, 6], None, 3, 3, 3),
        (range(8), 2.5, 4, 2, 2),
        (range(8), 0.2, 4, 1, 1),
        (range(8), 6.0, 4, 6, 4),
    ],
)
def test_cores_that_may_be_used(
    tmp_path: Path, name: str, affinity: list[int], quota: float | None, physical: int, threads_max: int, cores: int
) -> None:
    cpu = query_cpu(machine_with_smt(tmp_path, name), frozenset(affinity), quota)
    assert (cpu.logical, cpu.physical, cpu.threads_max, cpu.cores) == (len(affinity), physical, threads_max, cores)


def test_cores_are_unknown_without_topology(tmp_path: Path) -> None:
    cpu = query_cpu(put(tmp_path, {TOPOLOGY.format(0, "core_cpus_list"): "nonsense"}), frozenset({0, 1}), None)
    assert (cpu.physical, cpu.cores, cpu.model_name, cpu.isa) == (None, 2, None, ())


def test_memory_and_its_limit(tmp_path: Path) -> None:
    put(tmp_path, {"/proc/meminfo": "MemTotal:  32768000 kB\nMemFree: 1 kB\nMemAvailable: 20480000 kB\nHugePages: 3\n"})
    memory = query_memory(tmp_path, None, None)
    assert (memory.total_mib, memory.available_mib, memory.usable_mib) == (32000, 20000, 20000)
    limited = query_memory(tmp_path, 4096 * MIB, 3000 * MIB + 1)
    assert (limited.limit_mib, limited.limit_used_mib, limited.usable_mib) == (4096, 1096, 3000)
    overdrawn = query_memory(tmp_path, 4096 * MIB, -5 * MIB)
    assert (overdrawn.limit_used_mib, overdrawn.usable_mib) == (4101, 0)
    unknown = query_memory(tmp_path, 4096 * MIB, None)
    assert (unknown.limit_used_mib, unknown.usable_mib) == (None, 4096)
    beyond = query_memory(tmp_path, 99_999 * MIB, 99_999 * MIB)
    assert beyond.usable_mib == 20000


def test_shared_memory_and_huge_pages(tmp_path: Path) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9216 kB\nMemAvailable: 4096 kB\nHugePages_Total:       2\nHugetlb:  4096 kB\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/dev/shm/some": "",
    }
    memory = query_memory(put(tmp_path, files), None, None)
    assert (memory.hugetlb_mib, memory.transparent_hugepages) == (4, "madvise")
    space = os.statvfs(tmp_path)
    assert memory.shm_mib == space.f_blocks * space.f_frsize // MIB
    put(tmp_path / "silent", {"/proc/meminfo": files["/proc/meminfo"].partition("HugePages")[0]})
    silent = query_memory(tmp_path / "silent", None, None)
    assert (silent.shm_mib, silent.hugetlb_mib, silent.transparent_hugepages) == (None, None, None)


@pytest.mark.parametrize(
    ("address", "text", "node"),
    [
        ("00000000:C1:00.0", "1\n", 1),
        ("0000:c1:00.0", "0\n", 0),
        ("00000000:C1:00.0", "-1\n", None),
        ("00000000:C1:00.0", "", None),
        ("00000001:C1:00.0", "1\n", None),
        ("../../../proc", "1\n", None),
        (None, "1\n", None),
    ],
)
def test_the_numa_node_of_a_gpu(tmp_path: Path, address: str | None, text: str, node: int | None) -> None:
    put(tmp_path, {"/sys/bus/pci/devices/0000:c1:00.0/numa_node": text})
    assert query_numa_node(tmp_path, address) == node


def test_memory_of_an_old_kernel_and_of_none(tmp_path: Path) -> None:
    put(tmp_path, {"/proc/meminfo": "MemTotal: 2048 kB\nMemFree: 1024 kB\n"})
    assert query_memory(tmp_path, None, None).available_mib == 1
    put(tmp_path, {"/proc/meminfo": "nonsense\n"})
    with pytest.raises(OSError, match="no line MemTotal"):
        query_memory(tmp_path, None, None)


def test_numa_nodes_in_order(tmp_path: Path) -> None:
    node = "/sys/devices/system/node/node{}/{}"
    put(
        tmp_path,
        {
            node.format(10, "cpulist"): "4-6\n",
            node.format(2, "cpulist"): "0-1,3\n",
            node.format(2, "meminfo"): "Node 2 MemTotal:   1048576 kB\nNode 2 MemFree:  1 kB\n",
            "/sys/devices/system/node/possible": "0-10\n",
        },
    )
    assert query_numa(tmp_path) == (
        NumaNode(id=2, cpus=(0, 1, 3), memory_mib=1024),
        NumaNode(id=10, cpus=(4, 5, 6), memory_mib=None),
    )
    assert query_numa(tmp_path / "missing") == ()


def test_a_volume(tmp_path: Path) -> None:
    volume = query_volume(tmp_path)
    assert volume.is_writable
    assert 0 < (volume.free_mib or 0) <= (volume.total_mib or 0)
    missing = query_volume(tmp_path / "missing")
    assert (missing.free_mib, missing.total_mib, missing.is_writable) == (None, None, False)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_volume_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert not query_volume(tmp_path).is_writable


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("", ()), ("5", (5,)), ("3-1,x,7", (7,)), ("0-99999999999", ())]
)
def test_cpulist(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == cpus


@given(text=st.text())
def test_whatever_the_kernel_says_of_itself_is_no_crash(text: str) -> None:
    assert list(parse_cpulist(text)) == sorted(set(parse_cpulist(text)))
    assert all(number >= 0 for number in parse_meminfo(text).values())
    name, isa = parse_cpuinfo(text)
    assert name != ""
    assert list(isa) == sorted(isa)


def gpu(index: int, bus: str, name: str) -> Gpu:
    return Gpu(
        index=index, name=name, uuid=f"GPU-{bus}", sm="90", vram_total_mib=1000, vram_free_mib=index, pci_bus_id=bus
    )


HARDWARE = Hardware(
    cpu=Cpu(model_name="A CPU", logical=8, physical=4, quota=2.5, isa=("avx2",)),
    memory=Memory(total_mib=1000, available_mib=900, limit_mib=500, limit_used_mib=100, memlock_limit_mib=None),
    numa=(NumaNode(id=0, cpus=(0, 1), memory_mib=None),),
    volume=Volume(path=Path("/data"), free_mib=5, total_mib=10, is_writable=True),
    gpus=GpuProbe(gpus=(gpu(0, "0000:81:00.0", "B"), gpu(1, "0000:01:00.0", "A")), driver="580.1"),
    gpu_requested=True,
)


def test_the_document_is_json_and_holds_what_follows() -> None:
    document = json.loads(json.dumps(as_document(HARDWARE)))
    assert document["volume"]["path"] == "/data"
    assert (document["cpu"]["threads_max"], document["cpu"]["cores"]) == (2, 2)
    assert document["memory"]["usable_mib"] == 400
    assert document["gpus"]["gpus"][0]["name"] == "B"


def test_uuids_are_told_in_the_order_of_the_fingerprint() -> None:
    cards = [replace(card, uuid=f"GPU-{card.name}") for card in HARDWARE.gpus.gpus]
    named = replace(HARDWARE, gpus=replace(HARDWARE.gpus, gpus=tuple(cards)))
    assert gpu_uuids(named) == tuple(f"GPU-{entry['name']}" for entry in fingerprint(named)["gpus"])
    unknown = replace(named, gpus=replace(named.gpus, gpus=tuple(replace(card, uuid=None) for card in cards)))
    assert gpu_uuids(unknown) == ()


def test_the_fingerprint_is_of_kinds_in_pci_order() -> None:
    print_ = fingerprint(HARDWARE)
    assert [entry["name"] for entry in print_["gpus"]] == ["A", "B"]
    assert (print_["threads_max"], print_["memory_mib"], print_["driver"]) == (2, 500, "580.1")
    busier = replace(
        HARDWARE,
        memory=replace(HARDWARE.memory, available_mib=1, limit_used_mib=499),
        volume=replace(HARDWARE.volume, free_mib=0),
        gpus=replace(HARDWARE.gpus, gpus=tuple(replace(card, vram_free_mib=0) for card in HARDWARE.gpus.gpus)),
    )
    assert fingerprint(busier) == print_
    assert fingerprint(replace(HARDWARE, cpu=replace(HARDWARE.cpu, quota=4.0))) != print_
    one, more = (replace(HARDWARE, cpu=replace(HARDWARE.cpu, quota=quota)) for quota in (1.0, 1.5))
    assert fingerprint(one) != fingerprint(more), "one more thread reads prompts"
    unlimited = replace(HARDWARE, memory=replace(HARDWARE.memory, limit_mib=5000))
    assert fingerprint(unlimited)["memory_mib"] == 1000  # a limit above what there is limits nothing


def test_other_kinds_of_cores_are_another_machine_and_equal_ones_keep_their_key() -> None:
    equal = replace(HARDWARE, cpu=replace(HARDWARE.cpu, groups=(CoreGroup(capacity=1.0, cores=4, cpus=(0, 1, 2, 3)),)))
    assert fingerprint(equal) == fingerprint(HARDWARE)
    groups = (CoreGroup(capacity=1.0, cores=2), CoreGroup(capacity=0.3, cores=2))
    unequal = replace(HARDWARE, cpu=replace(HARDWARE.cpu, groups=groups))
    assert fingerprint(unequal)["cores"] == [[1.0, 2], [0.3, 2]]


@pytest.mark.parametrize(
    "change", [{"bus_bits": 256}, {"pcie_width": 4}, {"power_limit_w": 200.0}, {"vram_total_mib": 2000}, {"sm": "89"}]
)
def test_another_kind_of_gpu_is_another_machine(change: dict[str, object]) -> None:
    cards = HARDWARE.gpus.gpus
    other = replace(HARDWARE, gpus=replace(HARDWARE.gpus, gpus=(replace(cards[0], **change), *cards[1:])))  # type: ignore[arg-type]
    assert fingerprint(other) != fingerprint(HARDWARE)


@pytest.mark.parametrize(
    "change", [{"uuid": "GPU-2"}, {"vram_free_mib": 7}, {"pcie_generation": 1}, {"display": True}, {"holders": ()}]
)
def test_another_card_of_the_same_kind_is_the_same_machine(change: dict[str, object]) -> None:
    """A GPU that is asleep or busy is also the same."""
    cards = HARDWARE.gpus.gpus
    other = replace(HARDWARE, gpus=replace(HARDWARE.gpus, gpus=(replace(cards[0], **change), *cards[1:])))  # type: ignore[arg-type]
    assert fingerprint(other) == fingerprint(HARDWARE)
