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

from appliance.tune.measure import now
from appliance.tune.workload import CHAT
from benchmarks.tuner import courses
from benchmarks.tuner_machines import SPECS, Machine, Spec, candidates
from benchmarks.tuner_ours import Planned
from benchmarks.tuner_table import LEAST_NOISE, Recorded, load, noise_floor
from benchmarks.tuner_time import SimulatedTime


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.thorough
def test_each_machine_has_many_cells_some_that_fail_and_the_best_is_not_what_is_predicted(spec: Spec) -> None:
    found = candidates(spec)
    assert len({c.key for c in found}) == len(found) > 500
    machines = [Machine(spec, seed) for seed in range(6)]
    times = [[machine.job_s(c, CHAT) for c in found] for machine in machines]
    assert any(math.isinf(t) for row in times for t in row)
    best = {found[row.index(min(row))].key for row in times}
    assert len(best) > 1  # what is hidden decides


def test_a_seed_is_the_same_machine_again_and_noise_is_between_3_and_10_percent() -> None:
    found = candidates(SPECS[0])[0]
    one, again, other = Machine(SPECS[0], 7), Machine(SPECS[0], 7), Machine(SPECS[0], 8)
    assert one.decode_ms(found, 512) == again.decode_ms(found, 512) != other.decode_ms(found, 512)
    assert all(0.03 <= Machine(SPECS[0], seed).noise <= 0.10 for seed in range(20))


def test_a_predictor_that_is_off_changes_predictions_and_not_the_machine() -> None:
    right, wrong = candidates(SPECS[0])[0], candidates(SPECS[0], off=random.Random(1))[0]
    assert right.key == wrong.key
    assert right.work != wrong.work
    assert Machine(SPECS[0], 1).decode_ms(right, 512) == Machine(SPECS[0], 1).decode_ms(wrong, 512)


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
    by_threads = {c.by_knob["threads"]: c for c in model.candidates}
    assert model.job_s(by_threads[2], CHAT) < model.job_s(by_threads[1], CHAT)
    assert math.isinf(model.job_s(by_threads[3], CHAT))
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
    """Of three plans one fails; each measurement pays its load, and what is picked is the best."""
    model = Recorded(FACTS, CELLS)
    (ours,) = courses(model, model.candidates, CHAT, 0, "m", ["ours"])
    assert ours.regret["end"] == 0.0
    assert ours.seconds["end"] > 2 * model.load_s(model.candidates[0])
    (other,) = courses(model, model.candidates, CHAT, 0, "m", ["random"])
    assert other.regret["end"] == 0.0
    assert other.seconds["end"] > 2.5 * 1.5, "what fails does so in the middle of its load"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.thorough
def test_plans_of_a_simulated_machine_are_told_apart_as_its_candidates_are(spec: Spec) -> None:
    found = candidates(spec)
    assert len(Planned(found).candidates) == len(found)


def test_the_noise_floor_is_of_repeats_alone() -> None:
    assert noise_floor(CELLS) == pytest.approx(math.log(21 / 20) / math.sqrt(2))
    assert noise_floor(CELLS[:3]) == LEAST_NOISE


def test_a_cell_measured_again_does_not_replace_the_first() -> None:
    model = Recorded(FACTS, CELLS)
    assert len(model.candidates) == 3
    first = next(c for c in model.candidates if c.by_knob["threads"] == 1)
    assert model.decode_ms(first, 32) == pytest.approx(20 * 1.032)
