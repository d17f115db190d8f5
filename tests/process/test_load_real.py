"""What else this machine does, with real processes; and described GPUs through the real child that watches them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.probe import Hardware, probe
from appliance.probe.gpu.nvidia import query_gpus
from appliance.probe.load.conditions import FOREIGN_CPU, Conditions, conditions
from appliance.probe.load.counters import query_load
from appliance.probe.load.load import LoadSample
from appliance.probe.load.processes import query_tree
from appliance.probe.load.watch import Watch
from appliance.run import run
from tests.process.stages.nvml import PutMachine
from tests.process.stages.supervisor import eventually

BURN = "while True: pass"
SECONDS = 1.5


@pytest.fixture
def hardware() -> Hardware:
    return probe(Path("/nowhere"), {})  # a volume with none of the libraries that are built here: it would be refused


@pytest.fixture
def others() -> Iterator[int]:
    """A process that burns a CPU and is nobody's child: the shell that started it has ended."""
    shell = ("sh", "-c", '"$1" -c "$2" >/dev/null 2>&1 & echo $!', "sh", sys.executable, BURN)
    # `setsid` takes it out of the process group that `run` leaves no member of.
    finished = run(("sh", "-c", 'setsid "$@"', "sh", *shell), timeout_s=90)
    pid = int(finished.stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


async def burn_as_ours(seconds: float) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", BURN)
    await asyncio.sleep(seconds)
    child.kill()
    await child.wait()


def used_s(pid: int) -> float:
    return query_tree(pid)[pid]


def test_somebody_else_s_work_is_named(hardware: Hardware, others: int) -> None:
    before_s = used_s(others)
    with Watch(hardware, os.environ) as watch:
        time.sleep(SECONDS)
    took_s = used_s(others) - before_s
    seen = watch.conditions
    assert seen.cpus is not None
    assert seen.foreign_cpu is not None
    # The kernel counts CPUs at its ticks: some hundredths of a second either way.
    assert seen.foreign_cpu * seen.cpus * seen.interval_s > took_s * 0.8 - 0.1
    if took_s / seen.interval_s / seen.cpus > 2 * FOREIGN_CPU:
        assert (seen.disturbance or "").startswith("other programs took ")


async def test_our_own_work_is_counted_as_ours(hardware: Hardware) -> None:
    children_s = sum(os.times()[2:4])
    async with Watch(hardware, os.environ) as watch:
        await burn_as_ours(SECONDS)
    children_s = sum(os.times()[2:4]) - children_s
    seen = watch.conditions
    assert seen.own_cpu is not None
    assert seen.cpus is not None
    assert seen.own_cpu * seen.cpus * seen.interval_s == pytest.approx(children_s, abs=0.2, rel=0.1)


def everything_is_ours() -> LoadSample:
    """Return a sample in which all processes and the kernel's threads are our own work."""
    kthreadd = Path("/proc/2/comm")
    if not kthreadd.is_file() or kthreadd.read_text() != "kthreadd\n":
        pytest.skip("a container sees only its own processes: those of others would be foreign")
    programs, kernel = (query_load(own_pid=pid) for pid in (1, 2))
    assert programs.own_s is not None
    assert kernel.own_s is not None
    return replace(programs, own_s=programs.own_s + kernel.own_s)


def foreign_of(seen: Conditions) -> float:
    """Return others' share; all of it if it is unknown, since our own counter fell with a process that ended."""
    return 1.0 if seen.foreign_cpu is None else seen.foreign_cpu


async def test_our_own_work_is_no_disturbance_however_much_it_is() -> None:
    """The kernel forgets the time of a process whose parent does not wait for it: when such a one ends, all that it
    ever took seems foreign, or nothing is known. So the quietest of a few looks is what counts, and none on a machine
    where such end all the time."""
    looks: list[Conditions] = []
    while len(looks) < 6 and all(foreign_of(seen) >= FOREIGN_CPU for seen in looks):
        before = everything_is_ours()
        await burn_as_ours(2 * SECONDS)
        looks.append(conditions(before, everything_is_ours()))
    quietest = min(looks, key=foreign_of)
    if foreign_of(quietest) >= FOREIGN_CPU:
        pytest.skip(f"processes of others end here all the time: {quietest.disturbance}")
    assert "other programs" not in (quietest.disturbance or "")


def test_work_in_another_tree_of_our_own_group_is_somebody_else_s(others: int) -> None:
    """`docker exec` starts such a tree: it competes like any other."""
    sample = query_load()
    assert others not in sample.own_pids
    theirs = query_load(own_pid=others)
    assert theirs.own_pids == {others}


def test_a_sample_is_cheap() -> None:
    took_s = []
    for _ in range(20):
        start = time.process_time()
        query_load()
        took_s.append(time.process_time() - start)
    assert min(took_s) < 0.1  # of CPU time: some 5 ms, and a program that is asked is more than this


def on(hardware: Hardware, environment: Any) -> Hardware:
    return replace(hardware, gpus=query_gpus(Path("/"), environment, timeout_s=60))


def test_a_described_gpu_in_trouble(hardware: Hardware, machine_environment: PutMachine) -> None:
    environment = machine_environment(
        "4090-shared",
        gpu__0__sm_clock_mhz=2520,
        gpu__0__sm_clock_now=1260,
        gpu__0__reasons=0x44,
        gpu__0__utilization="0,90,90,0",  # at rest, twice at work, at rest
        gpu__0__running=1,
        gpu__0__running__0="4242:37",
    )
    with Watch(on(hardware, environment), environment, timeout_s=60) as watch:
        time.sleep(SECONDS)
    (gpu,) = watch.conditions.gpus
    assert (gpu.clock_share, gpu.slowed) == (0.5, 1.0)
    assert gpu.reasons == ("power cap", "thermal slowdown by hardware")
    assert gpu.foreign_utilization == 37
    assert "GPU 0 was 37 % busy with the work of others: python3 (pid 4242)" in (watch.conditions.disturbance or "")


def test_a_library_on_the_volume_is_not_loaded_for_a_watch(
    hardware: Hardware, machine_environment: PutMachine, tmp_path: Path
) -> None:
    environment = machine_environment("2x4090")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvidia-ml.so.1").write_text("not a library")
    named = {**environment, "LD_LIBRARY_PATH": f"{tmp_path}/lib:{environment['LD_LIBRARY_PATH']}"}
    known = replace(on(hardware, environment), volume=replace(hardware.volume, path=tmp_path))
    known = replace(known, gpus=replace(known.gpus, driver_dir=environment["LD_LIBRARY_PATH"]))
    with Watch(known, named, timeout_s=60) as watch:
        time.sleep(0.1)
    assert (watch.conditions.problem, len(watch.conditions.gpus)) == (None, 2)


def test_utilization_is_waited_for_to_fall(hardware: Hardware, machine_environment: PutMachine) -> None:
    environment = machine_environment("2x4090", gpu__0__utilization="80,60,30,0", gpu__1__utilization="100,44")
    with Watch(on(hardware, environment), environment, timeout_s=60) as watch:
        pass
    assert [gpu.foreign_utilization for gpu in watch.conditions.gpus] == [0, 44]


def test_a_driver_that_tells_nothing_of_this(hardware: Hardware, machine_environment: PutMachine) -> None:
    """This driver tells neither clocks nor utilization."""
    environment = machine_environment("a100-mig")
    with Watch(on(hardware, environment), environment, timeout_s=60) as watch:
        time.sleep(0.6)
    assert [(gpu.index, gpu.clock_share, gpu.foreign_utilization) for gpu in watch.conditions.gpus] == [
        (0, None, 0)
    ] * 2
    assert watch.conditions.problem is None


def test_a_name_of_an_older_driver(hardware: Hardware, machine_environment: PutMachine) -> None:
    old = {"return__nvmlDeviceGetCurrentClocksEventReasons": 13, "gpu__0__reasons": 0x8}
    environment = machine_environment("24+8", **old)
    with Watch(on(hardware, environment), environment, timeout_s=60) as watch:
        time.sleep(0.8)
    assert [gpu.reasons for gpu in watch.conditions.gpus] == [("hardware slowdown",), ()]


@pytest.mark.parametrize(
    ("knobs", "timeout_s", "problem"),
    [
        ({"crash__nvmlDeviceGetUtilizationRates": 1}, 60, "the child that watches GPUs ended with -11"),
        ({"hang__nvmlDeviceGetUtilizationRates": 1}, 3, "NVML did not answer within 3 s: the driver hangs"),
        ({"return__nvmlInitWithFlags": 9}, 60, "NVML: Driver Not Loaded"),
    ],
)
def test_a_driver_in_trouble_costs_its_figures_alone(
    hardware: Hardware, machine_environment: PutMachine, knobs: dict[str, Any], timeout_s: float, problem: str
) -> None:
    known = on(hardware, machine_environment("2x4090"))
    with Watch(known, machine_environment("2x4090", **knobs), timeout_s=timeout_s) as watch:
        time.sleep(0.6)
    assert (watch.conditions.problem or "").startswith(problem)
    assert watch.conditions.own_cpu is not None


def test_a_card_that_does_not_count_is_not_looked_at(hardware: Hardware, machine_environment: PutMachine) -> None:
    known = on(hardware, machine_environment("2x4090"))
    broken = machine_environment("2x4090", return__nvmlInitWithFlags=9)
    with Watch(known, broken, gpus=(), timeout_s=60) as watch:
        time.sleep(0.1)
    assert watch.conditions.problem is None


async def test_a_lack_of_files_at_the_first_look_hides_nobody_for_good(hardware: Hardware) -> None:
    crowded = [LoadSample(time_s=at, cpus=2, busy_s=2.0 * at, steal_s=0.0, own_s=0.0) for at in range(3)]
    looks: Iterator[LoadSample | OSError] = iter((OSError(errno.EMFILE, os.strerror(errno.EMFILE)), *crowded))

    def sample() -> LoadSample:
        look = next(looks)
        if isinstance(look, OSError):
            raise look
        return look

    words = await Watch(hardware, {}, gpus=(), sample=sample).until_crowded(every_s=0.01)
    assert words.startswith("other programs took 100%")


def watchers() -> set[str]:
    """Command lines of our children that watch GPUs."""
    found = set()
    for pid in query_load().own_pids:
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and b"gpu_load" in command.read_bytes():
            found.add(str(command))
    return found


def test_what_fails_leaves_no_child_and_no_conditions(hardware: Hardware, machine_environment: PutMachine) -> None:
    environment = machine_environment("2x4090")
    watch = Watch(on(hardware, environment), environment, timeout_s=60)

    before = watchers()  # of other tests, which may be about to go

    def measure() -> None:
        with watch:
            assert len(watchers() - before) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    deadline = time.monotonic() + 60
    while watchers() - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="only after the watched block has ended"):
        _ = watch.conditions


@pytest.mark.parametrize("after_s", [0.0, 0.05, 2.0])
async def test_what_is_cancelled_leaves_no_child(
    hardware: Hardware, machine_environment: PutMachine, after_s: float
) -> None:
    environment = machine_environment("2x4090")
    watch = Watch(on(hardware, environment), environment, timeout_s=60)

    async def measure() -> None:
        async with watch:
            await asyncio.sleep(3600)

    measuring = asyncio.create_task(measure())
    await asyncio.sleep(after_s)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    await eventually(lambda: watchers() == set(), timeout_s=60)
