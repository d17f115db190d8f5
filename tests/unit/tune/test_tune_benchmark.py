"""What the benchmark judges by: the simulated machines, and the table that is recorded."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.llama.planning.placement.batch import UBATCHES_GPU
from appliance.tune.figures.workload import CHAT
from appliance.tune.trials.run_trial import now
from benchmarks.tuner import courses
from benchmarks.tuner_machines import CASES, EFFECTS, Case, Machine
from benchmarks.tuner_table import LEAST_NOISE, Recorded, load, noise_floor
from benchmarks.tuner_time import SimulatedTime

LAPTOP = CASES[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.thorough
def test_each_machine_has_the_plans_of_the_product_and_the_best_is_not_what_is_predicted(case: Case) -> None:
    plans = case.space.all()
    found = case.planned().found
    assert [c.key for c in found] == [plan.key for plan in plans]
    assert [c.work for c in found] == [case.space.costs(plan) for plan in plans]
    machines = [Machine(case, seed) for seed in range(6)]
    times = [[machine.cost_s(c, CHAT) for c in found] for machine in machines]
    assert all(math.isfinite(min(row)) for row in times)
    best = {found[row.index(min(row))].key for row in times}
    assert len(best) > 1  # what is hidden decides


@pytest.mark.thorough
def test_what_can_be_tried_is_what_the_product_tries() -> None:
    """The benchmark tries no split mode that the product dropped, and every load mode that the product has."""
    values: dict[str, set[object]] = {}
    for case in CASES:
        for candidate in case.planned().found:
            for name, value in candidate.knobs:
                values.setdefault(name, set()).add(value)
    assert values["split"] == {"none", "layer", "tensor"}
    assert values["load_mode"] == {"none", "mmap"}
    assert values["kv_type"] == {"f16", "q8_0"}
    assert {256, *UBATCHES_GPU} == values["ubatch"]


@pytest.mark.thorough
def test_some_start_of_some_machine_fails_of_memory() -> None:
    machines = [Machine(case, seed) for case in CASES for seed in range(20)]
    assert any(machine.fails(c) for machine in machines for c in machine.case.planned().found)


def test_every_effect_of_a_simulated_machine_says_where_it_comes_from() -> None:
    assert all(len(words.split()) > 3 for _, words in EFFECTS.values())


@pytest.mark.thorough
def test_a_seed_is_the_same_machine_again_and_noise_is_between_3_and_10_percent() -> None:
    found = LAPTOP.planned().found[0]
    one, again, other = Machine(LAPTOP, 7), Machine(LAPTOP, 7), Machine(LAPTOP, 8)
    assert one.decode_ms(found, 512) == again.decode_ms(found, 512) != other.decode_ms(found, 512)
    assert all(0.03 <= Machine(LAPTOP, seed).noise <= 0.10 for seed in range(20))


@pytest.mark.thorough
def test_a_predictor_that_is_off_changes_predictions_and_not_the_machine() -> None:
    right, wrong = LAPTOP.planned().found[0], LAPTOP.planned(random.Random(1)).found[0]
    assert right.key == wrong.key
    assert right.work != wrong.work
    assert Machine(LAPTOP, 1).decode_ms(right, 512) == Machine(LAPTOP, 1).decode_ms(wrong, 512)


@pytest.mark.thorough
def test_experts_that_a_short_prompt_does_not_use_are_not_copied() -> None:
    found, machine = LAPTOP.planned().found[0], Machine(LAPTOP, 1)
    assert machine.prefill_ms(found, 0, 4) < machine.prefill_ms(found, 0, 400) / 2


def cell(threads: int, ms: float, *, repeat: int = 0, error: str | None = None) -> dict[str, Any]:
    points = [
        {"depth": depth, "decode_ms": ms * (1 + depth / 1000), "prefill_ms": 1.0, "prefill_tokens": read}
        for depth, read in ((32, 32), (512, 480), (2048, 1536))
    ]
    knobs = {"kv_type": "f16", "load_mode": "mmap", "threads": threads, "ubatch": 512}
    return {"kind": "cell", "model": "m", **knobs, "repeat": repeat, "points": [] if error else points, "error": error,
            "load_s": 1.5}  # fmt: skip


FACTS = {"kind": "model", "name": "m", "bytes": 10**8, "read_mb": 100.0, "kv_values": 1000, "cores": 2}
CELLS = [cell(1, 20.0), cell(2, 10.0), cell(3, 1.0, error="engine ran out of memory"), cell(1, 21.0, repeat=1)]


def test_a_recorded_table_is_a_machine(tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in ({"kind": "machine"}, FACTS, *CELLS)), encoding="utf-8")
    (model,) = load(table)
    by_threads = {c.by_knob["threads"]: c for c in model.planned.found}
    assert model.cost_s(by_threads[2], CHAT) < model.cost_s(by_threads[1], CHAT)
    assert math.isinf(model.cost_s(by_threads[3], CHAT))
    assert model.fails(by_threads[3])
    assert not model.fails(by_threads[1])
    assert model.load_s(by_threads[2]) == 1.5
    for depth in (32, 512, 640, 2048):  # between those that were recorded as a curve has it
        assert model.decode_ms(by_threads[2], depth) == pytest.approx(10 * (1 + depth / 1000))
    assert model.prefill_ms(by_threads[2], 32, 640) == pytest.approx(608)


def test_sleeping_takes_no_time_and_moves_the_clock() -> None:
    async def hours() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.sleep(7200)
        assert await asyncio.to_thread(str, 1) == "1"
        await asyncio.sleep(100)
        return now()

    began = time.monotonic()
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        assert runner.run(hours()) == pytest.approx(3700)
    assert time.monotonic() - began < 60


def test_the_benchmark_drives_the_tuner_of_the_product_on_a_table() -> None:
    """One of three plans fails. Each measurement includes its load, and the best plan is picked."""
    model = Recorded(FACTS, CELLS)
    (ours,) = courses(model, model.planned, CHAT, 0, "m", ["ours"])
    assert ours.regret["end"] == 0.0
    assert ours.seconds["end"] > 2 * model.load_s(model.planned.found[0])
    (other,) = courses(model, model.planned, CHAT, 0, "m", ["random"])
    assert other.regret["end"] == 0.0
    assert other.seconds["end"] > 2.5 * 1.5, "what fails does so in the middle of its load"


def test_the_noise_floor_is_of_repeats_alone() -> None:
    assert noise_floor(CELLS) == pytest.approx(math.log(21 / 20) / math.sqrt(2))
    assert noise_floor(CELLS[:3]) == LEAST_NOISE


def test_a_cell_measured_again_does_not_replace_the_first() -> None:
    model = Recorded(FACTS, CELLS)
    assert len(model.planned.found) == 3
    first = next(c for c in model.planned.found if c.by_knob["threads"] == 1)
    assert model.decode_ms(first, 32) == pytest.approx(20 * 1.032)
