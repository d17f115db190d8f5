"""Messages about who holds the memory."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe import Gpu, GpuHolder, GpuProbe, Hardware, Memory
from appliance.probe.load.holders import held_mib, own_pids, parse_resident, query_residents, who_holds
from tests.fakes.machines import hardware_of
from tests.unit.probe.machine import put


def machine(*holders: GpuHolder, free_mib: int = 24564, available_mib: int = 64000, **limits: int) -> Hardware:
    hardware = hardware_of("4090-shared")
    memory = Memory(
        total_mib=64000,
        available_mib=available_mib,
        limit_mib=limits.get("limit_mib"),
        limit_used_mib=limits.get("limit_used_mib"),
        memlock_limit_mib=8,
    )
    gpu = replace(hardware.gpus.gpus[0], vram_total_mib=24564, vram_free_mib=free_mib, holders=holders)
    return replace(hardware, memory=memory, gpus=GpuProbe(gpus=(gpu,)))


def status(name: str, anonymous_mib: int, shared_mib: int = 0) -> str:
    return (
        f"Name:\t{name}\nPid:\t1\nVmRSS:\t{99 << 20} kB\nRssAnon:\t{anonymous_mib << 10} kB\n"
        f"RssFile:\t{90 << 20} kB\nRssShmem:\t{shared_mib << 10} kB\n"
    )


PYTHON = GpuHolder(pid=4711, name="/usr/bin/python", used_mib=5120)


def test_who_holds_host_memory_is_told_without_our_own(tmp_path: Path) -> None:
    put(
        tmp_path,
        {f"/proc/{pid}/status": status(name, mib) for pid, name, mib in ((7, "ours", 9000), (8, "game", 8000))},
    )
    assert [holder.name for holder in query_residents(tmp_path, frozenset({7}))] == ["game"]
    assert [holder.name for holder in query_residents(tmp_path, frozenset())] == ["ours", "game"]


def test_one_process_on_a_gpu(tmp_path: Path) -> None:
    assert who_holds(machine(PYTHON, free_mib=24564 - 5120), tmp_path) == (
        "5,120 MiB of GPU 0 are held by python (pid 4711)"
    )


def test_several_on_a_gpu_the_largest_first(tmp_path: Path) -> None:
    small = [GpuHolder(pid=pid, name=None, used_mib=None) for pid in (1, 2, 3)]
    assert who_holds(machine(*small, PYTHON, free_mib=18000), tmp_path) == (
        "6,564 MiB of GPU 0 are held by others, the largest first: python (pid 4711, 5,120 MiB), a process (pid 1), "
        "a process (pid 2), 1 more"
    )


def test_a_gpu_whose_processes_a_container_cannot_see(tmp_path: Path) -> None:
    assert who_holds(machine(free_mib=20000), tmp_path) == (
        "4,564 MiB of GPU 0 are held by processes that cannot be seen from here"
    )


def test_our_own_engine_is_nobody(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as engine:
        put(tmp_path, {f"/proc/{engine.pid}/status": status("python", 9000)})
        ours = machine(replace(PYTHON, pid=engine.pid), free_mib=24564 - 5120)
        theirs = machine(PYTHON, free_mib=24564 - 5120)
        assert who_holds(ours, tmp_path) == "no other process is seen to hold memory"
        assert who_holds(theirs, tmp_path) == "5,120 MiB of GPU 0 are held by python (pid 4711)"
        engine.kill()


def test_the_largest_processes_of_the_host(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/20/status": status("postgres", 3000, shared_mib=1000),
            "/proc/30/status": status("firefox", 6000),
            "/proc/40/status": status("bash", 5),
            "/proc/50/status": "garbage",
            "/proc/60/comm": "ended\n",
        },
    )
    assert who_holds(machine(available_mib=52000), tmp_path) == (
        "12,000 MiB of the host's memory are held by others, the largest first: "
        "firefox (pid 30, 6,000 MiB), postgres (pid 20, 4,000 MiB)"
    )


def test_a_host_whose_processes_a_container_cannot_see(tmp_path: Path) -> None:
    words = who_holds(machine(available_mib=52000), tmp_path)
    assert words == "12,000 MiB of the host's memory are held by other processes on this machine"


def test_what_is_left_of_a_limit(tmp_path: Path) -> None:
    words = who_holds(machine(available_mib=52000, limit_mib=16000, limit_used_mib=9000), tmp_path)
    assert words == "9,000 MiB of this container's 16,000 MiB are held by other processes on this machine"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (status("a b", 7, 3), ("a b", 10)),
        ("Name:\told\nVmRSS:\t2048 kB\n", ("old", 2)),
        ("Name:\tkthreadd\n", ("kthreadd", None)),
        ("VmRSS:\tmany kB\n", (None, None)),
        ("", (None, None)),
    ],
)
def test_resident_memory(text: str, found: tuple[str | None, int | None]) -> None:
    assert parse_resident(text) == found


@given(text=st.text())
def test_whatever_the_kernel_says_is_no_crash(text: str) -> None:
    assert (parse_resident(f"RssAnon:{text}")[1] or 0) >= 0


def on_card(*held: tuple[int, int | None]) -> Gpu:
    holders = tuple(GpuHolder(pid=pid, name=None, used_mib=mib) for pid, mib in held)
    return machine(*holders).gpus.gpus[0]


DESKTOP = (7, 300)


@pytest.mark.parametrize(
    ("held", "tree", "ours"),
    [
        ([DESKTOP, (40, 9000)], {40, 41}, {40}),
        ([(40, 9000), (41, 20)], {40, 41}, {40, 41}),
        ([(7, 9000)], {7}, {7}),  # the number of a process that has gone
        ([DESKTOP, (4711, 9000)], {40}, {4711}),  # the driver has the host's numbers
        ([DESKTOP, (4711, 9000), (4712, 50)], {40}, set()),  # and another program began meanwhile
        ([DESKTOP], {40}, set()),
        ([], {40}, set()),
        ([(40, 9000)], set(), {40}),  # /proc is hidden
    ],
)
def test_which_processes_are_the_engines(held: list[tuple[int, int | None]], tree: set[int], ours: set[int]) -> None:
    assert own_pids(on_card(*held), tree, on_card(DESKTOP)) == ours


def test_memory_is_that_of_all_its_processes_or_unknown() -> None:
    there = on_card((40, 9000), (41, 20), DESKTOP)
    assert held_mib(there, {40, 41}) == 9020
    assert held_mib(on_card((40, 9000), DESKTOP), {40, 41}) is None  # one is gone: another engine
    assert held_mib(on_card((40, None), (41, 20)), {40, 41}) is None
    assert held_mib(there, set()) is None
