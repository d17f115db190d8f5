"""Counters of the CPU from recorded /proc and /sys, and what the child that watches GPUs printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe.cgroup import CpuGroup, parse_pressure, query_cpu_groups, query_cpu_pressure
from appliance.probe.hardware import GpuProbe
from appliance.probe.load import (
    TICKS_PER_S,
    GpuLoad,
    GpuLoads,
    GpuProcess,
    only_known,
    parse_answer,
    parse_cpu_times,
    parse_gpu_loads,
    parse_process_times,
    query_load,
    query_tree,
)
from appliance.run import Finished
from tests.fakes.machines import gpus_of
from tests.unit.probe.machine import V2_MOUNT, put, v1_mount

CGROUP = "/sys/fs/cgroup"
T = TICKS_PER_S
STAT = f"""cpu  {9 * T} 0 {3 * T} 1000 10 {7 * T} {8 * T} {2 * T} 0 0
cpu0 {4 * T} {1 * T} {1 * T} 500 5 {3 * T} {4 * T} {1 * T} 0 0
cpu1 {5 * T} {0 * T} {2 * T} 500 5 {4 * T} {4 * T} {1 * T} 0 0
intr 123 0 9
ctxt 456
"""
OURS = frozenset({0, 1})


def process(pid: int, parent: int, seconds: tuple[int, int, int, int], name: str = "llama-server") -> str:
    user, system, children_user, children_system = (each * T for each in seconds)
    head = f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194560 1 2 3 4"
    return f"{head} {user} {system} {children_user} {children_system} 20 0 1 0 99 1000 200\n"


def test_the_times_of_the_cpus_that_we_may_use() -> None:
    assert parse_cpu_times(STAT, OURS) == (2, 13, 2)
    assert parse_cpu_times(STAT, frozenset({1, 7})) == (1, 7, 1)


def test_all_cpus_where_a_container_lists_none_of_ours() -> None:
    assert parse_cpu_times(STAT, frozenset({6, 7})) == (2, 12, 2)
    assert parse_cpu_times(STAT.splitlines()[0], OURS) == (2, 12, 2)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "cpu -1 0 0 0 0 0 0 0\n"])
def test_no_times_of_cpus(text: str) -> None:
    assert parse_cpu_times(text, OURS) is None


def test_a_process_of_any_name() -> None:
    assert parse_process_times(process(7, 3, (1, 2, 4, 8), name="a) S 1 (b")) == (3, 15)
    assert parse_process_times("7 (sh) S 3 7\n") is None
    assert parse_process_times("") is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("some avg10=1.00 avg60=0.10 avg300=0.01 total=2500000\nfull avg10=0 avg60=0 avg300=0 total=9\n", 2.5),
        ("full avg10=0.00 avg60=0.00 avg300=0.00 total=9\n", None),
        ("some avg10=0.00 total=many\n", None),
        ("\n\nsome\n", None),
        ("", None),
    ],
)
def test_pressure(text: str, seconds: float | None) -> None:
    assert parse_pressure(text) == seconds


@given(
    text=st.text() | st.lists(st.sampled_from(["cpu", "cpu0", " 1", " x", "\n", "some ", "total=1", ")"])).map("".join)
)
def test_whatever_the_kernel_says_is_no_crash(text: str) -> None:
    times = parse_cpu_times(text, OURS)
    assert times is None or (times[0] > 0 and min(times[1:]) >= 0)
    assert (parse_pressure(text) or 0) >= 0
    assert (parse_process_times(text) or (0, 0.0))[1] >= 0


def test_version_2_counts_for_each_level(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": "0::/pod/own\n",
            f"{CGROUP}/cpu.stat": "usage_usec 9000000\nuser_usec 1\n",
            f"{CGROUP}/pod/cpu.stat": "usage_usec 5000000\nnr_periods 10\nnr_throttled 4\nthrottled_usec 1500000\n",
            f"{CGROUP}/pod/own/cpu.stat": "usage_usec 3000000\nthrottled_usec many\n",
            f"{CGROUP}/pod/own/cpu.pressure": "some avg10=0 avg60=0 avg300=0 total=750000\n",
        },
    )
    assert query_cpu_groups(tmp_path) == (
        CpuGroup(used_s=3),
        CpuGroup(used_s=5, throttled_s=1.5),
        CpuGroup(used_s=9),
    )
    assert query_cpu_pressure(tmp_path) == 0.75


def test_version_1_counts_use_and_throttling_in_two_places(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "/proc/self/mountinfo": v1_mount("cpu")
            + v1_mount("cpuacct")
            + V2_MOUNT.replace(CGROUP, f"{CGROUP}/unified"),
            "/proc/self/cgroup": "2:cpuacct:/own\n1:cpu:/own\n0::/\n",
            f"{CGROUP}/cpu/own/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 1500000000\n",
            f"{CGROUP}/cpuacct/own/cpuacct.usage": "5000000000\n",
            f"{CGROUP}/cpuacct/cpuacct.usage": "7000000000\n",
            f"{CGROUP}/unified/cpu.stat": "usage_usec 1\n",
        },
    )
    assert query_cpu_groups(tmp_path) == (CpuGroup(used_s=5, throttled_s=1.5), CpuGroup(used_s=7))
    assert query_cpu_pressure(tmp_path) is None


def test_no_counters_at_all(tmp_path: Path) -> None:
    sample = query_load(tmp_path, own_pid=1, cpus=OURS)
    assert (sample.cpus, sample.busy_s, sample.steal_s, sample.own_s, sample.own_pids) == (None,) * 4 + (frozenset(),)
    assert (sample.group_pressure_s, sample.host_pressure_s, sample.groups) == (None, None, ())


TREE = {
    "/proc/10/stat": process(10, 1, (1, 0, 5, 0)),
    "/proc/11/stat": process(11, 10, (2, 1, 0, 0)),
    "/proc/12/stat": process(12, 11, (7, 0, 0, 0)),
    "/proc/99/stat": process(99, 1, (50, 0, 0, 0)),
}
CHILDREN = {
    "/proc/10/task/10/children": "",
    "/proc/10/task/15/children": "11 404 ",  # started by another thread; one of them has ended
    "/proc/11/task/11/children": "12 x\n",
    "/proc/12/task/12/children": "10 \n",  # no such tree is real: it must end all the same
}


@pytest.mark.parametrize("files", [TREE | CHILDREN, TREE], ids=["lists of children", "a walk over all processes"])
def test_our_own_work_is_that_of_our_tree(tmp_path: Path, files: dict[str, str]) -> None:
    put(tmp_path, {**files, "/proc/stat": STAT, "/proc/pressure/cpu": "some total=3000000\n"})
    assert query_tree(tmp_path, 10) == {10: 6, 11: 3, 12: 7}
    sample = query_load(tmp_path, own_pid=10, cpus=OURS)
    assert (sample.own_s, sample.own_pids) == (16, {10, 11, 12})
    assert (sample.cpus, sample.busy_s, sample.steal_s, sample.host_pressure_s) == (2, 13, 2, 3)


def test_this_machine_says_how_busy_it_is() -> None:
    sample = query_load(Path("/"))
    assert sample.cpus == len(os.sched_getaffinity(0))
    assert os.getpid() in sample.own_pids
    assert 0 < (sample.own_s or 0) <= (sample.busy_s or 0) + 1


GPU = {"index": 0, "uuid": "GPU-1", "sm_clock_mhz": 1200, "reasons": 4, "utilization": 7, "processes": [{"pid": 5}]}


def test_a_report_of_the_child() -> None:
    text = "watching\n" + json.dumps({"samples": [[GPU], [{"index": 0, "utilization": None}]], "own_pids": [5, "x"]})
    first = GpuLoad(
        index=0,
        uuid="GPU-1",
        sm_clock_mhz=1200,
        reasons=4,
        utilization=7,
        processes=(GpuProcess(pid=5, name=None, used_mib=None),),
    )
    assert parse_gpu_loads(text) == GpuLoads(samples=((first,), (GpuLoad(index=0),)), own_pids=frozenset({5}))


def test_a_driver_in_trouble_is_a_problem_in_words() -> None:
    assert parse_gpu_loads('{"problem": "NVML: Driver Not Loaded"}').problem == "NVML: Driver Not Loaded"
    dead = parse_answer(Finished(returncode=-11, stdout="", stderr="first\nlast\n")).problem
    assert dead == "the child that watches GPUs ended with -11: last"
    assert (parse_gpu_loads("hello").problem or "").endswith("printed another thing than its report: 'hello'")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([0, 5, "GPU-1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["samples", "own_pids", "problem", "index", "uuid", "utilization", "processes", "pid"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(text=st.text() | JSON.map(json.dumps) | JSON.map(lambda each: json.dumps({"samples": [[each]], "own_pids": []})))
def test_whatever_the_child_prints_is_a_report_or_a_problem(text: str) -> None:
    loads = parse_gpu_loads(text)
    assert isinstance(loads.problem, str) or all(gpu.index >= 0 for sample in loads.samples for gpu in sample)


def test_devices_that_are_not_ours_are_left_out() -> None:
    both = gpus_of("2x4090")
    sample = tuple(GpuLoad(index=gpu.index, uuid=gpu.uuid) for gpu in both)
    assert only_known(GpuLoads(samples=(sample, sample)), GpuProbe(gpus=both[1:])).samples == (sample[1:], sample[1:])
