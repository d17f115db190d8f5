"""What can be told without a GPU of the parts that want one: the sweep's grid, regret, ballast, and the scripts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.placement.tensor_mode import ROUNDED_DEPTH
from appliance.settings import SETTINGS, load_settings
from benchmarks.speed_model import Result, load_data, predict
from tests.gpu import cache
from tests.gpu.ballast import held
from tests.gpu.grid import CASES, PICK, Row, cells, judge, name_of, table

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "tests/gpu").glob("*.sh"))
CUDART = ROOT / "tests/fakes/cudart/cudart.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_is_of_settings_that_exist_and_each_cell_is_there_once(name: str, tmp_path: Path) -> None:
    grid = CASES[name].grid
    assert set(grid) <= set(SETTINGS)
    every = cells(grid, 10**6)
    assert len({name_of(cell) for cell in every}) == len(every) == len(list(every))
    for cell in every:
        resolved = load_settings({"data_dir": str(tmp_path), **cell}, {})
        for knob, value in cell.items():
            found = getattr(resolved, knob)
            assert (" ".join(found) if isinstance(found, tuple) else str(found)) == value


@given(st.sampled_from(sorted(CASES)), st.integers(0, 40), st.integers(0, 40))
def test_a_shorter_sweep_is_the_beginning_of_a_longer_one(name: str, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert cells(CASES[name].grid, long)[:short] == cells(CASES[name].grid, short)


def test_a_sweep_that_was_cut_short_has_both_types_of_cache_and_more_than_one_placement() -> None:
    first = cells(CASES["moe"].grid, 8)
    assert {cell["kv_type"] for cell in first} == {"f16", "q8_0"}
    assert len({cell["n_cpu_moe"] for cell in first}) > 1


def row(cell: str, job_s: float | None, **more: str) -> Row:
    return Row(where="here", cell=cell, job_s=job_s, **more)  # type: ignore[arg-type]


def test_regret_is_against_the_fastest_cell_and_the_mean_of_looks_at_the_choice() -> None:
    seen = [row(PICK, 1.0), row("a", 2.0), row("b", 1.0), row("c", None, error="exit code 41"), row(PICK, 1.2)]
    kv_check = judge(seen)
    assert kv_check is not None
    assert (kv_check.best, kv_check.measured, kv_check.failed) == ("b", 2, 1)
    assert kv_check.regret == pytest.approx(0.1)
    assert kv_check.spread == pytest.approx(0.2)


def test_a_choice_that_beats_every_cell_has_a_regret_below_zero_and_no_spread_of_one_look() -> None:
    kv_check = judge([row(PICK, 0.9), row("a", 1.0)])
    assert kv_check is not None
    assert kv_check.regret == pytest.approx(-0.1)
    assert kv_check.spread is None


@pytest.mark.parametrize("seen", [[], [row(PICK, 1.0)], [row("a", 1.0)], [row(PICK, None), row("a", 1.0)]])
def test_without_a_choice_and_a_cell_there_is_no_verdict(seen: list[Row]) -> None:
    assert judge(seen) is None


def test_the_table_has_the_fastest_first_and_says_why_others_are_not_there() -> None:
    lines = table([row("slow", 2.0), row("none", None, error="refused: 31"), row("fast", 1.0)]).splitlines()
    assert [line.split()[1 if line.split()[0] == "-" else -1] for line in lines[1:]] == ["fast", "slow", "none"]
    assert lines[-1].endswith("refused: 31")


def test_what_a_token_in_a_rounded_cache_costs_is_its_slope_beside_that_of_an_exact_one() -> None:
    """GLM 4.5 Air in split mode tensor with ROCm, of llama.cpp#21788."""
    exact = {depth: 1000 / speed for depth, speed in ((2048, 48.82), (8192, 42.75), (32768, 28.63))}
    rounded = {depth: 1000 / speed for depth, speed in ((2048, 39.70), (8192, 31.67), (32768, 16.99))}
    assert cache.factor(exact, rounded) == pytest.approx(ROUNDED_DEPTH.value, rel=0.02)
    rows = cache.table({"f16": exact, "q8_0": rounded}).splitlines()
    assert rows[2].split() == ["q8_0", "39.7", "(", "0.81)", "31.7", "(", "0.74)", "17.0", "(", "0.59)"]


def test_rows_of_the_cache_are_those_of_the_speed_model() -> None:
    options = argparse.Namespace(shape="dense", machine="h100-80g")
    (line,) = cache.as_yaml(options, "q8_0", {32768: 10.0})
    (row,) = yaml.safe_load(line)
    result = Result(**row, held_out=False)
    assert (result.tokens, result.figure, result.key.split("|")[-1]) == (cache.look(()).tokens, 100.0, "q8_0")
    assert predict(result, load_data()) > 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize(("part", "words"), [("nonsense", "unknown part"), ("image", "image.tar.xz"), ("", "which")])
def test_a_part_that_cannot_be_done_says_why(part: str, words: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PACK": str(tmp_path / "none"), "WORK": str(tmp_path), "PYTHON": sys.executable}
    argv = ["bash", str(ROOT / "tests/gpu/run.sh"), *([part] if part else [])]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler to build a libcudart with")
    folder = tmp_path_factory.mktemp("engine")
    subprocess.run(
        [COMPILER, "-O2", "-shared", "-fPIC", "-o", str(folder / "libcudart.so.13"), str(CUDART)], check=True
    )
    return folder


@pytest.mark.thorough
def test_ballast_takes_what_is_free_but_for_what_it_leaves_and_ends_with_the_block(engine_dir: Path) -> None:
    library = str(engine_dir / "libcudart.so.13")
    argv = [sys.executable, "-m", "tests.gpu.ballast", library, "0"]
    whole = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, cwd=ROOT)
    free_mib = json.loads(whole.stdout)["held_mib"]
    with held(engine_dir, free_mib - 3) as taken:
        assert taken["held_mib"] == 3


@pytest.mark.thorough
def test_ballast_that_cannot_be_had_is_an_error(engine_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="could not be taken: exit 1"), held(engine_dir, 10**7):
        pytest.fail("there is no such memory")


def test_no_ballast_is_no_process(tmp_path: Path) -> None:
    with held(tmp_path, None) as taken:
        assert taken == {}
