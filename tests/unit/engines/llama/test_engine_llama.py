from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.engine import Install
from appliance.engines.llama.planning.arguments.loader_check import Projection
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import (
    parse_facts,
    parse_flags,
    parse_kv_pairs,
    parse_kv_types,
    parse_split_modes,
    query_facts,
)
from appliance.engines.llama.process.fit import parse_projection, query_projections
from appliance.engines.llama.process.server import (
    arguments,
    command,
    environment,
    is_worth_showing,
    parse_allocated,
    placement_arguments,
)
from appliance.errors import EngineArgumentsError, EngineLibraryError
from appliance.image_facts import EngineFacts
from appliance.plan import Allocated, GpuAllocation, Memory, Placement, Plan, with_launch
from appliance.settings import resolve_settings
from tests.builders import ENGINE, IMAGE, SMALL, USAGE, device, machine

SOCKET = Path("/tmp/appliance-7.sock")
VERSION = "version: 0.5.0-dev (build 11312, commit 0c1e57098)"
OPTIONAL = (
    "--kv-unified",
    "--load-mode",
    "--offline",
    "--no-ui",
    "--log-prefix",
    "--log-colors",
)
NEEDED = (
    "--model",
    "--alias",
    "--host",
    "--fit",
    "--ctx-size",
    "--cache-type-k",
    "--cache-type-v",
    "--flash-attn",
    "--threads",
    "--threads-batch",
    "--batch-size",
    "--ubatch-size",
    "--parallel",
    "--cache-ram",
    "--log-verbosity",
)


def chosen(**flags: str) -> Plan:
    given_flags = {"ctx_size": "4096", "threads": "3", "ubatch": "256", "cache_ram_mib": "300", **flags}
    return Space(resolve_settings(given_flags, {}), IMAGE, ENGINE, machine(), SMALL).best


def without(*flags: str) -> EngineFacts:
    return replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if flag not in flags))


def test_the_whole_argument_list_of_one_plan() -> None:
    line = (
        "--model /data/models/small.gguf --alias small --host /tmp/appliance-7.sock --fit off --ctx-size 4096"
        " --cache-type-k f16 --cache-type-v f16 --flash-attn on --threads 3 --threads-batch 3 --batch-size 2048"
        " --ubatch-size 256 --parallel 4 --kv-unified --cache-ram 300 --load-mode mmap --offline --no-ui"
        " --log-prefix --log-colors off --log-verbosity 4"
    )
    assert arguments(chosen(), ENGINE, SOCKET) == tuple(line.split())


@given(
    st.sampled_from(["f16", "q8_0"]), st.integers(256, 8192), st.integers(1, 64), st.sampled_from(["16", "512", "4096"])
)
def test_fit_is_always_off(kv_type: str, context: int, threads: int, ubatch: str) -> None:
    found = chosen(kv_type=kv_type, ctx_size=str(context), threads=str(threads), ubatch=ubatch)
    argv = arguments(found, without(*OPTIONAL), SOCKET)
    assert argv[argv.index("--fit") + 1] == "off"
    assert all(isinstance(word, str) for word in argv)


@pytest.mark.parametrize("flag", OPTIONAL)
def test_a_flag_that_is_good_to_have_is_left_out_with_its_value(flag: str) -> None:
    full = arguments(chosen(), ENGINE, SOCKET)
    less = arguments(chosen(), without(flag), SOCKET)
    at = full.index(flag)
    width = 1 if full[at + 1].startswith("--") else 2
    assert less == full[:at] + full[at + width :]


@pytest.mark.parametrize("flag", NEEDED)
def test_a_flag_that_is_needed_and_missing_is_refused_before_the_start(flag: str) -> None:
    with pytest.raises(EngineArgumentsError, match=f"engine has no flag {flag}: llama-server build 11312") as caught:
        arguments(chosen(), without(flag), SOCKET)
    assert caught.value.exit_code == 40
    assert "rebuild it" in (caught.value.hint or "")


WITH_CUDA = replace(ENGINE, backends=("libggml-cpu-haswell.so", "libggml-cuda.so"))


def placed(*layers: int, experts: int = 0, split: str = "layer") -> Plan:
    memory = Memory(weights=1.0, kv=1.0, compute=1.0, output=0.0, cache=0.0, overhead=0.0)
    shares = tuple(
        GpuAllocation(
            gpu=device(f"GPU-{at}", free_mib=9.0),
            device=f"CUDA{at}",
            layers=n,
            memory=memory,
        )
        for at, n in enumerate(layers)
    )
    return replace(chosen(), placement=Placement(shares=shares, cpu_expert_layers=experts, split_mode=split))


@pytest.mark.parametrize(
    ("plan_", "line"),
    [
        (
            placed(20, 11, experts=7),
            "--device CUDA0,CUDA1 --gpu-layers 31 --split-mode layer --tensor-split 20,11 --main-gpu 0 --n-cpu-moe 7",
        ),
        (
            placed(31, split="none"),
            "--device CUDA0 --gpu-layers 31 --split-mode none --tensor-split 31 --main-gpu 0",
        ),
        (placed(), "--device none"),
    ],
)
def test_placement_is_all_explicit_or_none_of_it(plan_: Plan, line: str) -> None:
    assert placement_arguments(plan_, WITH_CUDA) == tuple(line.split())
    assert line in " ".join(arguments(plan_, WITH_CUDA, SOCKET))


def test_an_engine_without_gpus_is_told_nothing_of_them() -> None:
    assert placement_arguments(placed(), ENGINE) == ()


@pytest.mark.parametrize("flag", ["--device", "--gpu-layers", "--split-mode", "--tensor-split", "--n-cpu-moe"])
def test_half_a_placement_is_refused(flag: str) -> None:
    facts = replace(WITH_CUDA, flags=tuple(known for known in WITH_CUDA.flags if known != flag))
    with pytest.raises(EngineArgumentsError, match=f"engine has no flag {flag}"):
        placement_arguments(placed(20, 11, experts=7), facts)


def test_gpus_are_named_by_what_they_are_in_the_plans_order() -> None:
    found = environment(placed(20, 11), Path("/opt/llama"), Path("/data/cache/b1"))
    assert found == environment(chosen(), Path("/opt/llama"), Path("/data/cache/b1")) | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "CUDA_CACHE_PATH": "/data/cache/b1/cuda",
    }


def test_a_library_path_is_only_for_the_driver_and_begins_with_the_engines_own_folder() -> None:
    folders = Path("/opt/llama"), Path("/data/cache/b1"), Path("/usr/local/nvidia/lib64")
    found = environment(placed(20, 11), *folders)
    assert found["LD_LIBRARY_PATH"] == "/opt/llama:/usr/local/nvidia/lib64"
    assert "LD_LIBRARY_PATH" not in environment(chosen(), *folders)  # no GPU, and no driver to be found


def test_context_checkpoints_are_said_only_where_a_model_needs_them() -> None:
    assert "--ctx-checkpoints" not in arguments(chosen(), ENGINE, SOCKET)
    argv = arguments(with_launch(chosen(), checkpoints=5), ENGINE, SOCKET)
    assert argv[argv.index("--ctx-checkpoints") + 1] == "5"


def test_split_modes_are_read_from_the_recorded_help() -> None:
    assert parse_split_modes(USAGE) == ("none", "layer", "row", "tensor")
    assert parse_split_modes("--device N   a device\n") == ()
    assert ENGINE.split_modes == parse_split_modes(USAGE)


def test_a_projection_is_read_from_what_fit_params_prints() -> None:
    text = "CUDA0 9727 2686 1106 \nCUDA1 10125 2686 1110 \nHost 273 0 268 \n"
    found = parse_projection(text)
    assert found == Projection(devices=((9727, 2686, 1106), (10125, 2686, 1110)), host=(273, 0, 268))
    assert parse_projection("CUDA0 9727 2686 1106 \n") is None  # cut off


@given(st.text(max_size=200))
def test_any_text_is_a_projection_or_none(text: str) -> None:
    found = parse_projection(text)
    assert found is None or len(found.host) == 3


def test_fit_params_is_asked_with_the_plans_own_placement(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program(
        tmp_path / "llama-fit-params",
        f'echo "$@" "$CUDA_VISIBLE_DEVICES" > {asked}; echo "CUDA0 1 2 3"; echo "Host 4 5 6 "',
    )
    with_cuda = Install(engine_dir=tmp_path, facts=WITH_CUDA, cache_dir=tmp_path)
    first, second = query_projections((placed(31, split="none"), placed()), with_cuda, budget_s=30.0)
    assert first == second == Projection(devices=((1, 2, 3),), host=(4, 5, 6))
    assert "--fit-print on --device none" in asked.read_text()
    install = Install(engine_dir=tmp_path, facts=ENGINE, cache_dir=tmp_path)
    assert query_projections((placed(),), replace(install, engine_dir=tmp_path / "none"), budget_s=9.0) == (None,)
    program(tmp_path / "llama-fit-params", "echo 'Host 4 5 6'; exit 1")
    assert query_projections((placed(),), install, budget_s=9.0) == (None,)
    assert query_projections((placed(),), install, budget_s=-1.0) == (None,)


def test_the_child_gets_a_small_environment_and_its_limits() -> None:
    install = Install(
        engine_dir=Path("/opt/llama"), facts=ENGINE, cache_dir=Path("/data/cache/b1"), stall_timeout_s=7.0
    )
    found = command(chosen(), install, SOCKET)
    assert found.argv[0] == "/opt/llama/llama-server"
    assert dict(found.environment) == {"PATH": "/usr/bin:/bin", "HOME": "/data/cache/b1/home", "LANG": "C.UTF-8"}
    assert (found.socket_path, found.stall_timeout_s) == (SOCKET, 7.0)


async def test_readiness_is_false_where_nothing_listens(tmp_path: Path) -> None:
    install = Install(engine_dir=tmp_path, facts=ENGINE, cache_dir=tmp_path)
    found = command(chosen(), install, tmp_path / "no.sock")
    assert await found.is_ready() is False


BUFFERS = (
    "0.00.070.001 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB",
    "0.00.071.002 I load_tensors:   CPU_REPACK model buffer size =    40.90 MiB",
    "0.00.085.607 I llama_kv_cache:        CPU KV buffer size =    90.00 MiB",
    "0.00.090.110 I sched_reserve:        CPU compute buffer size =    17.51 MiB",
    "0.00.084.300 I llama_context:        CPU  output buffer size =     0.75 MiB",
)


def test_buffer_sizes_are_read_from_the_log() -> None:
    noise = ("0.00.085.608 I llama_kv_cache: size =   90.00 MiB (  4096 cells,  30 layers)", "buffer size", "")
    found = parse_allocated((*noise, *BUFFERS))
    assert found == Allocated(model=133.0, kv=90.0, compute=17.51, output=0.75, repacked=40.9)
    assert found.total == pytest.approx(241.26)
    assert parse_allocated(line.split(" I ", 1)[1] for line in BUFFERS) == found  # without its prefix too


ON_GPUS = (
    "I load_tensors:   CPU_Mapped model buffer size =   273.00 MiB",
    "I load_tensors:        CUDA0 model buffer size =  9727.10 MiB",
    "I load_tensors:        CUDA1 model buffer size = 10125.20 MiB",
    "I llama_context:  CUDA_Host  output buffer size =     3.79 MiB",
    "I llama_kv_cache:      CUDA0 KV buffer size =  2560.00 MiB",
    "I llama_memory_recurrent:      CUDA1 RS buffer size =   126.00 MiB",
    "I sched_reserve:      CUDA0 compute buffer size =  1106.00 MiB",
    "I sched_reserve:  CUDA_Host compute buffer size =   268.00 MiB",
)


def test_buffers_of_gpus_and_states_are_told_apart() -> None:
    found = parse_allocated(ON_GPUS)
    assert dict(found.devices) == pytest.approx({"CUDA0": 13393.1, "CUDA1": 10251.2})  # and pinned memory is the host's
    assert found.recurrent == 126.0
    assert found.total == pytest.approx(24189.09)


def test_a_drafts_buffer_that_is_sized_anew_counts_once() -> None:
    """A small model with a draft layer, as b11312 logged it at -lv 4."""
    lines = """\
0.00.027.767 I llama_kv_cache:        CPU KV buffer size =     2.50 MiB
0.00.032.260 I sched_reserve:        CPU compute buffer size =     3.65 MiB
0.00.035.125 I llama_kv_cache:        CPU KV buffer size =     0.62 MiB
0.00.036.792 I sched_reserve:        CPU compute buffer size =     3.19 MiB
0.00.038.078 I spec common_specu: adding speculative implementation 'draft-mtp'
0.00.040.530 I sched_reserve:        CPU compute buffer size =     3.19 MiB""".splitlines()
    found = parse_allocated(lines)
    assert (found.kv, found.compute) == (pytest.approx(3.12), pytest.approx(6.84))


@given(st.lists(st.text(max_size=80)))
def test_no_log_makes_it_fail_but_one_that_says_sizes(lines: list[str]) -> None:
    assert parse_allocated(lines) == Allocated()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("0.00.085.607 W llama_context: n_ctx_seq (4096) < n_ctx_train (8192)", True),
        ("0.00.085.607 E srv  load_model: failed", True),
        ("error: invalid argument: --foo", True),
        ("0.00.085.607 I srv  load_model: W E warning error", False),
        ("0.00.085.607 D anything", False),
        ("E", False),
        ("", False),
        # As build 11312 printed them: the same prompt twice, and a client that left while it was answered.
        (
            "0.00.626.984 W slot   operator(): id  0 | task 5 | need to evaluate at least 1 token for each active slot "
            "(n_past = 45, task.n_tokens() = 45)",
            False,
        ),
        ("0.00.626.985 W slot   operator(): id  0 | task 5 | n_past was set to 44", False),
        ("0.01.991.196 W srv          stop: cancel task, id_task = 28", False),
        ("0.00.016.289 W srv  llama_server: security: no API key is set and CORS allows all origins (see …)", False),
        # A prompt that is too long is refused and cancelled: the refusal stays.
        ("0.50.899.328 E srv    send_error: task id = 131, error: request (30001 tokens) exceeds …", True),
        ("0.50.899.408 W srv          stop: cancel task, id_task = 131", False),
        (
            "0.00.128.947 W llama_adapter_lora_init_impl: lora for 'blk.0.attn_q.weight' cannot use buft 'AMX', "
            "fallback to CPU",
            False,
        ),
        # Of others that read alike nothing is kept back.
        ("0.01.991.196 E srv          stop: cancel task, id_task = 28", True),
        ("0.01.991.196 W srv          stop: cancel task, id_task = 28, which is not there", True),
    ],
)
def test_warnings_and_errors_are_worth_showing(line: str, shown: bool) -> None:
    assert is_worth_showing(line) is shown


def test_flags_are_read_from_the_recorded_help() -> None:
    flags = parse_flags(USAGE)
    assert {*NEEDED, *OPTIONAL} <= set(flags)
    assert {"-m", "-c", "-fa", "-fit", "-no-kvu", "-ctk"} <= set(flags)
    assert flags == tuple(sorted(set(flags)))
    assert all(flag.startswith("-") and " " not in flag and "," not in flag for flag in flags)
    assert len(flags) > 200
    assert "-----" not in "".join(flags)


def test_words_in_a_description_are_no_flags() -> None:
    usage = (
        "-a,    --one N            as --two does, or -b\n                          see --three\n--four, --five  [x]\n"
    )
    assert parse_flags(usage) == ("--five", "--four", "--one", "-a")


def test_kv_types_are_read_from_the_recorded_help() -> None:
    assert parse_kv_types(USAGE) == ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def test_facts_hold_version_build_and_commit() -> None:
    facts = parse_facts(
        version=f"ggml_backend_load_best: x\n{VERSION}\nbuilt with GNU", usage=USAGE, backends=("a.so",)
    )
    assert (facts.version, facts.build, facts.commit) == ("0.5.0-dev", 11312, "0c1e57098")
    assert facts.backends == ("a.so",)


@pytest.mark.parametrize(
    ("version", "usage", "words"),
    [
        ("", USAGE, "names no version: ''"),
        ("version: unknown", USAGE, "names no version"),
        (VERSION, "", "lists no flags"),
        (VERSION, "usage: server\n", "lists no flags"),
        (VERSION, "-m, --model FNAME    the model\n", "lists no KV cache types"),
    ],
)
def test_garbage_is_refused_while_the_image_is_built(version: str, usage: str, words: str) -> None:
    with pytest.raises(EngineArgumentsError, match=words):
        parse_facts(version=version, usage=usage)


@given(st.text(max_size=300))
def test_any_text_is_facts_or_a_refusal(usage: str) -> None:
    try:
        parse_facts(version=VERSION, usage=usage)
    except EngineArgumentsError as error:
        assert "lists no" in error.message  # noqa: PT017 - either outcome is right


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_binary_is_asked_for_its_facts(tmp_path: Path) -> None:
    help_file = Path(__file__).parents[3] / "data/llama-server-help.txt"
    (tmp_path / "libggml-cpu-haswell.so").touch()
    (tmp_path / "libggml-base.so").touch()
    body = f'case "$1" in --version) echo "{VERSION}" >&2;; --help) cat {help_file};; *) exit 9;; esac'
    facts = query_facts(program(tmp_path / "llama-server", body))
    assert facts == replace(ENGINE, backends=("libggml-cpu-haswell.so",), cpu_variants=facts.cpu_variants)
    assert [variant.name for variant in facts.cpu_variants] == ["haswell"]


def test_a_binary_that_does_not_run_is_44_with_its_words(tmp_path: Path) -> None:
    binary = program(tmp_path / "llama-server", "echo 'error while loading shared libraries: libx.so' >&2; exit 127")
    with pytest.raises(EngineLibraryError, match=r"exit code 127: error while loading shared libraries: libx\.so"):
        query_facts(binary)


def test_pairs_of_kv_types_are_what_the_engine_was_compiled_for() -> None:
    types = ("f16", "q8_0", "q4_0")
    assert parse_kv_pairs("", types) == ()
    assert parse_kv_pairs("q8_0-q8_0;q8_0-q4_0", types) == (("q8_0", "q8_0"), ("q8_0", "q4_0"))


@pytest.mark.parametrize("text", ["q8_0", "q8_0-q9_9", "bf16-bf16", "q8_0-q8_0;;x-f16"])
def test_a_pair_that_the_engine_does_not_offer_is_refused(text: str) -> None:
    with pytest.raises(EngineArgumentsError, match="no such pair of KV types"):
        parse_kv_pairs(text, ("f16", "q8_0", "q4_0"))
