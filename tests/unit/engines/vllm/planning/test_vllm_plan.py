"""Plans of vLLM: what decides them, what they refuse, and what they never do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.planning.arguments.engine_args import read_pins
from appliance.engines.vllm.planning.arguments.launch import compile_key, compile_parts
from appliance.engines.vllm.planning.memory.memory import MIB, graph_sizes
from appliance.engines.vllm.planning.memory.parallel import layouts, split_layers
from appliance.engines.vllm.planning.model.shape import shape_of
from appliance.engines.vllm.planning.space import Space
from appliance.errors import (
    ConfigError,
    FatalError,
    GpuUnusableError,
    ModelDoesNotFitError,
    ModelUnreadableError,
    NoKernelError,
)
from appliance.model import read_model
from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.settings import resolve_settings
from tests.golden.vllm_plans import arguments, engine_facts, hardware, inputs, variables
from tests.shapes.folders import folder_model, write_folder
from tests.unit.engines.vllm.planning.vllm_spaces import (
    ADA,
    CPU,
    SERVER,
    TURINGS,
    best,
    cards,
    launch,
    reason,
    space,
    with_cards,
)

AWQ = {**folder_model("smollm2-135m").config, "quantization_config": {"quant_method": "awq", "bits": 4}}


def refused(kind: type[FatalError], *args: Any, **flags: Any) -> FatalError:
    with pytest.raises(kind) as caught:
        best(*args, **flags)
    assert caught.value.hint
    return caught.value


def value_of(plan: Plan, flag: str) -> str:
    argv = arguments(plan)
    return argv[argv.index(flag) + 1]


def on_cuda_image(machine: Hardware, **flags: str) -> FatalError:
    """Return the error of the CUDA image on a machine for which nothing can be planned."""
    cuda = inputs(hardware(ADA), folder_model("qwen3-8b-fp8"), flags)
    with pytest.raises(FatalError) as caught:
        Space(replace(cuda, hardware=machine))
    assert caught.value.hint
    return caught.value


def test_an_image_for_gpus_without_one_is_23() -> None:
    error = on_cuda_image(hardware(CPU))
    assert (type(error), error.exit_code) == (GpuUnusableError, 23)
    assert "vllm-cu130 serves on GPUs alone: none was given to it" in error.message
    assert "use the image vllm-cpu" in (error.hint or "")


@pytest.mark.parametrize("flags", [{}, {"devices": "0"}])
def test_an_image_for_gpus_says_which_it_passed_over(flags: dict[str, str]) -> None:
    two = cards("2x4090", {"vram_free_mib": None}, {"sm": "70", "name": "Tesla V100"})
    error = on_cuda_image(two, **flags)
    assert error.exit_code == 23
    assert "GPU 0 (NVIDIA GeForce RTX 4090): the driver does not report its free memory" in error.message
    assert "GPU 1 (Tesla V100): this image has kernels for SM 75" in error.message


def test_an_image_for_gpus_that_may_use_none_is_10() -> None:
    error = on_cuda_image(hardware(ADA), devices="none")
    assert (type(error), error.exit_code) == (ConfigError, 10)
    assert "setting devices is 'none' (flag --devices)" in error.message
    assert best(CPU, "smollm2-135m", devices="none").placement.shares == ()


def test_a_first_start_takes_its_share_from_what_is_free() -> None:
    free = best(ADA)
    shared = best(with_cards(ADA, vram_free_mib=16000))
    assert launch(shared).kv_bytes is None
    assert (launch(shared).utilization or 1.0) < 16000 / 24564 < (launch(free).utilization or 0.0)
    assert "16,000 are free" in reason(shared, "kv_cache")


@pytest.mark.parametrize("machine", [ADA, TURINGS, SERVER])
def test_what_was_left_is_passed_in_bytes_later(machine: str) -> None:
    here = space(machine)
    first = here.best
    found = here.now(first)
    assert isinstance(found, Plan)
    kv_mib = first.placement.shares[0].memory.kv
    from_log = replace_allocated(kv_mib - 20)
    later = here.now(first, from_log)
    assert isinstance(later, Plan)
    assert float(value_of(later, "--gpu-memory-utilization")) == launch(first).utilization, "what has to be free"
    assert int(value_of(later, "--kv-cache-memory-bytes")) == int((kv_mib - 20) * MIB)
    assert (later.key, later.context) == (first.key, first.context)


def replace_allocated(kv_mib: float) -> Any:
    from appliance.plan import Allocated

    return Allocated(kv=kv_mib)


def test_a_plan_of_before_says_what_it_lacks() -> None:
    measured = best(ADA)
    now = space(with_cards(ADA, vram_free_mib=9000))
    found = now.now(measured, replace_allocated(measured.placement.shares[0].memory.kv))
    assert isinstance(found, str)
    assert "MiB of each of its GPUs" in found
    gone = space(CPU, "smollm2-135m").now(measured)
    assert gone == "a GPU that it used is not there: NVIDIA GeForce RTX 4090"


def test_sm75_is_explained_and_not_an_error() -> None:
    plan = best(TURINGS, "qwen3.6-27b-awq")
    assert (launch(plan).dtype, launch(plan).attention_backend) == ("float16", "TRITON_ATTN")
    assert "which is no error" in reason(plan, "attention")
    assert "FLASHINFER is passed over" in reason(plan, "attention")
    assert "weights are converted" in reason(plan, "dtype")
    assert "Marlin" in reason(plan, "quantization")


@pytest.mark.parametrize("kv_type", ["fp8", "fp8_e4m3", "bf16", "q8_0", "nvfp4", "f16/q8_0"])
def test_a_cache_type_that_the_chip_has_not_is_10_with_alternatives(kv_type: str) -> None:
    if "/" in kv_type:
        error = refused(ConfigError, TURINGS, "qwen3.6-27b-awq", kv_type="f16/q8_0")
    else:
        error = refused(ConfigError, TURINGS, "qwen3.6-27b-awq", kv_type=kv_type)
    assert error.exit_code == 10
    assert kv_type in error.message
    assert "f16, int8_per_token_head, int4_per_token_head" in (error.hint or "")


def test_bfloat16_that_was_asked_for_is_10_on_sm75() -> None:
    error = refused(ConfigError, TURINGS, engine_arg="--dtype bfloat16")
    assert "begins with SM 80" in error.message
    assert error.exit_code == 10


def test_weights_without_a_kernel_on_the_chip_are_20() -> None:
    model = folder_model("qwen3-8b-fp8")
    mx = replace(model, config={**model.config, "quantization_config": {"quant_method": "mxfp4"}})
    error = refused(NoKernelError, TURINGS, mx)
    assert error.exit_code == 20
    assert "needs SM 80" in error.message
    assert "awq" in (error.hint or "")


def test_a_context_above_native_is_10_without_yarn() -> None:
    error = refused(ConfigError, ADA, ctx_size="81920")
    assert error.exit_code == 10
    assert "--rope-scaling yarn: factor 2" in (error.hint or "")
    plan = best(ADA, ctx_size="81920", rope_scaling="yarn")
    overrides = json.loads(value_of(plan, "--hf-overrides"))["rope_parameters"]
    assert overrides["factor"] == 2.0
    assert overrides["original_max_position_embeddings"] == 40960
    assert overrides["rope_type"] == "yarn"
    assert value_of(plan, "--max-model-len") == "81920"


@given(st.integers(40961, 163840))
def test_yarn_always_reaches_what_was_asked_for(context: int) -> None:
    """vLLM cuts `native x factor` off to whole tokens."""
    from appliance.engines.vllm.planning.model.rope import overrides_for
    from appliance.settings import resolve_settings

    settings = resolve_settings({"ctx_size": str(context), "rope_scaling": "yarn"}, {})
    found = json.loads(overrides_for(settings, folder_model("qwen3-8b")) or "")
    assert int(40960 * found["rope_parameters"]["factor"]) >= context


def test_yarn_on_a_model_with_a_scaling_of_its_own_is_10() -> None:
    model = folder_model("qwen3-8b-fp8")
    scaled = replace(model, config={**model.config, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    error = refused(ConfigError, ADA, scaled, ctx_size="81920", rope_scaling="yarn")
    assert "a RoPE scaling of its own, yarn" in error.message


@pytest.mark.parametrize(("tensor", "words"), [("3", "32 attention heads are not divisible by 3"), ("2", "")])
def test_ranks_that_heads_allow(tensor: str, words: str) -> None:
    if not words:
        plan = best("2x4090", engine_arg=f"--tensor-parallel-size {tensor}")
        assert value_of(plan, "--tensor-parallel-size") == tensor
        return
    error = refused(ConfigError, "4x2080ti-22g", engine_arg=f"--tensor-parallel-size {tensor}")
    assert words in error.message
    assert error.hint == "this model allows 1, 2, 4, 8, 16"


def test_groups_of_quantized_weights_bound_the_ranks() -> None:
    """29,568 / 8 = 3,696 is no multiple of 128: Qwen2.5-72B-AWQ stops at four."""
    model = replace(folder_model("llama-3.3-70b-awq"), feed_forward_length=29568)
    error = refused(ConfigError, "4x2080ti-22g", model, engine_arg="--tensor-parallel-size 8")
    assert "29,568 / 8 = 3,696 is not divisible by the group of 128" in error.message


def test_more_ranks_than_cards_are_10() -> None:
    error = refused(ConfigError, "2x4090", engine_arg="--tensor-parallel-size 4")
    assert "4 ranks" in error.message
    assert "2 GPUs can be used" in error.message


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_that_were_asked_for_have_a_card_for_each_rank(stages: int) -> None:
    plan = best("4x2080ti-22g", "llama-3.3-70b-awq", engine_arg=f"--pipeline-parallel-size {stages}")
    assert launch(plan).pipeline_parallel == stages
    assert len(plan.placement.shares) == launch(plan).local_ranks <= 4


def test_more_stages_than_cards_are_10_with_both_numbers() -> None:
    error = refused(ConfigError, "2x4090", engine_arg="--pipeline-parallel-size 4")
    assert error.exit_code == 10
    assert "4 ranks (flag --engine-arg), and 2 GPUs can be used" in error.message


@given(st.integers(1, 8), st.one_of(st.none(), st.integers(1, 8)), st.one_of(st.none(), st.integers(1, 8)))
def test_no_layout_has_more_ranks_than_cards(cards: int, tensor: int | None, pipeline: int | None) -> None:
    shape = shape_of(folder_model("qwen3-8b"))
    if (tensor or 1) * (pipeline or 1) > cards:
        return  # refused before
    found = list(layouts(shape, [80_000.0] * cards, (0.0, 0.0), tensor=tensor, pipeline=pipeline))
    assert found
    assert all(layout.ranks <= cards for layout in found)
    assert all(not layout.layers or sum(layout.layers) == shape.layers for layout in found)


def test_more_cards_than_kv_heads_say_that_they_buy_no_context() -> None:
    eight = cards("2x4090", *[{} for _ in range(8)])
    plan = best(eight, "qwen3-30b-a3b", engine_arg="--tensor-parallel-size 8")
    assert "cards beyond 4 buy no context" in reason(plan, "kv_heads")


def test_stages_come_where_ranks_cannot() -> None:
    """Three cards of 12 GiB: 32 heads allow two ranks, and neither one nor two of them hold 8B in 16 bits."""
    three = cards("2x4090", *[{"vram_total_mib": 8192, "vram_free_mib": 8192} for _ in range(3)])
    plan = best(three, "qwen3-8b")
    assert launch(plan).pipeline_parallel == 3
    assert sum(launch(plan).stage_layers) == 36
    assert value_of(plan, "--pipeline-parallel-size") == "3"
    assert "stages, since 32 attention heads are not divisible by 3" in reason(plan, "placement")


UNEVEN = ({"vram_total_mib": 24564, "vram_free_mib": 24564}, {"vram_total_mib": 10240, "vram_free_mib": 10240})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_uneven_cards_are_filled_by_stages(order: tuple[int, int]) -> None:
    """24 GiB of weights: 12 on each of two ranks are more than the small card has, and one card is too small alone."""
    there = cards("2x4090", *[UNEVEN[at] for at in order])
    plan = best(there, "gemma-3-12b", mmproj="off")
    assert (launch(plan).tensor_parallel, launch(plan).pipeline_parallel) == (1, 2)
    large, small = launch(plan).stage_layers
    assert (large + small, large > 2 * small) == (48, True)
    first, last = plan.placement.shares
    assert (first.gpu.index, last.gpu.index) == order
    assert (first.layers, last.layers) == (large, small + 1)
    assert first.memory.weights > 2 * last.memory.weights
    assert first.memory.kv > 2 * last.memory.kv
    for share in (first, last):
        assert share.memory.total <= share.gpu.free_mib + 0.1
        assert share.memory.total > 0.9 * share.gpu.free_mib, "memory is left that a layer more would use"
    assert "ranks of one layer reach no more than" in reason(plan, "placement")
    assert "each stage has layers by its card's memory" in reason(plan, "uneven")
    assert variables(plan)["VLLM_PP_LAYER_PARTITION"] == f"{large},{small}"


def test_a_later_start_on_uneven_cards_is_given_what_the_largest_stage_takes() -> None:
    here = space(cards("2x4090", *UNEVEN), "gemma-3-12b", mmproj="off")
    first = here.best
    kv_mib = max(share.memory.kv for share in first.placement.shares)
    assert launch(first).kv_bytes == pytest.approx(kv_mib * MIB, abs=1)
    later = here.now(first, replace_allocated(kv_mib - 20))
    assert isinstance(later, Plan)
    needed = space(cards("2x4090", *UNEVEN), "gemma-3-12b", mmproj="off").kv_tokens(later)
    assert needed is not None
    assert needed >= later.context
    assert launch(later).kv_bytes is not None
    assert launch(later).stage_layers == launch(first).stage_layers
    assert later.context == first.context


def test_cards_of_one_kind_are_uneven_by_what_is_free() -> None:
    """One share for both GPUs would be that of the smaller one, so the cache is given in bytes."""
    there = cards("2x4090", {"vram_free_mib": 23000}, {"vram_free_mib": 8000})
    plan = best(there, "gemma-3-12b", mmproj="off")
    assert launch(plan).pipeline_parallel == 2
    assert launch(plan).kv_bytes is not None
    assert (launch(plan).utilization or 1.0) * 24564 < 8000
    for share in plan.placement.shares:
        assert share.memory.total <= share.gpu.free_mib + 0.1
    assert "one share of unlike cards would leave the larger unused" in reason(plan, "kv_cache")


def test_stages_are_no_candidate_on_even_cards() -> None:
    """Two tensor parallel ranks need the same memory in total and are faster."""
    assert all(launch(plan).pipeline_parallel == 1 for plan in space("2x4090", "gemma-3-12b").all())


def test_layers_of_stages_follow_the_memory() -> None:
    assert split_layers(32, (24.0, 8.0)) == (24, 8)
    with pytest.raises(ValueError, match="3 pipeline stages need as many layers"):
        split_layers(2, (1.0, 1.0, 1.0))


@given(st.integers(1, 128), st.lists(st.floats(1.0, 200_000.0), min_size=1, max_size=16))
def test_every_layer_has_its_stage(layers: int, rooms: list[float]) -> None:
    if layers >= len(rooms):
        found = split_layers(layers, rooms)
        assert sum(found) == layers
        assert min(found) >= 1


def test_shared_memory_is_looked_at_before_two_ranks() -> None:
    two = hardware("2x4090")
    short = replace(two, memory=replace(two.memory, shm_mib=64))
    plan = best(short)
    assert launch(plan).tensor_parallel == 1
    assert "two need 640 MiB in /dev/shm, and it has 64" in reason(plan, "shm")
    error = refused(ConfigError, short, engine_arg="--tensor-parallel-size 2")
    assert "--shm-size" in (error.hint or "")


@pytest.mark.parametrize(("words", "there", "needed"), [("", 64, 256), ("--tensor-parallel-size 2", 512, 640)])
def test_on_the_cpu_one_rank_needs_shared_memory_too(words: str, there: int, needed: int) -> None:
    """Docker's 64 MiB end the engine after half a minute of imports: it is refused before."""
    cpu = hardware(CPU)
    asked = {"engine_arg": words} if words else {}
    error = refused(ConfigError, replace(cpu, memory=replace(cpu.memory, shm_mib=there)), **asked)
    assert f"{there} MiB in /dev/shm, {needed} are needed" in error.message
    assert "--shm-size 1g" in (error.hint or "")
    assert best(replace(cpu, memory=replace(cpu.memory, shm_mib=needed)), **asked).context


def test_uneven_cards_are_said() -> None:
    plan = best("4070+3060", engine_arg="--tensor-parallel-size 2")
    assert "by the memory of the smallest card" in reason(plan, "uneven")


def test_a_reserve_that_was_asked_for_is_the_whole_of_it() -> None:
    plan, own = best(TURINGS), best(TURINGS, reserve_mib="2000")
    assert "kernels compiled at the first request" in reason(plan, "reserve")
    assert reason(own, "reserve") == "2,000 asked for"
    assert (launch(own).utilization or 1.0) < (launch(plan).utilization or 0.0)


def test_values_of_the_users_own_win() -> None:
    words = (
        "--gpu-memory-utilization 0.5 --block-size 32 --attention-backend TRITON_ATTN --no-enable-prefix-caching "
        '--compilation-config {"cudagraph_mode":"PIECEWISE","cudagraph_capture_sizes":[1,2]}'
    )
    quoted = words.replace('{"', "'{\"").replace("]}", "]}'")
    plan = best(SERVER, engine_arg=quoted)
    assert value_of(plan, "--gpu-memory-utilization") == "0.5"
    assert value_of(plan, "--block-size") == "32"
    assert value_of(plan, "--attention-backend") == "TRITON_ATTN"
    assert json.loads(value_of(plan, "--compilation-config")) == {
        "cudagraph_capture_sizes": [1, 2],
        "cudagraph_mode": "PIECEWISE",
    }
    assert "--disable-prefix-caching" in arguments(plan)
    sources = {choice.name: choice.source for choice in plan.choices}
    assert sources["graph_mode"] == sources["block_size"] == sources["kv_cache"] == "flag --engine-arg"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-model-len 4096", "the setting ctx_size stands for"),
        ("--data-parallel-size 2", "cannot be given"),
        ("-O3", "cannot be given"),
        ("--tensor-paralel-size 2", "this engine does not have"),
        ("--block-size 1k", "no whole number"),
        ("--gpu-memory-utilization 1.5", "no share above 0"),
        ("--compilation-config '{\"level\":3}'", "keys of --compilation-config that no plan takes over: level"),
        ("--compilation-config '{'", "no JSON"),
        ("--dtype", "0 values for --dtype"),
        ("--block-size 16 --block-size 32", "a flag twice: --block-size"),
        ("--seed 1 --seed 2", "a flag twice: --seed"),
        ("-tp 1 --tensor-parallel-size 2", "a flag twice: --tensor-parallel-size"),
        ("--enable-log-requests --disable-log-requests", "a flag twice: --disable-log-requests"),
        ("--enable-prefix-caching --no-enable-prefix-caching", "a flag twice: --no-enable-prefix-caching"),
        (
            '--enforce-eager --compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'',
            "another of its flags says already: --compilation-config (graph_mode)",
        ),
        ("--generation-config auto", "cannot be given: --generation-config"),
        ("--enable-fastapi-docs", "cannot be given: --enable-fastapi-docs"),
        ("--max-num-queued-reqs 4", "cannot be given: --max-num-queued-reqs"),
        ("--data-parallel-address 10.0.0.2", "cannot be given: --data-parallel-address"),
        ("-dpn 2", "cannot be given: -dpn"),
        ("--dp-sync-interval 3", "cannot be given: --dp-sync-interval"),
        ("--grpc-port 8033", "cannot be given: --grpc-port"),
        ("--logging-config '{}'", "cannot be given: --logging-config"),
        ("--log-config-file /tmp/log.json", "cannot be given: --log-config-file"),
        ("--distributed-executor-backend ray", "cannot be given: --distributed-executor-backend"),
    ],
)
def test_an_argument_that_cannot_be_taken_is_10(words: str, said: str) -> None:
    error = refused(ConfigError, ADA, engine_arg=words)
    assert error.exit_code == 10
    assert said in error.message
    assert "flag --engine-arg" in error.message


def with_choices(words: str) -> Plan:
    facts = engine_facts()
    given = inputs(hardware(ADA), folder_model("qwen3-8b-fp8"), {"engine_arg": words})
    return Space(replace(given, facts=facts)).best


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            "--scheduling-policy prioritie",
            "a value that --scheduling-policy does not accept: 'prioritie'",
            "one of priority",
        ),
        ("--dtype int3", "a value that --dtype does not accept: 'int3'", "one of auto, bfloat16"),
        ("--mm-encoder-tp-mode weights x", "a value that --mm-encoder-tp-mode does not accept: 'x'", "one of"),
    ],
)
def test_a_value_that_a_flag_does_not_list_is_10(words: str, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_choices(words)
    assert f"setting engine_arg holds {said} (flag --engine-arg)" in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_value_that_a_flag_lists_is_taken() -> None:
    assert arguments(with_choices("--scheduling-policy priority"))[-2:] == ("--scheduling-policy", "priority")
    assert launch(with_choices("--dtype half")).dtype == "float16"


def test_overrides_of_the_config_are_the_user_s_unless_the_plan_has_some() -> None:
    words = """--hf-overrides '{"rope_theta":1}'"""
    assert arguments(best(ADA, engine_arg=words))[-2] == "--hf-overrides"
    error = refused(ConfigError, ADA, engine_arg=words, rope_scaling="yarn", ctx_size="81920")
    assert "the setting rope_scaling gives as well: --hf-overrides" in error.message


@pytest.mark.parametrize("machine", [TURINGS, "24+8", SERVER])
def test_no_flag_of_the_command_may_be_given_again(machine: str) -> None:
    """Each that a plan passes is taken over by it, stands for a setting, or is refused."""
    model = "gemma-3-12b" if machine == "24+8" else "qwen3.6-27b-awq"
    argv = arguments(space(machine, model, mmproj="off").best)
    facts = inputs(hardware(machine), folder_model("qwen3-8b"), {}).facts
    taken = {
        "--tensor-parallel-size", "--pipeline-parallel-size", "--block-size", "--kv-cache-memory-bytes", "--dtype",
        "--attention-backend", "--gdn-prefill-backend", "--enable-prefix-caching", "--disable-prefix-caching",
        "--language-model-only", "--gpu-memory-utilization", "--compilation-config",
    }  # fmt: skip
    for flag in {word for word in argv if word.startswith("--")} - taken:
        with pytest.raises(ConfigError):
            read_pins(resolve_settings({"engine_arg": f"{flag} 1"}, {}), facts)


def test_code_of_the_folder_is_never_run_unless_asked() -> None:
    model = folder_model("qwen3-8b-fp8")
    own = replace(model, config={**model.config, "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}})
    plan = best(ADA, own)
    assert "--trust-remote-code" not in arguments(plan)
    assert "never run unless asked" in reason(plan, "remote_code")
    asked = best(ADA, own, engine_arg="--trust-remote-code")
    assert arguments(asked)[-1] == "--trust-remote-code"
    assert "are executed" in reason(asked, "remote_code")


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_STARTUP_PLAN", "VLLM_CPU_KVCACHE_SPACE"])
def test_a_variable_that_contradicts_the_plan_is_10(name: str) -> None:
    error = refused(ConfigError, ADA, environment={name: "1"})
    assert error.exit_code == 10
    assert name in error.message
    if name != "VLLM_CPU_KVCACHE_SPACE":
        assert best(ADA, environment={name: "0"}).context


def test_variables_are_honoured_or_named_and_never_lost() -> None:
    given = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_API_KEY": "secret", "PATH": "/bin"}
    plan = best(ADA, environment=given)
    assert launch(plan).variables == (("VLLM_USE_DEEP_GEMM", "0"),)
    named = {choice.name: choice for choice in plan.choices}
    assert named["variables"].value == "VLLM_USE_DEEP_GEMM=0"
    assert named["vllm_api_key"].is_refusal
    assert not any("secret" in f"{choice.value} {choice.reason}" for choice in plan.choices)


def test_variables_of_the_network_reach_the_engine_on_one_host() -> None:
    given = {"NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo", "UCX_TLS": "tcp", "NCCLX": "1"}
    plan = best("2x4090", "qwen3-8b", environment=given)
    passed = dict(launch(plan).variables)
    assert passed == {name: value for name, value in given.items() if name != "NCCLX"}
    assert "NCCL_P2P_DISABLE=1" in next(choice.value for choice in plan.choices if choice.name == "variables")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("VLLM_ENABLE_STARTUP_PLAN", "0", "it is off without it"),
        ("VLLM_HOST_IP", "10.0.0.9", "127.0.0.1"),
        ("VLLM_LOGGING_PREFIX", "[n] ", "the log is read"),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "the log is read"),
        ("VLLM_USE_RUST_FRONTEND", "1", "the Python frontend only"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "of a library"),
        ("TORCHINDUCTOR_CACHE_DIR", "/elsewhere", "of a library"),
    ],
)
def test_a_variable_that_is_not_passed_on_is_named(name: str, value: str, why: str) -> None:
    plan = best(ADA, environment={name: value})
    (said,) = (choice for choice in plan.choices if choice.name == name.lower())
    assert (said.value, said.is_refusal) == ("not passed on", True)
    assert why in said.reason
    assert name not in dict(launch(plan).variables)


@given(st.dictionaries(st.sampled_from(["VLLM_A", "VLLM_PORT", "NCCL_DEBUG", "UCX_A", "TORCH_A", "HOME"]), st.text()))
def test_every_variable_of_the_engine_is_passed_on_or_named(given: dict[str, str]) -> None:
    plan = best(ADA, environment=given)
    named = {choice.name.upper() for choice in plan.choices if choice.value == "not passed on"}
    assert named | dict(launch(plan).variables).keys() == {name for name, value in given.items() if value} - {"HOME"}


def test_the_caches_tokens_are_predicted_as_vllm_counts_them() -> None:
    """Seen on vllm-cpu 0.32.0 under the appliance: 257 blocks, 32,896 tokens, with a context of 8,192."""
    spaces = space(CPU, "smollm2-135m")
    plan = spaces.best
    assert (launch(plan).blocks, plan.context, spaces.kv_tokens(plan)) == (257, 8192, 32_896)


def test_the_images_own_cache_folder_is_nothing_that_a_user_asked_for() -> None:
    """The image sets this variable for users who run the engine by hand."""

    def names(where: str) -> set[str]:
        return {choice.name for choice in best(ADA, environment={"VLLM_CACHE_ROOT": where}).choices}

    build_id = inputs(hardware(ADA), folder_model("qwen3-8b-fp8"), {}).image.build_id
    assert "vllm_cache_root" not in names(f"/data/cache/{build_id}/vllm")
    assert "vllm_cache_root" in names("/elsewhere")
    assert "vllm_cache_root" in names("/data/cache/another/vllm")


@pytest.mark.parametrize("seqs", [1, 4, 7, 64, 256])
def test_graphs_are_captured_for_every_step_of_few_users(seqs: int) -> None:
    sizes = graph_sizes(seqs)
    assert sizes[0] == 1
    assert sizes[-1] <= max(2, 2 * seqs)
    assert any(size >= seqs for size in sizes)
    assert list(sizes) == sorted(set(sizes))


def test_graphs_take_what_the_sizes_that_are_served_take() -> None:
    def graphs_mib(sizes: list[int] | None) -> float:
        config = json.dumps({"cudagraph_capture_sizes": sizes} if sizes else {"cudagraph_mode": "FULL_AND_PIECEWISE"})
        found = best(ADA, engine_arg=f"--compilation-config '{config}'", parallel="4")
        return found.placement.shares[0].memory.output

    assert graphs_mib([1, 2, 4, 8]) == graphs_mib(None)
    assert graphs_mib([1]) < graphs_mib(None) < graphs_mib(list(range(1, 65)))


def test_what_moves_the_compile_key() -> None:
    plans = space(SERVER, "qwen3-30b-a3b").all()
    assert len({compile_key(plan) for plan in plans}) == len({plan.key for plan in plans})
    first = plans[0]
    later = space(SERVER, "qwen3-30b-a3b").now(first, replace_allocated(first.placement.shares[0].memory.kv - 100))
    assert isinstance(later, Plan)
    assert compile_key(later) == compile_key(first), "bytes of the cache are no part of it"


def test_what_the_user_passes_through_moves_the_compile_key_and_is_named() -> None:
    plain = best(ADA)
    argued = best(ADA, engine_arg="--enforce-eager --max-logprobs 5")
    told = best(ADA, environment={"VLLM_USE_AOT_COMPILE": "1"})
    assert len({compile_key(plan) for plan in (plain, argued, told)}) == 3
    assert compile_parts(argued)["engine_args"] == ["--max-logprobs", "5"]
    assert compile_parts(told)["variables"] == [("VLLM_USE_AOT_COMPILE", "1")]


def test_quantized_weights_on_the_cpu_are_said_to_be_the_engines_business() -> None:
    found = reason(best(CPU, replace(folder_model("smollm2-135m"), config=AWQ)), "quantization")
    assert found.startswith("its kernels on the CPU are unknown to the planner")


@pytest.mark.parametrize(("peers", "said"), [(((1,), (0,)), "NVLink"), (((), ()), "PCIe")])
def test_links_between_ranks_are_said(peers: tuple[tuple[int, ...], ...], said: str) -> None:
    plan = best(cards(TURINGS, *({"nvlink_peers": each} for each in peers)), "qwen3.6-27b-awq")
    assert launch(plan).tensor_parallel == 2
    assert next(choice.value for choice in plan.choices if choice.name == "links") == said


def test_tensor_parallel_takes_a_linked_pair_before_the_first_two() -> None:
    pairs = cards(TURINGS, *({"nvlink_peers": (peer,)} for peer in (3, 2, 1, 0)))
    plan = best(pairs, "qwen3.6-27b-awq", engine_arg="--tensor-parallel-size 2")
    assert [share.gpu.index for share in plan.placement.shares] == [0, 3]
    assert next(choice.value for choice in plan.choices if choice.name == "links") == "NVLink"


def test_tensor_parallel_takes_cards_of_one_kind_before_those_with_most_room() -> None:
    two_kinds = cards(
        TURINGS, {"name": "odd", "vram_free_mib": 22500}, {}, {"name": "odder", "vram_free_mib": 22400}, {}
    )
    plan = best(two_kinds, "qwen3.6-27b-awq", engine_arg="--tensor-parallel-size 2")
    assert [share.gpu.index for share in plan.placement.shares] == [1, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("machine", [ADA, TURINGS, "4x2080ti-22g", SERVER, "4070+3060", "24+8"])
def test_all_plans_fit_and_are_different(machine: str) -> None:
    here = space(machine)
    plans = here.all()
    assert plans[0] == here.best
    assert len({plan.key for plan in plans}) == len(plans) > 1
    for plan in plans:
        for share in plan.placement.shares:
            assert share.memory.total <= share.gpu.free_mib + 0.1
        assert here.costs(plan).gpu_ms > 0
        assert plan.context <= here.native


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-parallel-size 2",
        "--gpu-memory-utilization 0.5",
        "--attention-backend TRITON_ATTN",
        '--compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'',
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(words: str) -> None:
    error = refused(ConfigError, CPU, "smollm2-135m", engine_arg=words)
    assert error.message.startswith("setting engine_arg asks for what needs a GPU")
    assert words.split()[0] in error.message


@pytest.mark.parametrize(
    ("machine", "model", "name", "said"),
    [
        (TURINGS, "qwen3.6-27b-awq", "FLASH_ATTN", "is not for this model on SM 75: 'FLASH_ATTN'"),
        (ADA, "qwen3-8b", "FLASHMLA", "is not for this model on SM 89: 'FLASHMLA'"),
        (ADA, "qwen3-8b", "BOGUS", "this engine has not: 'BOGUS'"),
        ("h200", "deepseek-v2-lite", "TRITON_ATTN", "is not for this model"),
    ],
)
def test_attention_that_the_engine_would_refuse_is_10_before_it_starts(
    machine: str, model: str, name: str, said: str
) -> None:
    error = refused(ConfigError, machine, model, engine_arg=f"--attention-backend {name}")
    assert said in error.message
    assert (error.hint or "").startswith("one of ")


def test_attention_that_the_chip_has_is_passed_on() -> None:
    assert value_of(best(ADA, "qwen3-8b", engine_arg="--attention-backend FLASHINFER"), "--attention-backend")


@pytest.mark.parametrize("asked", [1, 1 << 40])
def test_bytes_of_a_cache_that_cannot_be_are_10_with_those_that_can(asked: int) -> None:
    error = refused(ConfigError, ADA, "qwen3-8b-fp8", engine_arg=f"--kv-cache-memory-bytes {asked}", ctx_size="4096")
    assert f"{asked:,} bytes (flag --engine-arg)" in error.message
    least, most = (int(word.replace(",", "")) for word in re.findall(r"[0-9,]{9,}", error.hint or ""))
    for enough in (least, most):
        words = f"--kv-cache-memory-bytes {enough}"
        assert best(ADA, "qwen3-8b-fp8", engine_arg=words, ctx_size="4096").context == 4096
    refused(ConfigError, ADA, "qwen3-8b-fp8", engine_arg=f"--kv-cache-memory-bytes {least - 1}", ctx_size="4096")


def test_measuring_tries_other_blocks_of_plain_attention_alone() -> None:
    def asked(machine: str, model: str, **flags: Any) -> set[int | None]:
        return {launch(plan).asked_block_size for plan in space(machine, model, **flags).all()}

    assert asked(ADA, "qwen3-8b-fp8") == {None, 32}
    assert asked(CPU, "smollm2-135m") == {None, 64}
    assert asked(ADA, "qwen3-8b-fp8", engine_arg="--block-size 64") == {64}
    assert asked(TURINGS, "qwen3.6-27b-awq") == {None}, "linear attention raises them"


def test_no_more_stages_than_layers_are_tried() -> None:
    shape = shape_of(folder_model("smollm2-135m"))
    two = replace(shape, kinds=shape.kinds[:2])
    found = list(layouts(two, [22_000.0] * 32, (0.0, 0.0), tensor=None, pipeline=None))
    assert max(layout.pipeline for layout in found) <= 2


def test_a_model_that_does_not_fit_is_31_with_its_sizes() -> None:
    error = refused(ModelDoesNotFitError, "t4", "qwen3-8b")
    assert error.exit_code == 31
    assert "weights" in error.message
    assert "missing are" in error.message
    short = refused(ModelDoesNotFitError, CPU, "qwen3-8b")
    assert "on the host" in short.message


def test_a_context_that_does_not_fit_names_the_longest_that_does() -> None:
    model = "llama-3.3-70b-awq"
    error = refused(ModelDoesNotFitError, "2x4090", model, ctx_size="131072")
    longest = int((error.hint or "").split("--ctx-size ")[1].split(",")[0])
    assert best("2x4090", model, ctx_size=str(longest)).context == longest


def test_speculation_counts_its_layers_and_states() -> None:
    plain, drafting = (space(TURINGS, "qwen3.6-27b-awq", speculation=kind) for kind in ("off", "mtp"))
    plan = drafting.predicted
    assert json.loads(value_of(plan, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert plan.context < plain.predicted.context
    assert plan.placement.shares[0].memory.weights > plain.best.placement.shares[0].memory.weights
    assert [offer.kind for offer in space(TURINGS, "qwen3.6-27b-awq").offers()] == ["mtp", "ngram"]


def test_speculation_that_the_model_has_not_is_10() -> None:
    with pytest.raises(ConfigError, match="no draft layers"):
        space(ADA, speculation="mtp").offers()


def test_on_the_cpu_bytes_are_given_at_once() -> None:
    plan = best(CPU, "smollm2-135m")
    assert launch(plan).utilization is None
    assert int(value_of(plan, "--kv-cache-memory-bytes")) == launch(plan).blocks * 2_949_120
    assert "--enforce-eager" in arguments(plan)
    assert "--compilation-config" not in arguments(plan)
    assert "--attention-backend" not in arguments(plan)


@given(
    total=st.integers(4096, 200_000),
    free=st.floats(0.0, 1.0),
    more=st.integers(0, 100_000),
    seqs=st.sampled_from((1, 4, 64)),
)
def test_memory_is_never_planned_above_what_is_free(total: int, free: float, more: int, seqs: int) -> None:
    """More free memory never gives a smaller context."""

    def at(mib: int) -> Plan | None:
        there = with_cards(ADA, vram_total_mib=total + more, vram_free_mib=mib)
        try:
            return best(there, parallel=str(seqs))
        except ModelDoesNotFitError:
            return None

    first = at(int(total * free))
    if first is not None:
        share = first.placement.shares[0]
        assert share.memory.total + share.gpu.held_back_mib <= total * free + 0.1
        assert (launch(first).utilization or 0.0) * (total + more) <= total * free
        second = at(int(total * free) + more)
        assert second is not None
        assert second.context >= first.context


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": 10**9},
        {"num_key_value_heads": 0},
        {"num_attention_heads": "nine"},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 18},
        {"head_dim": -1},
    ],
)
def test_a_lying_config_is_30(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "m", "smollm2-135m", **change)
    with pytest.raises(ModelUnreadableError) as caught:
        best(CPU, read_model(folder, serves="safetensors"))
    assert caught.value.exit_code == 30
    assert "config.json" in caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_num_value_heads": 10**9}, "linear_num_value_heads must be a whole number"),
        ({"linear_num_key_heads": None}, "it has no linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 3}, "must name 64 layers, and names 3"),
        ({"layer_types": ["linear_attention", "mystery"] * 32}, "not known beside linear attention: mystery"),
    ],
)
def test_a_hybrid_that_lies_is_30(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = write_folder(tmp_path / "m", "qwen3.6-27b-awq", **change)
    with pytest.raises(ModelUnreadableError) as caught:
        best(TURINGS, read_model(folder, serves="safetensors"))
    assert said in caught.value.message


def test_kv_heads_that_contradict_the_heads_are_30_before_any_ranks_are_tried(tmp_path: Path) -> None:
    """9 heads and 2 KV heads: vLLM asserts it in each attention layer, after half a minute of imports."""
    folder = write_folder(tmp_path / "m", "smollm2-135m", num_key_value_heads=2)
    with pytest.raises(ModelUnreadableError) as caught:
        best("2x4090", read_model(folder, serves="safetensors"), engine_arg="--tensor-parallel-size 2")
    assert "its 9 attention heads cannot share 2 KV heads" in caught.value.message


def test_kv_heads_that_ranks_cannot_share_leave_those_out() -> None:
    """24 heads and 6 KV heads on four cards: 6 is neither divisible by 4 nor the other way round."""
    model = replace(folder_model("qwen3-8b"), heads=24, kv_heads=(6,) * 36)
    plan = best("4x2080ti-22g", model)
    assert launch(plan).tensor_parallel != 4
    error = refused(ConfigError, "4x2080ti-22g", model, engine_arg="--tensor-parallel-size 4")
    assert "6 KV heads are neither divisible by 4 nor the other way round" in error.message
    assert error.hint == "this model allows 1, 2, 3, 6, 12"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("model", "GGUF files are"), ("model.gguf", "GGUF files are"), ("model.safetensors", "give its folder: ")],
)
def test_a_folder_that_is_a_file_is_30(name: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text("{}")
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(file, serves="safetensors")
    assert caught.value.exit_code == 30
    assert "this image serves folders of safetensors" in caught.value.message
    assert hint in (caught.value.hint or "")
