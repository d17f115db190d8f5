"""The command of vLLM's server: pure, and the only place with its flags and variables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.engine import Install
from appliance.engines.vllm.planning.arguments.launch import compile_key
from appliance.engines.vllm.process import server
from appliance.errors import EngineArgumentsError
from appliance.plan import Plan, with_launch
from appliance.settings import resolve_settings
from appliance.tune.figures.slots import Concurrency, Job, choose, with_slots
from appliance.tune.figures.workload import Workload
from images.matrix.engines import ENGINES
from tests.golden.vllm_plans import SOCKET, arguments, engine_facts
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, TURINGS, best, cards, space

INSTALL = Install(engine_dir=Path("/opt/vllm"), facts=engine_facts(), cache_dir=Path("/data/cache/b1"))
# What would open routes, hide a death, or be applied to another plan than it was made for.
NEVER = {
    "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "VLLM_ENABLE_STARTUP_PLAN", "VLLM_CPU_KVCACHE_SPACE",
}  # fmt: skip


def variables(plan: Plan, install: Install = INSTALL) -> dict[str, str]:
    return server.environment(plan, install, server.scratch_of(SOCKET))


async def _ready() -> bool:
    return True


def test_the_command_is_the_image_s_own_launcher_on_the_socket() -> None:
    plan = best(CPU, "smollm2-135m")
    found = server.command(plan, INSTALL, SOCKET, is_ready=_ready, is_error=bool)
    assert found.argv[:3] == ("/opt/vllm/bin/vllm", "serve", "/data/models/smollm2-135m")
    assert found.argv[3:5] == ("--uds", str(SOCKET))
    assert found.socket_path == SOCKET


def test_a_stop_with_the_default_drain_ends_before_docker_kills() -> None:
    """`docker stop` kills after 10 s. The supervisor's margin after the grace is one second (`Supervisor.stop`)."""
    found = server.command(best(CPU, "smollm2-135m"), INSTALL, SOCKET, is_ready=_ready, is_error=bool)
    assert resolve_settings({}, {}).drain_s + found.stop_grace_s + 1.0 <= 9.0


def test_every_cache_lies_on_the_volume_and_nothing_is_fetched() -> None:
    found = variables(best(ADA))
    below = {name: value.removeprefix("/data/cache/b1/") for name, value in found.items() if "/data/cache/b1/" in value}
    assert below == ENGINES["vllm"].caches  # the image says the same to whoever runs the engine by hand
    assert found["HF_HUB_OFFLINE"] == found["TRANSFORMERS_OFFLINE"] == "1"
    assert found["VLLM_NO_USAGE_STATS"] == found["VLLM_DO_NOT_TRACK"] == "1"
    assert not NEVER & found.keys()


@pytest.mark.parametrize(("machine", "model"), [(ADA, "qwen3-8b-fp8"), (CPU, "smollm2-135m")])
def test_what_is_never_set_is_never_set(machine: str, model: str) -> None:
    for plan in space(machine, model).all():
        assert not NEVER & variables(plan).keys()


def test_cards_are_named_in_the_order_of_ranks() -> None:
    plan = best(TURINGS)
    uuids = [share.gpu.id for share in plan.placement.shares]
    found = variables(plan, replace(INSTALL, driver_dir=Path("/usr/lib/wsl/lib")))
    assert found["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
    assert found["LD_LIBRARY_PATH"] == "/usr/lib/wsl/lib"


def test_layers_of_stages_are_a_variable() -> None:
    three = cards("2x4090", *[{"vram_total_mib": 8192, "vram_free_mib": 8192} for _ in range(3)])
    split = variables(best(three, "qwen3-8b"))["VLLM_PP_LAYER_PARTITION"]
    assert sum(map(int, split.split(","))) == 36


def test_what_the_user_set_for_the_engine_arrives() -> None:
    plan = best(ADA, environment={"VLLM_USE_DEEP_GEMM": "0", "VLLM_CACHE_ROOT": "/elsewhere"})
    found = variables(plan)
    assert found["VLLM_USE_DEEP_GEMM"] == "0"
    assert found["VLLM_CACHE_ROOT"] == "/data/cache/b1/vllm"


def test_threads_are_bound_unless_they_are_counted() -> None:
    assert "OMP_NUM_THREADS" not in variables(best(CPU, "smollm2-135m"))
    counted = variables(best(CPU, "smollm2-135m", threads="3"))
    assert (counted["OMP_NUM_THREADS"], counted["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")


def test_a_barrier_on_the_cpu_spins_for_a_short_time_only() -> None:
    assert variables(best(CPU, "smollm2-135m"))["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in variables(best(ADA)), "a GPU's work does not wait for threads"


def test_a_flag_that_the_engine_lacks_is_refused_before_it_is_started() -> None:
    facts = engine_facts()
    lacking = replace(facts, flags=tuple(flag for flag in facts.flags if flag != "--shutdown-timeout"))
    with pytest.raises(EngineArgumentsError, match=r"engine has no flag --shutdown-timeout: vllm 0\.33\.0") as caught:
        server.arguments(best(ADA), lacking, SOCKET)
    assert caught.value.exit_code == 40


@pytest.mark.parametrize(
    ("release", "flag"), [("0.32", "--no-enable-prefix-caching"), ("0.33", "--disable-prefix-caching")]
)
def test_off_is_said_in_the_words_of_the_release(release: str, flag: str) -> None:
    plan = with_launch(best(ADA), has_prefix_cache=False)
    assert flag in server.arguments(plan, engine_facts(release), SOCKET)


@pytest.mark.parametrize(
    ("flags", "sequences", "source"),
    [
        ({}, "16", "memory"),
        ({"users": "8"}, "16", "memory"),
        ({"workload": "document"}, "4", "default"),
        ({"users": "8", "workload": "document"}, "9", "flag --users"),
        ({"users": "40"}, "41", "flag --users"),
        ({"users": "8", "parallel": "2"}, "2", "flag --parallel"),
    ],
)
def test_sequences_are_those_that_the_cache_holds_and_no_fewer_than_users(
    flags: dict[str, str], sequences: str, source: str
) -> None:
    plan = best(ADA, **flags)
    argv = arguments(plan)
    assert argv[argv.index("--max-num-seqs") + 1] == sequences
    (choice,) = (each for each in plan.choices if each.name == "parallel")
    assert (choice.value, choice.source) == (sequences, source)


def test_a_count_that_was_measured_to_be_best_is_that_of_the_command() -> None:
    workload = Workload(name="chat", tokens_in=512, tokens_out=256)
    job = Job(seconds=4.0, ttft_s=0.5, decode_ms=10.0, tokens_read=512, tokens_cached=0)
    chosen = choose([Concurrency(slots=2, workload=workload, jobs=(job, job))])
    plan = with_slots(best(ADA, users="8"), chosen)
    argv = arguments(plan)
    assert argv[argv.index("--max-num-seqs") + 1] == "2"
    assert next(each.reason for each in plan.choices if each.name == "parallel") == chosen.why
    assert compile_key(plan) != compile_key(best(ADA, users="8"))


def test_one_way_to_say_a_thing() -> None:
    for plan in (*space(ADA).all(), *space(CPU, "smollm2-135m").all()):
        argv = arguments(plan)
        assert ("--kv-cache-memory-bytes" in argv) != ("--gpu-memory-utilization" in argv)
        assert not ("--enforce-eager" in argv and "--compilation-config" in argv)
        assert not {"-O", "--cudagraph-capture-sizes", "--trust-remote-code"} & set(argv)


def test_graphs_and_drafts_as_json_with_sorted_keys() -> None:
    plan = space(TURINGS, "qwen3.6-27b-awq", speculation="ngram", parallel="2").predicted
    assert server.compilation_config(plan) == (
        '{"cudagraph_capture_sizes":[1,2,4,8,16],"cudagraph_mode":"FULL_AND_PIECEWISE"}'
    )
    assert json.loads(server.speculative_config(plan)) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    with pytest.raises(ValueError, match="does not speculate"):
        server.speculative_config(best(ADA))
