"""Disturbances by others, and load that is our own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.documents import read
from appliance.probe.load.conditions import Conditions, GpuConditions, conditions
from appliance.probe.load.load import GpuLoad, GpuLoads, GpuProcess, LoadSample
from appliance.probe.machine.hardware import Gpu, GpuHolder, GpuProbe
from tests.fakes.machines import gpus_of

START = LoadSample(time_s=100, cpus=4, busy_s=1000, steal_s=10, own_s=50)
SHARED = GpuProbe(gpus=gpus_of("4090-shared"))  # python3, pid 4242, holds 14,500 MiB of it
FREE = GpuProbe(gpus=gpus_of("2x4090")[:1])


def later(**more: float) -> LoadSample:
    """Return a sample ten seconds after START; 40 seconds of CPU time have passed."""
    rises = {"busy_s": 0.0, "steal_s": 0.0, "own_s": 0.0} | more
    return replace(START, time_s=110, **{name: getattr(START, name) + by for name, by in rises.items()})


def test_our_own_work_is_no_disturbance() -> None:
    seen = conditions(START, later(busy_s=39, own_s=38.5, steal_s=0.2))
    assert (seen.own_cpu, seen.foreign_cpu) == (38.5 / 40, 0.5 / 40)
    assert seen.steal == pytest.approx(0.2 / 39.2)
    assert seen.disturbance is None


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (later(busy_s=24, own_s=20), "other programs took 10% of 4 CPUs (0.4 cores)"),
        (later(busy_s=20, own_s=20, steal_s=1), "the hypervisor took 5% of the CPU time for other machines"),
        (
            later(busy_s=24, own_s=20, steal_s=6),
            "other programs took 10% of 4 CPUs (0.4 cores) and "
            "the hypervisor took 20% of the CPU time for other machines",
        ),
        (later(busy_s=21.9, own_s=20), None),
        (later(busy_s=20, own_s=20, steal_s=0.4), None),
    ],
)
def test_what_others_took_is_named(after: LoadSample, words: str | None) -> None:
    assert conditions(START, after).disturbance == words


@pytest.mark.parametrize(("own_s", "is_disturbed"), [(625.0, True), (320.0, False)])
def test_one_process_disturbs_many_cpus_only_when_none_is_idle(own_s: float, is_disturbed: bool) -> None:
    many = replace(START, cpus=64)
    seen = conditions(many, replace(later(busy_s=own_s + 9, own_s=own_s), cpus=64))
    assert (seen.disturbance is not None) == is_disturbed


def test_a_desktop_on_a_large_machine_is_quiet() -> None:
    many = replace(START, cpus=16)
    assert conditions(many, replace(later(busy_s=16, own_s=10), cpus=16)).disturbance is None


def test_nobody_can_say() -> None:
    seen = conditions(LoadSample(time_s=1), LoadSample(time_s=9))
    assert seen == Conditions(interval_s=8)
    assert seen.disturbance is None


def test_counters_that_go_backwards_or_count_other_cpus_say_nothing() -> None:
    seen = conditions(later(busy_s=9, own_s=9, steal_s=9), replace(START, time_s=120))
    assert (seen.own_cpu, seen.foreign_cpu, seen.steal) == (None, None, None)
    assert conditions(START, replace(later(busy_s=30), cpus=3)).foreign_cpu is None
    assert conditions(START, later(busy_s=4000)).foreign_cpu == 1.0  # clocks that disagree make no more than all


def test_of_too_short_a_time_no_shares_are_told() -> None:
    seen = conditions(START, replace(later(busy_s=0.4), time_s=100.2))
    assert (seen.foreign_cpu, seen.steal, seen.disturbance) == (None, None, None)


def look(known: GpuProbe = FREE, **facts: Any) -> GpuLoad:
    gpu = known.gpus[0]
    return GpuLoad(**{"index": gpu.index, "uuid": gpu.uuid, "sm_clock_max_mhz": 2500, "utilization": 0, **facts})


def on_gpu(*looks: GpuLoad, known: GpuProbe = FREE, own_pids: frozenset[int] = frozenset()) -> Conditions:
    loads = GpuLoads(samples=tuple((each,) for each in looks), own_pids=tuple(own_pids))
    return conditions(START, later(), known=known, gpus=loads)


def runs(pid: int, mib: int | None, utilization: int | None = None, name: str | None = None) -> GpuProcess:
    return GpuProcess(pid=pid, name=name, used_mib=mib, utilization=utilization)


def test_a_working_gpu_is_quiet_and_its_clock_is_that_of_its_work() -> None:
    working = look(utilization=98, sm_clock_mhz=2000, reasons=0x4)
    seen = on_gpu(look(sm_clock_mhz=210, reasons=1), working, working, look(sm_clock_mhz=210, reasons=1))
    assert (seen.gpus[0].clock_share, seen.gpus[0].reasons, seen.gpus[0].slowed) == (0.8, ("power cap",), 0)
    assert seen.disturbance is None


def test_heat_is_named() -> None:
    cool, hot = (
        look(utilization=98, sm_clock_mhz=2500, reasons=0),
        look(utilization=98, sm_clock_mhz=1250, reasons=0x48),
    )
    assert on_gpu(look(), cool, hot, hot, hot, look()).disturbance == (
        "GPU 0 was slowed down (hardware slowdown, thermal slowdown by hardware) for 75% of the time, "
        "at 62% of its clock"
    )
    assert on_gpu(look(), *[cool] * 10, hot, look()).disturbance is None


def test_work_of_others_is_seen_when_ours_rests() -> None:
    busy = on_gpu(look(), look(utilization=99), look(utilization=40))
    assert busy.disturbance == "GPU 0 was 40 % busy with the work of others"


def test_a_process_that_only_holds_memory_is_recorded_and_quiet() -> None:
    foreign = runs(4242, 14500, utilization=0, name="/usr/bin/python3")
    ours = runs(77, 6000, utilization=99)
    looks = [look(SHARED, utilization=99, processes=(foreign, ours))] * 3
    seen = on_gpu(look(SHARED, processes=(foreign,)), *looks, look(SHARED), known=SHARED)
    assert seen.gpus[0].foreign == (GpuHolder(pid=4242, name="/usr/bin/python3", used_mib=14500),)
    assert (seen.gpus[0].foreign_utilization, seen.disturbance) == (0, None)


def test_a_process_that_works_meanwhile_is_named() -> None:
    both = look(SHARED, utilization=99, processes=(runs(4242, 14500, 37, "/usr/bin/python3"), runs(77, 6000, 60)))
    seen = on_gpu(look(SHARED), both, both, look(SHARED), known=SHARED)
    assert seen.disturbance == "GPU 0 was 37 % busy with the work of others: python3 (pid 4242)"


@pytest.mark.parametrize("own_pids", [frozenset({1, 77}), frozenset({1, 12})])
def test_the_engine_is_told_from_who_comes_later(own_pids: frozenset[int]) -> None:
    """The engine is found in our own process tree. If the driver uses the host's process numbers, the engine is the
    process that came first."""
    alone = look(processes=(runs(77, 6000, 90),))
    crowded = look(processes=(runs(77, 6000, 50), runs(99, 500, 40, name="blender")))
    seen = on_gpu(look(), alone, crowded, crowded, look(), own_pids=own_pids)
    assert [holder.pid for holder in seen.gpus[0].foreign] == [99]
    assert seen.disturbance == "GPU 0 was 27 % busy with the work of others: blender (pid 99)"


@pytest.mark.parametrize("utilization", [0, None])
def test_who_is_not_seen_to_work_is_quiet(utilization: int | None) -> None:
    crowded = look(processes=(runs(77, 6000, 99), runs(99, 500, utilization, "firefox")))
    seen = on_gpu(look(), crowded, crowded, look(), own_pids=frozenset({77}))
    assert ([holder.pid for holder in seen.gpus[0].foreign], seen.disturbance) == ([99], None)


def test_who_came_before_our_engine_is_foreign_although_it_came_first() -> None:
    first = look(processes=(runs(99, 500, name="blender"),))
    seen = on_gpu(first, look(processes=(runs(99, 500), runs(77, 6000))), look(), own_pids=frozenset({77}))
    assert [holder.pid for holder in seen.gpus[0].foreign] == [99]


def test_a_driver_that_does_not_answer_is_said_and_is_no_disturbance() -> None:
    seen = conditions(START, later(), known=FREE, gpus=GpuLoads(problem="NVML: Unknown Error"))
    assert (seen.gpus, seen.problem, seen.disturbance) == ((), "NVML: Unknown Error", None)


SECONDS = st.none() | st.floats(0, 1e9)
SAMPLES = st.builds(
    LoadSample,
    time_s=st.floats(0, 1e6),
    cpus=st.none() | st.integers(1, 512),
    busy_s=SECONDS,
    steal_s=SECONDS,
    own_s=SECONDS,
    own_pids=st.frozensets(st.integers(0, 5), max_size=3),
)
COUNTS = st.none() | st.integers(0, 3000)
PROCESSES = st.builds(
    GpuProcess, pid=st.integers(0, 5), name=st.none() | st.text(max_size=3), used_mib=COUNTS, utilization=COUNTS
)
LOOKS = st.builds(
    GpuLoad,
    index=st.integers(0, 1),
    sm_clock_mhz=COUNTS,
    sm_clock_max_mhz=COUNTS,
    reasons=COUNTS,
    utilization=st.none() | st.integers(0, 100),
    processes=st.lists(PROCESSES, max_size=3).map(tuple),
)
LOADS = st.builds(
    GpuLoads,
    samples=st.lists(st.lists(LOOKS, max_size=2).map(tuple), max_size=5).map(tuple),
    own_pids=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
NAMELESS = GpuProbe(
    gpus=(Gpu(index=0, name=None, uuid=None, sm=None, vram_total_mib=None, vram_free_mib=None, pci_bus_id=None),)
)


@given(before=SAMPLES, after=SAMPLES, loads=LOADS, known=st.sampled_from([None, FREE, SHARED, NAMELESS]))
def test_any_counters_make_shares_that_a_profile_can_keep(
    before: LoadSample, after: LoadSample, loads: GpuLoads, known: GpuProbe | None
) -> None:
    seen = conditions(before, after, known=known, gpus=loads)
    shares = (seen.own_cpu, seen.foreign_cpu, seen.steal)
    assert all(share is None or 0 <= share <= 1 for share in shares)
    assert seen.disturbance is None or seen.disturbance.strip()
    assert read(Conditions, json.loads(json.dumps(asdict(seen)))) == seen


@pytest.mark.parametrize(
    "damage",
    [
        {"interval_s": "8"},
        {"cpus": True},
        {"gpus": {}},
        {"gpus": [{"index": 0}]},
        {"steal": [0.1]},
        {"more": 1},
    ],
)
def test_a_damaged_record_is_refused(damage: dict[str, object]) -> None:
    seen = Conditions(interval_s=8, gpus=(GpuConditions(index=0, reasons=("power cap",)),))
    document = asdict(seen)
    assert read(Conditions, document) == seen
    with pytest.raises(ValueError, match=r"Conditions"):
        read(Conditions, document | damage)


def test_a_reason_that_is_no_word_is_refused() -> None:
    document = asdict(Conditions(interval_s=8, gpus=(GpuConditions(index=0),)))
    document["gpus"][0]["reasons"] = [4]
    with pytest.raises(ValueError, match=r"Conditions: Expected `str`, got `int` - at `\$.gpus\[0\].reasons\[0\]`"):
        read(Conditions, document)
