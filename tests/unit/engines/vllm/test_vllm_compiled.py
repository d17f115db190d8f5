"""Which compile keys are on the volume, and what the next cold one costs: kept from start to start."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.engine import Install
from appliance.engines.vllm.engine import ENGINE
from appliance.engines.vllm.planning.arguments.launch import compile_key, launch_of
from appliance.engines.vllm.startup.compiled import NAME, USUAL_S, Compiled, load
from appliance.engines.vllm.startup.last_start import load as load_last
from appliance.plan import Compilation, Plan
from appliance.tune.figures.curve import Point
from appliance.tune.figures.workload import CHAT, only
from appliance.tune.search.candidates import candidates
from appliance.tune.search.search import Ask, Effort, Search, Trial
from tests.golden.vllm_plans import engine_facts
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, best, space
from tests.unit.engines.vllm.test_vllm_progress import AOT_HIT, AOT_MISS, COLD, WARM

PLAN = best(ADA)
WIDER = replace(PLAN, context=4096)
KEY, WHOLE_KEY = "vllm/torch_compile_cache/0a1b2c3d4e", "vllm/torch_compile_cache/torch_aot_compile/5f0e1d2c3b4a5f0e"


def installed(cache_dir: Path, *kept: str) -> Install:
    for name in kept:
        (cache_dir / name).mkdir(parents=True)
    return Install(engine_dir=Path("/opt/vllm"), facts=engine_facts(), cache_dir=cache_dir)


def seconds(install: Install, plan: Plan = PLAN) -> float | None:
    found = ENGINE.compilations(install)(plan)
    return found.seconds if found else None


def test_before_any_start_the_price_is_what_users_report(tmp_path: Path) -> None:
    found = ENGINE.compilations(installed(tmp_path))(PLAN)
    assert found == Compilation(key=compile_key(PLAN), seconds=USUAL_S)


def test_a_plan_that_is_eager_compiles_nothing(tmp_path: Path) -> None:
    assert seconds(installed(tmp_path), best(CPU, "smollm2-135m")) is None


def test_a_start_that_compiled_is_found_by_the_next_and_prices_the_others(tmp_path: Path) -> None:
    install = installed(tmp_path, KEY)
    ENGINE.loaded(PLAN, COLD, install, is_trial=True)
    assert (seconds(install), seconds(install, WIDER)) == (0.0, 13.4)
    assert load_last(tmp_path) is None  # of what serves alone
    ENGINE.loaded(PLAN, WARM, install)
    assert load(tmp_path) == Compiled(cold_s=13.4, keys={compile_key(PLAN): "0a1b2c3d4e"})


def test_a_whole_program_is_found_by_the_beginning_of_its_key(tmp_path: Path) -> None:
    install = installed(tmp_path, WHOLE_KEY)
    ENGINE.loaded(PLAN, AOT_HIT, install)
    assert (seconds(install), seconds(install, WIDER)) == (0.0, USUAL_S)


def test_what_was_pruned_is_compiled_anew(tmp_path: Path) -> None:
    install = installed(tmp_path, KEY)
    ENGINE.loaded(PLAN, COLD, install)
    (tmp_path / KEY).rmdir()
    assert seconds(install) == 13.4
    ENGINE.loaded(WIDER, AOT_HIT, install)
    assert load(tmp_path).keys == {}


def test_what_was_there_and_could_not_be_loaded_costs_as_much_again(tmp_path: Path) -> None:
    install = installed(tmp_path, WHOLE_KEY, KEY)
    ENGINE.loaded(PLAN, AOT_HIT, install)
    ENGINE.loaded(PLAN, (*AOT_MISS, *COLD), install)
    assert seconds(install) == 13.4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cold_s": "x", "keys": {}}', '{"cold_s": 3}'])
def test_a_file_that_is_none_is_nothing_kept(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    assert load(tmp_path) == Compiled()


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert seconds(installed(tmp_path)) == USUAL_S


def test_a_volume_that_refuses_is_said_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    install = Install(engine_dir=Path("/opt/vllm"), facts=engine_facts(), cache_dir=tmp_path / "missing")
    ENGINE.loaded(PLAN, COLD, install, is_trial=True)
    assert "cannot be saved" in caplog.text


def test_the_search_asks_for_what_is_compiled_before_what_is_alike_and_is_not(tmp_path: Path) -> None:
    """The plans have equal predictions; only the last one is compiled."""
    here = space(ADA)
    plans = [plan for plan in here.all() if plan.kv_type == "bf16" and launch_of(plan).asked_block_size is None]
    (tmp_path / KEY).mkdir(parents=True)
    install = installed(tmp_path)
    ENGINE.loaded(plans[-1], COLD, install, is_trial=True)

    def next_after_the_first(*, is_priced: bool) -> str:
        found = candidates(here, plans, ENGINE.compilations(install)) if is_priced else candidates(here, plans)
        search = Search(found, only(CHAT), Effort(depths=(32,)), knob_effects=here.knob_effects)
        point = Point(depth=32, decode_ms=11.0, prefill_ms=0.25, prefill_tokens=32)
        ask = search.ask([Trial(key=plans[0].key, points=(point,), load_s=40.0)], left_s=3600)
        assert isinstance(ask, Ask)
        return ask.candidate.key

    assert next_after_the_first(is_priced=True) == plans[-1].key
    assert next_after_the_first(is_priced=False) != plans[-1].key
