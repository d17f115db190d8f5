"""K and V of the cache in types of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from appliance.engines.llama.planning.memory.kv_types import MIXED, unjudged
from appliance.engines.llama.planning.memory.memory import kv_mib
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.fit import projection_arguments
from appliance.engines.llama.process.server import arguments
from appliance.errors import ConfigError
from appliance.plan import KvCheck, k_and_v
from appliance.settings import resolve_settings
from tests.builders import facts
from tests.fakes.machines import hardware_of
from tests.unit.engines.llama.planning.test_plan_context import reason, sized

IMAGE, ENGINE = facts(has_cuda=True)
WITHOUT = replace(ENGINE, kv_pairs=tuple(pair for pair in ENGINE.kv_pairs if pair[0] == pair[1]))
ACCEPTED = KvCheck(kv_type=MIXED, is_accepted=True, why="it costs nothing that could be measured")


@cache
def space(*kv_checks: KvCheck, has_pair: bool = True, **flags: str) -> Space:
    """Return the space of two GPUs of 22 GB, on which q8_0 holds 13,312 tokens with everything on the GPUs."""
    engine = ENGINE if has_pair else WITHOUT
    hardware = hardware_of("2x2080ti-22g")
    return Space(resolve_settings(flags, {}), IMAGE, engine, hardware, sized("70b"), kv_checks=kv_checks)


def types_in(argv: tuple[str, ...]) -> tuple[str, str]:
    return tuple(argv[argv.index(f"--cache-type-{part}") + 1] for part in "kv")  # type: ignore[return-value]


def test_one_name_is_both() -> None:
    assert k_and_v("q8_0") == ("q8_0", "q8_0")
    assert k_and_v(MIXED) == ("q8_0", "q4_0")


def test_what_is_asked_for_reaches_the_engine_its_loader_and_the_memory() -> None:
    found = space(kv_type=MIXED, ctx_size="8192").best
    assert found.kv_type == MIXED
    assert types_in(arguments(found, ENGINE, Path("/tmp/e.sock"))) == ("q8_0", "q4_0")
    assert types_in(projection_arguments(found, ENGINE)) == ("q8_0", "q4_0")
    assert sum(share.memory.kv for share in found.placement.shares) == pytest.approx(
        (kv_mib(sized("70b"), "q8_0", 8192) + kv_mib(sized("70b"), "q4_0", 8192)) / 2
    )
    assert f"kv_type {MIXED}" in found.key
    assert not next(choice for choice in found.choices if choice.name == "kv_type").is_refusal


def test_without_kernels_for_the_pair_it_is_said() -> None:
    found = space(kv_type=MIXED, ctx_size="8192", has_pair=False).best
    choice = next(choice for choice in found.choices if choice.name == "kv_type")
    assert choice.is_refusal
    assert "converts it for every token" in choice.reason


@pytest.mark.thorough
def test_it_is_behind_the_check_of_quality() -> None:
    assert space().best.kv_type == "q8_0"
    assert space().kinds_to_check()[-1:] == (MIXED,)  # q4_0 carries more
    assert MIXED not in space(has_pair=False).kinds_to_check()
    assert {plan.kv_type for plan in space().all()} == {"f16", "q8_0"}


@pytest.mark.thorough
def test_a_check_that_accepts_it_makes_it_a_candidate() -> None:
    before, after = space(), space(ACCEPTED)
    assert after.best.kv_type == MIXED
    assert after.best.context > 1.25 * before.best.context
    assert "q8_0 would carry only" in reason(after.best, "kv_type")
    assert MIXED in {plan.kv_type for plan in after.all()}
    assert space(ACCEPTED, has_pair=False).best == before.best


def test_on_a_cpu_there_is_no_such_kernel() -> None:
    _, engine = facts(has_cuda=False)
    assert MIXED not in unjudged(resolve_settings({}, {}), engine, sized("8b"), on_gpu=False)


def test_a_setting_names_two_types_or_one() -> None:
    assert resolve_settings({"kv_type": MIXED}, {}).kv_type == MIXED
    assert resolve_settings({"kv_type": "q8_0/q8_0"}, {}).kv_type == "q8_0"
    for wrong in ("q8_0/", "/q4_0", "auto/q4_0", "q8_0/q4_0/q4_0"):
        with pytest.raises(ConfigError, match="kv_type"):
            resolve_settings({"kv_type": wrong}, {})


def test_half_of_a_pair_that_the_engine_lacks_is_refused() -> None:
    engine = replace(ENGINE, kv_types=("f16", "q8_0"))
    with pytest.raises(ConfigError, match="not offered by this engine: 'q8_0/q4_0'"):
        Space(resolve_settings({"kv_type": MIXED}, {}), IMAGE, engine, hardware_of("h100"), sized("8b"))


def test_a_smaller_v_is_credited_with_memory_and_with_no_speed() -> None:
    here = space(kv_type=MIXED, ctx_size="4096")
    costs = [here.costs(replace(here.best, kv_type=kind)) for kind in ("f16", "q8_0", MIXED, "q4_0")]
    assert len({each.gpu_depth_us for each in costs}) == 1
