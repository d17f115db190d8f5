"""What the benchmark judges by: the simulated machines, and the table that is recorded."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from appliance.tune.workload import CHAT
from benchmarks.tuner_machines import SPECS, Machine, Spec, candidates
from benchmarks.tuner_table import LEAST_NOISE, Recorded, load, noise_floor


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
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
    assert (model.depths, model.load_s()) == ((32, 512, 2048), 1.5)
    points, seconds = model.points(by_threads[2], model.depths, 24, 0.0, random.Random(0))
    assert [point.decode_ms for point in points] == pytest.approx([10 * (1 + d / 1000) for d in model.depths])
    assert seconds == pytest.approx((2048 + 24 * sum(point.decode_ms for point in points)) / 1000)


def test_the_noise_floor_is_of_repeats_alone() -> None:
    assert noise_floor(CELLS) == pytest.approx(math.log(21 / 20) / math.sqrt(2))
    assert noise_floor(CELLS[:3]) == LEAST_NOISE


def test_a_cell_measured_again_does_not_replace_the_first() -> None:
    model = Recorded(FACTS, CELLS)
    assert len(model.candidates) == 3
    first = next(c for c in model.candidates if c.by_knob["threads"] == 1)
    assert model.points(first, (32,), 1, 0.0, random.Random(0))[0][0].decode_ms == pytest.approx(20 * 1.032)
