"""What a start found in the compile cache, kept for doctor; and doctor's lines for this engine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.engine import Install
from appliance.engines.vllm.engine import ENGINE
from appliance.engines.vllm.planning.arguments.launch import compile_key, compile_parts
from appliance.engines.vllm.startup.last_start import NAME, LastStart, keep, last_start, load
from appliance.plan import with_launch
from tests.golden.vllm_plans import engine_facts
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, TURINGS, best
from tests.unit.engines.vllm.test_vllm_progress import AOT_MISS, COLD, WARM

PLAN = best(ADA)
WIDER = replace(PLAN, context=4096, parallel=8)


def test_a_miss_is_told_with_the_parts_of_the_key_that_moved(tmp_path: Path) -> None:
    keep(PLAN, COLD, tmp_path)
    first = load(tmp_path)
    assert first == LastStart(is_hit=False, key="0a1b2c3d4e", reason=None, parts=first.parts if first else {})
    assert first.describe() == "the last start missed it, key 0a1b2c3d4e: nothing was kept yet"
    keep(WIDER, COLD, tmp_path)
    second = load(tmp_path)
    assert second
    assert second.moved == ("context", "seqs")
    assert second.describe().endswith(f"another {', '.join(second.moved)} than before")
    keep(PLAN, COLD, tmp_path)
    keep(PLAN, COLD, tmp_path)
    again = load(tmp_path)
    assert again
    assert again.describe().endswith(": all that is known of its key is as before")
    keep(WIDER, WARM, tmp_path)
    third = load(tmp_path)
    assert third
    assert (third.describe(), third.moved) == ("the last start hit it, key 0a1b2c3d4e", ("context", "seqs"))


def test_a_part_of_the_key_that_is_gone_has_moved(tmp_path: Path) -> None:
    more = with_launch(PLAN, variables=(("VLLM_USE_DEEP_GEMM", "0"),))
    assert compile_parts(more).keys() > compile_parts(PLAN).keys()
    keep(more, COLD, tmp_path)
    keep(PLAN, COLD, tmp_path)
    found = load(tmp_path)
    assert found
    assert set(found.moved) == compile_parts(more).keys() - compile_parts(PLAN).keys()


def test_the_engines_own_reason_counts_more(tmp_path: Path) -> None:
    keep(PLAN, AOT_MISS, tmp_path)
    found = load(tmp_path)
    assert found
    assert found.describe() == "the last start missed it, key 5f0e1d2c3b: Compile cache file corrupted."


def test_a_start_that_compiles_nothing() -> None:
    assert last_start(PLAN, (), None).describe() == "the last start compiled nothing"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"is_hit": 3}'])
def test_a_file_that_is_none_is_no_start(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    assert load(tmp_path) is None


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert load(tmp_path) is None


def test_a_volume_that_refuses_is_said_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(PLAN, COLD, tmp_path / "missing")
    assert "cannot be saved" in caplog.text
    assert load(tmp_path / "missing") is None


def test_the_key_is_made_of_its_parts() -> None:
    assert compile_key(PLAN) != compile_key(WIDER)
    assert {name for name, value in compile_parts(PLAN).items() if compile_parts(WIDER)[name] != value} == {
        "context",
        "seqs",
    }


def test_doctor_tells_what_computes_and_what_is_compiled(tmp_path: Path) -> None:
    install = Install(engine_dir=Path("/opt/vllm"), facts=engine_facts(), cache_dir=tmp_path)
    key = tmp_path / "vllm/torch_compile_cache/k0/f"
    key.parent.mkdir(parents=True)
    key.write_bytes(bytes(2**20))
    ENGINE.loaded(PLAN, WARM, install)
    found = {result.name: result.words for result in ENGINE.examine(install, PLAN)}
    assert found["compile cache"].startswith(
        "1 key of torch.compile, 1 MiB of all that was compiled; the last start hit"
    )
    assert compile_key(PLAN) in found["compile cache"]
    assert "FLASH_ATTN" in found["attention"]
    old = {result.name: result.words for result in ENGINE.examine(install, best(TURINGS))}
    assert "TRITON_ATTN" in old["attention"]
    assert {"placement", "reserve", "shared memory of ranks"} <= old.keys()
    assert (old["links of ranks"] or "").startswith(("PCIe: no NVLink", "NVLink: "))
    assert (old["speculation"] or "").startswith("off: until it is measured: ngram (")
    cpu = {result.name: result.words for result in ENGINE.examine(install, best(CPU, "smollm2-135m"))}
    assert cpu["compile cache"].endswith("this plan is eager and compiles nothing")
