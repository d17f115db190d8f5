"""The benchmark of vLLM's start: what it compares is the plan's own command line."""

from __future__ import annotations

from benchmarks.vllm_start import APPLIANCE_PORT, EAGER, PORT, SETTINGS, VARIANTS, appliance, bare, in_pairs
from tests.golden.vllm_plans import SOCKET, arguments
from tests.unit.engines.vllm.planning.vllm_spaces import CPU, best

PLANNED = ("/opt/vllm/bin/vllm", *arguments(best(CPU, "smollm2-135m")))
BY_NAME = {variant.name: variant for variant in VARIANTS}


def test_the_bare_engine_has_the_flags_of_the_plan_and_a_port_instead_of_the_socket() -> None:
    side = bare(BY_NAME["eager"], PLANNED)
    assert side.options[-2:] == ("--entrypoint", "/opt/vllm/bin/vllm")
    with_socket = [word for word in PLANNED[1:] if word not in ("--uds", str(SOCKET), EAGER)]
    with_port = [word for word in side.words if word not in ("--host", "0.0.0.0", "--port", str(PORT), EAGER)]
    assert with_port == with_socket
    assert "--max-model-len" in with_port
    assert "--uds" not in side.words


def test_what_a_variant_compiles_is_the_variant_s() -> None:
    for name, variant in BY_NAME.items():
        assert (EAGER in bare(variant, PLANNED).words) is (name not in ("default", "no-aot"))
        assert bare(variant, PLANNED).words.count(EAGER) <= 1


def test_the_appliance_gets_the_settings_that_the_plan_was_made_with() -> None:
    side = appliance()
    assert side.port == APPLIANCE_PORT
    assert set(side.options[1::2]) == {f"{name}={value}" for name, value in SETTINGS.items()}
    assert not side.words


def test_pairs_start_in_turn_the_first_does_not_count_and_the_ratio_is_the_median_of_theirs() -> None:
    started: list[str] = []
    seconds = iter((90.0, 80.0, 30.0, 20.0, 20.0, 22.0, 26.0, 20.0))

    def first_token_s(side: str) -> float:
        started.append(side)
        return next(seconds)

    found = in_pairs(first_token_s, 3)
    assert started == ["bare", "appliance", "appliance", "bare", "bare", "appliance", "appliance", "bare"]
    assert found["appliance_s"] == [30.0, 22.0, 26.0]
    assert found["bare_s"] == [20.0, 20.0, 20.0]
    assert found["ratio"] == 1.3
    assert found["difference_s"] == 6.0
