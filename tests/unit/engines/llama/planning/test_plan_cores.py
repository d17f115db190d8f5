"""Unequal cores: how many threads, on which of them, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.hardware.rates import EVEN_PARTS, PARTS, CpuRates, cpu_rates
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import arguments
from appliance.plan import Plan
from appliance.probe import CoreGroup, Hardware
from appliance.probe.machine.described import parse_machine
from appliance.settings import resolve_settings
from tests.builders import facts_for, model
from tests.golden.machines import MACHINES

LARGE = (0, 1, 6, 7, 8, 9, 10, 11)
CIX = parse_machine(
    """
cpu:
  logical: 12
  physical: 12
  isa: [asimd, asimdhp, asimddp, bf16, i8mm, sve, sve2]
  groups:
    - {capacity: 1, cores: 4, cpus: [0, 1, 10, 11]}
    - {capacity: 0.885, cores: 4, cpus: [6, 7, 8, 9]}
    - {capacity: 0.272, cores: 4, cpus: [2, 3, 4, 5]}
memory: {total_mib: 32000}
""",
    "cix.yaml",
).hardware
# Eight cores of two threads and eight small ones
HYBRID = parse_machine(
    """
cpu:
  logical: 24
  physical: 16
  isa: [avx, avx2, bmi2, f16c, fma, sse4_2]
  groups:
    - {capacity: 1, cores: 8, cpus: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}
    - {capacity: 0.58, cores: 8, cpus: [16, 17, 18, 19, 20, 21, 22, 23]}
memory: {total_mib: 32000}
""",
    "hybrid.yaml",
).hardware


def space(hardware: Hardware, of: str = "llama-3.1-8b", **flags: str) -> Space:
    image, engine = facts_for(hardware)
    return Space(resolve_settings(flags, {}), image, engine, hardware, model(of, "Q4_K_M"))


def words(plan: Plan, name: str) -> str:
    return next(choice.reason for choice in plan.choices if choice.name == name)


def mask(plan: Plan, hardware: Hardware) -> str | None:
    """The same for both kinds of threads, or none."""
    _, engine = facts_for(hardware)
    argv = arguments(plan, engine, Path("/tmp/s"))
    flags = [flag for flag in ("--cpu-mask", "--cpu-mask-batch") if flag in argv]
    assert len(flags) in (0, 2)
    assert len({argv[argv.index(flag) + 1] for flag in flags}) <= 1
    return argv[argv.index("--cpu-mask") + 1] if flags else None


def rates(capacities: Sequence[float], parts: int = PARTS) -> CpuRates:
    return cpu_rates(("avx2",), len(capacities), 1000.0, tuple(capacities), parts=parts)


def without_kinds(hardware: Hardware) -> Hardware:
    return replace(hardware, cpu=replace(hardware.cpu, groups=()))


@pytest.mark.parametrize("parts", [EVEN_PARTS, PARTS])
def test_equal_cores_add_up_whatever_their_speed(parts: int) -> None:
    assert [rates([1.0] * 8, parts).worth(threads) for threads in (1, 5, 8, 16)] == [1, 5, 8, 8]
    assert rates([0.5] * 8, parts).worth(8) == 4.0
    assert rates([1.0] * 8, parts).threads == 8


def test_parts_that_are_taken_one_by_one_wait_for_the_slow_core_that_took_the_last() -> None:
    """The second of two cores has a quarter of the speed. It takes two of eight parts, in the time of eight."""
    assert rates([1.0, 0.25]).worth(2) == pytest.approx(8 / 8)
    assert rates([1.0, 0.5]).worth(2) == pytest.approx(8 / 6)  # six parts beside two
    assert rates([1.0, 0.25], EVEN_PARTS).worth(2) == pytest.approx(2 * 0.25)


@given(
    capacities=st.lists(st.floats(min_value=0.01, max_value=1.0), min_size=1, max_size=24),
    parts=st.sampled_from([EVEN_PARTS, PARTS]),
)
def test_threads_compute_no_less_than_so_many_of_the_slowest_and_no_more_than_all_together(
    capacities: list[float], parts: int
) -> None:
    used = sorted(capacities, reverse=True)
    found = rates(used, parts)
    for threads, slowest in enumerate(used, start=1):
        assert threads * slowest <= found.worth(threads) * (1 + 1e-9)
        assert found.worth(threads) <= sum(used[:threads]) * (1 + 1e-9)
    assert found.worth(found.threads) == max(found.worth(threads) for threads in range(1, len(used) + 1))


def test_small_cores_that_the_others_would_wait_for_are_left_out() -> None:
    best = space(CIX).best
    assert (launch_of(best).threads, launch_of(best).threads_batch, launch_of(best).cpus) == (8, 8, LARGE)
    assert mask(best, CIX) == "fc3"
    assert words(best, "threads").startswith(
        "8 of 12 cores: the next has 27% of the fastest's speed, and the others would wait for it: prefill "
    )
    assert ", with all " in words(best, "threads")


def test_the_price_of_the_small_cores_is_what_a_plan_with_them_is_predicted() -> None:
    best, all_cores = space(CIX).best, space(CIX, threads="12").best
    assert best.speed
    assert all_cores.speed
    assert f"{best.speed.prefill_tokens_per_s:,.1f} tok/s" in words(best, "threads")
    assert f"with all {all_cores.speed.prefill_tokens_per_s:,.1f}" in words(best, "threads")
    assert all_cores.speed.prefill_tokens_per_s < best.speed.prefill_tokens_per_s
    assert mask(all_cores, CIX) is None


def test_cores_that_bring_more_than_they_cost_are_used() -> None:
    best = space(HYBRID).best
    assert (launch_of(best).threads, mask(best, HYBRID)) == (16, None)
    told = "all 16 cores, of which 8 with 58% of the fastest's speed take fewer parts of each matrix"
    assert words(best, "threads").startswith(told)
    assert "with the 8 fastest" in words(best, "threads")


@pytest.mark.parametrize(("hardware", "counts"), [(CIX, {4, 8, 12}), (HYBRID, {8, 16, 24})])
def test_all_cores_and_the_large_alone_are_both_measured(hardware: Hardware, counts: set[int]) -> None:
    found = {launch_of(plan).threads: launch_of(plan).cpus for plan in space(hardware).all()}
    assert counts <= found.keys()
    large = hardware.cpu.groups[0]
    assert found[large.cores] == large.cpus
    assert found[hardware.cpu.cores] == ()


def test_experts_that_are_cut_evenly_need_equal_cores_more() -> None:
    """For Q4_K experts in the layout of i8mm, forward_mul_mat_id gives each thread the same number of rows."""
    hardware = replace(CIX, memory=replace(CIX.memory, total_mib=64000, available_mib=60000))
    dense, experts = space(hardware), space(hardware, "qwen3-30b-a3b")
    costs = [each.costs(plan) for each in (dense, experts) for plan in (each.best, with_all(each))]
    dense_ratio, experts_ratio = (costs[at + 1].cpu_prefill_ms / costs[at].cpu_prefill_ms for at in (0, 2))
    assert 1 < dense_ratio < 1.2
    assert experts_ratio > 1.8


def with_all(found: Space) -> Plan:
    return next(plan for plan in found.all() if launch_of(plan).threads == 12)


def test_threads_that_are_asked_for_run_on_the_fastest_cores() -> None:
    four = space(CIX, threads="4").best
    assert (launch_of(four).threads, launch_of(four).cpus) == (4, (0, 1, 10, 11))
    assert words(four, "threads") == "asked for"
    assert launch_of(space(CIX, threads="6").best).cpus == LARGE


def test_where_nobody_knows_which_cpus_the_large_cores_have_threads_are_not_bound() -> None:
    groups = tuple(replace(group, cpus=()) for group in CIX.cpu.groups)
    best = space(replace(CIX, cpu=replace(CIX.cpu, groups=groups))).best
    assert (launch_of(best).threads, mask(best, CIX)) == (8, None)
    far = (CoreGroup(capacity=1.0, cores=8, cpus=tuple(range(600, 608))), CoreGroup(capacity=0.2, cores=4, cpus=(0,)))
    best = space(replace(CIX, cpu=replace(CIX.cpu, groups=far))).best
    assert (launch_of(best).threads, mask(best, CIX)) == (8, None)  # a mask of the engine's ends at 512


def test_a_quota_takes_the_fastest_cores() -> None:
    best = space(replace(CIX, cpu=replace(CIX.cpu, quota=5.0))).best
    assert (launch_of(best).threads, launch_of(best).cpus) == (5, LARGE)
    best = space(replace(CIX, cpu=replace(CIX.cpu, quota=1.5))).best
    assert launch_of(best).threads_batch == 1, "the threads are bound to the cores that were chosen"


def test_an_older_plan_is_kept_on_the_cpus_of_today() -> None:
    here = space(CIX)
    moved = with_cpus(here.best, (20, 21))
    now = here.now(moved)
    assert isinstance(now, Plan)
    assert launch_of(now).cpus == LARGE


def with_cpus(plan: Plan, cpus: tuple[int, ...]) -> Plan:
    return replace(plan, launch=replace(launch_of(plan), cpus=cpus))


def test_that_cores_may_differ_is_said_only_where_it_is_unknown() -> None:
    said = "cores are taken as equal"
    assert said not in words(space(CIX).best, "speed")
    unknown = space(without_kinds(CIX)).best
    assert said in words(unknown, "speed")
    assert (launch_of(unknown).threads, launch_of(unknown).cpus) == (12, ())
    equal = (CoreGroup(capacity=1.0, cores=12, cpus=tuple(range(12))),)
    known = space(replace(CIX, cpu=replace(CIX.cpu, groups=equal))).best
    assert said not in words(known, "speed")
    assert known.speed == unknown.speed
    assert words(known, "threads") == words(unknown, "threads")


def test_what_sysfs_says_of_cores_and_cannot_be_is_told() -> None:
    cpu = replace(CIX.cpu, groups=(), groups_problem="cpu_capacity of CPU 1 is '0\x1b[31m'")
    told = words(space(replace(CIX, cpu=cpu)).best, "threads")
    assert "; they count as equal, since cpu_capacity of CPU 1 is '0" in told
    assert told.isprintable()


def test_experts_beside_a_gpu_are_priced_by_decode() -> None:
    gpus = MACHINES["laptop-5060"].gpus
    hardware = replace(HYBRID, gpus=gpus, gpu_requested=True)
    best = space(hardware, "qwen3-30b-a3b").best
    assert best.placement.cpu_expert_layers
    assert ": decode " in words(best, "threads")
    whole = space(replace(hardware, gpus=MACHINES["h100"].gpus)).best
    assert whole.placement.is_whole
    assert launch_of(whole).cpus == ()
    assert "physical cores" in words(whole, "threads")
