"""What a plan predicts against what the real engine allocates, read from its log.

Needs the engine: a folder with llama-server in APPLIANCE_ENGINE_DIR, or llama-server on the path. `python -m
benchmarks.memory` prints the same for many more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.engines.llama.planning.hardware.cpu_variant import runnable_variants
from appliance.engines.llama.process.facts import query_facts
from appliance.probe import probe
from benchmarks.memory import AIM, CASES, Case, Row, allocated_by, planned_for, shape_of
from tests.process.stages.engine import find_engine
from tests.shapes import write_gguf

SHAPES = ("gqa", "moe", "sliding", "mla", "delta-net", "mamba2")


@pytest.fixture(scope="module")
def engine() -> Path:
    return find_engine("llama-server")


@pytest.mark.parametrize(
    "variant", ["x64", "haswell", "alderlake", "skylakex", "cascadelake", "zen4", "sapphirerapids"]
)
@pytest.mark.parametrize("case", [next(c for c in CASES if c.shape == name) for name in SHAPES], ids=lambda c: c.name)
def test_the_prediction_is_within_the_aim(engine: Path, tmp_path: Path, case: Case, variant: str) -> None:
    facts = query_facts(engine)
    if variant not in [each.name for each in runnable_variants(facts, probe(tmp_path, {}).cpu)]:
        pytest.skip(f"this CPU does not run {variant}, or the engine has no such variant")
    path = write_gguf(tmp_path / "model.gguf", shape_of(case), quantization=case.quantization)
    planned = planned_for(facts, path, {**case.flags, "cpu_variant": variant})
    row = Row(name=case.name, plan=planned, allocated=allocated_by(engine, planned, facts, tmp_path))
    assert row.allocated.kv + row.allocated.recurrent > 0
    assert planned.memory.kv == pytest.approx(row.allocated.kv, abs=0.02)
    assert planned.memory.state == pytest.approx(row.allocated.recurrent, abs=0.02)
    assert abs(row.error) <= AIM
    doubled = Row(name="planted", plan=planned, allocated=row.allocated.__class__(model=2 * row.allocated.total))
    assert abs(doubled.error) > AIM
