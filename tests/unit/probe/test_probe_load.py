"""CPU counters from recorded /proc and /sys, and output of the child that watches GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe.load.counters import TICKS_PER_S, parse_cpu_times, query_load
from appliance.probe.load.load import GpuLoad, GpuLoads, GpuProcess, only_known, parse_answer, parse_gpu_loads
from appliance.probe.load.processes import query_tree
from appliance.probe.machine.hardware import GpuProbe
from appliance.run import Finished
from tests.fakes.machines import gpus_of

ROOT = Path(__file__).parents[3]
T = TICKS_PER_S
STAT = f"""cpu  {9 * T} 0 {3 * T} 1000 10 {7 * T} {8 * T} {2 * T} 0 0
cpu0 {4 * T} {1 * T} {1 * T} 500 5 {3 * T} {4 * T} {1 * T} 0 0
cpu1 {5 * T} {0 * T} {2 * T} 500 5 {4 * T} {4 * T} {1 * T} 0 0
intr 123 0 9
ctxt 456
"""
OURS = frozenset({0, 1})


def test_the_times_of_the_cpus_that_we_may_use() -> None:
    assert parse_cpu_times(STAT, OURS) == (2, 13, 2)
    assert parse_cpu_times(STAT, frozenset({1, 7})) == (1, 7, 1)


def test_all_cpus_where_a_container_lists_none_of_ours() -> None:
    assert parse_cpu_times(STAT, frozenset({6, 7})) == (2, 12, 2)
    assert parse_cpu_times(STAT.splitlines()[0], OURS) == (2, 12, 2)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "cpu -1 0 0 0 0 0 0 0\n"])
def test_no_times_of_cpus(text: str) -> None:
    assert parse_cpu_times(text, OURS) is None


@given(text=st.text() | st.lists(st.sampled_from(["cpu", "cpu0", " 1", " x", "\n", ")"])).map("".join))
def test_whatever_the_kernel_says_is_no_crash(text: str) -> None:
    times = parse_cpu_times(text, OURS)
    assert times is None or (times[0] > 0 and min(times[1:]) >= 0)


@pytest.mark.thorough
def test_our_own_work_is_that_of_our_tree_and_of_those_that_have_ended() -> None:
    burn = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.1: pass"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        tree = query_tree(os.getpid())
        assert {os.getpid(), child.pid} <= tree.keys()
        assert set(query_tree(child.pid)) == {child.pid}
        assert tree[child.pid] >= 0.1
        child.stdin.close()
    after = query_tree(os.getpid())
    assert child.pid not in after
    assert sum(after.values()) >= sum(tree.values())
    assert query_tree(child.pid) == {}


HIDDEN = """
import os, subprocess
from appliance.probe.load.counters import query_load
theirs = subprocess.Popen(["sleep", "60"])
os.setgid(65534), os.setuid(65534)
ours = subprocess.Popen(["sh", "-c", "echo; sleep 60"], stdout=subprocess.PIPE)
ours.stdout.readline()  # before exec it is hidden even from its own user
sample = query_load()
print(sample.own_pids >= {os.getpid(), ours.pid}, sample.own_s is not None, sample.busy_s is not None)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("hidepid", "seen"), [(1, "False False True"), (2, "True True True")])
def test_where_proc_is_hidden_nobody_can_say_or_our_own_are_seen(hidepid: int, seen: str) -> None:
    """hidepid=1: processes of other users are unreadable. hidepid=2: they are invisible."""
    mounted = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    argv = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", mounted, "sh", sys.executable, "-B", "-c", HIDDEN]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)})
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(f"no /proc can be mounted here: {done.stderr.strip()}")
    assert (done.stdout.strip(), done.stderr) == (seen, "")


def test_this_machine_says_how_busy_it_is() -> None:
    sample = query_load()
    assert sample.cpus == len(os.sched_getaffinity(0))
    assert os.getpid() in sample.own_pids
    assert 0 < (sample.own_s or 0) <= (sample.busy_s or 0) + 1


GPU = GpuLoad(
    index=0,
    uuid="GPU-1",
    sm_clock_mhz=1200,
    reasons=4,
    utilization=7,
    processes=(GpuProcess(pid=5, name=None, used_mib=None),),
)
LOADS = GpuLoads(samples=((GPU,), (GpuLoad(index=0),)), own_pids=(5, 7))


def test_a_report_of_the_child() -> None:
    assert parse_gpu_loads("watching\n" + json.dumps(asdict(LOADS)) + "\n") == LOADS


def test_a_driver_in_trouble_is_a_problem_in_words() -> None:
    report = json.dumps(asdict(GpuLoads(problem="NVML: Driver Not Loaded")))
    assert parse_gpu_loads(report).problem == "NVML: Driver Not Loaded"
    dead = parse_answer(Finished(returncode=-11, stdout="", stderr="first\nlast\n")).problem
    assert dead == "the child that watches GPUs ended with -11: last"
    assert (parse_gpu_loads("hello").problem or "").endswith("is not a report: 'hello'")


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


WITH = st.tuples(st.sampled_from(["samples", "own_pids", "problem"]), JSON).map(
    lambda pair: asdict(LOADS) | dict([pair])
)


@given(text=st.text() | (JSON | WITH).map(json.dumps))
def test_whatever_the_child_prints_is_a_report_or_a_problem(text: str) -> None:
    loads = parse_gpu_loads(text)
    assert isinstance(loads.problem, str) or all(isinstance(gpu, GpuLoad) for sample in loads.samples for gpu in sample)


def test_devices_that_are_not_ours_are_left_out() -> None:
    both = gpus_of("2x4090")
    sample = tuple(GpuLoad(index=gpu.index, uuid=gpu.uuid) for gpu in both)
    assert only_known(GpuLoads(samples=(sample, sample)), GpuProbe(gpus=both[1:])).samples == (sample[1:], sample[1:])
