"""Traces, rivals and the optimum of `benchmarks/fleet.py`, and the random steps of `benchmarks/fleet_steps.py`."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from benchmarks import fleet, fleet_rivals, fleet_steps
from benchmarks.fleet_rivals import RIVALS, GreedyDualSize, Lfu, Lru, least_s, reload_s, router_s
from benchmarks.fleet_traces import KINDS, LARGEST_GB, MIB_OF_GB, SMALLEST_GB, Model, Request, Trace, make_trace


def trace_of(sizes: dict[str, tuple[float, float]], free_mib: float, order: str) -> Trace:
    """Return a trace of models by name, with MiB and reload seconds, asked one a second in this order."""
    return Trace(
        seed=0,
        kind="skewed",
        is_equal=False,
        models={name: Model(name=name, mib=mib, reload_s=load_s) for name, (mib, load_s) in sizes.items()},
        free_mib=free_mib,
        requests=tuple(Request(at_s=float(at), name=name) for at, name in enumerate(order)),
    )


EQUAL = dict.fromkeys("abcd", (10.0, 1.0))


@cache
def short(seed: int) -> Trace:
    trace = make_trace(seed)
    return replace(trace, requests=trace.requests[:600])


def slowest_least_s(trace: Trace) -> float:
    """Return the optimum by trying every eviction at every step, for a trace of a dozen requests."""
    states: dict[frozenset[str], float] = {frozenset(): 0.0}
    seen = set[str]()
    for request in trace.requests:
        following: dict[frozenset[str], float] = {}
        for loaded, spent in states.items():
            load_s = trace.models[request.name].reload_s if request.name in seen and request.name not in loaded else 0.0
            for count in range(len(loaded) + 1):
                for kept in itertools.combinations(sorted(loaded), count):
                    after = frozenset(kept) | {request.name}
                    if sum(trace.models[name].mib for name in after) > trace.free_mib:
                        continue
                    # A model that was loaded and dropped in this step is none that was kept.
                    cost_s = spent + load_s
                    following[after] = min(following.get(after, cost_s), cost_s)
        states = following
        seen.add(request.name)
    return min(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_that_of_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: (float(rng.randint(2, 12)), float(rng.randint(1, 9))) for name in "abcde"}
    trace = trace_of(sizes, 16.0, "".join(rng.choices("abcde", k=14)))
    assert least_s(trace) == slowest_least_s(trace)


@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_no_rule_is_below_the_optimum(seed: int) -> None:
    trace = short(seed)
    least = least_s(trace) - 1e-6
    assert fleet.ours_s(trace) >= least
    assert min(spent_s(trace) for spent_s in RIVALS.values()) >= least


def test_rivals_do_what_their_names_say() -> None:
    loop = trace_of(EQUAL, 20.0, "abcabcabc")
    assert reload_s(loop, Lru) == 6  # the next one is always the one that has just gone
    assert least_s(loop) == 3
    often = trace_of(EQUAL, 20.0, "aaabcbca")
    assert reload_s(often, Lfu) == 2  # a stays
    assert reload_s(often, Lru) == 1
    sizes = {"a": (10.0, 1.0), "b": (5.0, 5.0), "c": (10.0, 1.0)}
    dual = trace_of(sizes, 20.0, "bacb")
    assert reload_s(dual, Lru) == 5  # b was used longest ago
    assert reload_s(dual, GreedyDualSize) == 0  # but is dear for its size


def test_the_router_counts_models_and_may_never_exceed_the_memory() -> None:
    sizes = {"a": (10.0, 1.0), "b": (4.0, 1.0), "c": (4.0, 1.0)}
    assert router_s(trace_of(sizes, 14.0, "bcbcabab")) == 1  # two at once: b has to come back after a
    assert router_s(trace_of(sizes, 13.0, "bcbcabab")) == 5  # a and b together are too much: one at once


def test_keep_alive_unloads_what_is_idle() -> None:
    trace = replace(trace_of(EQUAL, 40.0, "aa"), requests=(Request(at_s=0, name="a"), Request(at_s=400, name="a")))
    assert reload_s(trace, Lru) == 0
    assert reload_s(trace, Lru, keep_alive_s=fleet_rivals.KEEP_ALIVE_S) == 1


def test_traces_come_from_their_seed_and_are_of_every_kind() -> None:
    assert make_trace(3) == make_trace(3)
    for parity in (0, 1):
        made = [make_trace(seed) for seed in range(parity, 40, 2)]
        assert {trace.kind for trace in made} == set(KINDS)
        assert {trace.is_equal for trace in made} == {True, False}
    for trace in made:
        mib = [model.mib for model in trace.models.values()]
        assert SMALLEST_GB <= min(mib) / MIB_OF_GB <= max(mib) / MIB_OF_GB <= LARGEST_GB
        assert max(mib) <= trace.free_mib < sum(mib)
        assert list(trace.requests) == sorted(trace.requests, key=lambda request: request.at_s)


def test_the_summary_counts_what_a_mean_cannot_hold() -> None:
    row = fleet.row_of(2)
    spared = replace(row, ours_s=1.0, rivals_s=dict.fromkeys(RIVALS, 0.0))
    found = fleet.summary([row, spared])
    assert found["traces in means"] == 1
    assert found["of the best rival, worst"] == float("inf")
    assert found["of the best rival, mean"] == pytest.approx(row.of_best)


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_neither_run_out_of_memory_nor_drop_an_answer(seed: int) -> None:
    """1,500 steps; `python3 -m benchmarks.fleet --steps 10000` is the long one."""
    counts = fleet_steps.walk(1500, seed, fleet_steps.read_loads(fleet_steps.LOADS))
    assert counts.out_of_memory == counts.dropped == counts.unserved == 0
    # Steps in which nothing happened would prove nothing.
    assert min(counts.loads, counts.evictions, counts.waits, counts.smaller, counts.refused) > 10
    assert counts.answers > 300


def test_the_devices_do_run_out_if_others_take_more_than_the_reserve() -> None:
    """The count of 0 above is one of a device that can run out."""
    loads = fleet_steps.read_loads(fleet_steps.LOADS)
    assert fleet_steps.walk(1500, 0, loads, foreign_mib=4000).out_of_memory > 0
    unaware = replace(
        loads,
        variants={name: tuple(replace(each, error=0.0) for each in made) for name, made in loads.variants.items()},
    )
    assert fleet_steps.walk(1500, 0, unaware).out_of_memory > 0
