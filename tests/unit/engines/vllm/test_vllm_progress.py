"""The ladder of a start, what was found in the compile cache, what was allocated: from lines of the real log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.process.log import is_error, is_fatal, is_waiting, is_worth_showing
from appliance.engines.vllm.startup.progress import CompileCache, Stage, compile_cache, parse_allocated, step_of

LOG = (Path(__file__).parents[3] / "data/vllm/start-0.32-cpu.log").read_text(encoding="utf-8").splitlines()
# Of GPUs, from the formats of 0.33.0: compilation/backends.py, decorators.py, v1/worker/gpu_model_runner.py.
CORE = "(EngineCore pid=117) INFO 11-22 12:00:40 [backends.py:1126] "
ROOT = "/data/cache/b1/vllm"
GRAPHS = "from the cache, took 0.812 s"
COLD = (
    f"{CORE}Starting torch.compile",
    f"{CORE}Using cache directory: {ROOT}/torch_compile_cache/0a1b2c3d4e/rank_0_0/backbone for vLLM's torch.compile",
    f"{CORE}Dynamo bytecode transform time: 3.21 s",
    f"{CORE}Compiling a graph for compile range (1, 2048) takes 10.11 s",
    f"{CORE}torch.compile took 13.40 s in total",
)
WARM = (COLD[1], f"{CORE}Directly load the compiled graph(s) for compile range (1, 2048) {GRAPHS}")
AOT = f"{ROOT}/torch_compile_cache/torch_aot_compile/5f0e1d2c3b4a5f0e1d2c3b4a/rank_0_0/model"
AOT_HIT = (f"{CORE}Directly load AOT compilation from path {AOT}",)
AOT_MISS = (f"{CORE}Compiling model again due to a load failure from {AOT}, reason: Compile cache file corrupted.",)


def test_the_ladder_of_a_real_start_is_climbed_in_its_order() -> None:
    stages = [step.stage for line in LOG if (step := step_of(line))]
    assert list(dict.fromkeys(stages)) == ["bind", "imports", "weights", "profile", "warm-up", "first token"]
    words = [step.words for line in LOG if (step := step_of(line))]
    assert "imports: version 0.32.0 is imported" in words
    assert "weights: file 1 of 1" in words
    assert "profile: room for 32,768 tokens" in words


# Of a part of a model, and of a line in which another process wrote: neither begins as a whole line does.
@given(
    line=st.sampled_from((*COLD, *WARM, *AOT_HIT, *AOT_MISS, *LOG)),
    before=st.sampled_from(("", "[backbone] ", "{", "(Worker pid=9) ")) | st.text(max_size=8),
    after=st.text(max_size=8),
)
def test_a_line_with_anything_around_it_breaks_nothing_and_says_the_same_of_the_cache(
    line: str, before: str, after: str
) -> None:
    mark, found, text = line.partition("] ")
    step, garbled = step_of(line), step_of(f"{mark}{found}{before}{text}{after}")
    assert (garbled and garbled.facts.get("cache")) == (step and step.facts.get("cache"))


def test_nothing_of_a_good_start_is_an_error() -> None:
    assert [line for line in LOG if is_error(line)] == []


def test_what_is_as_it_should_be_is_not_shown() -> None:
    shown = [line for line in LOG if is_worth_showing(line)]
    assert [line.partition("] ")[2].partition(".")[0] for line in shown] == ["libtcmalloc is not found in LD_PRELOAD"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (COLD, CompileCache(is_hit=False, key="0a1b2c3d4e", seconds=13.4)),
        (WARM, CompileCache(is_hit=True, key="0a1b2c3d4e")),
        (AOT_HIT, CompileCache(is_hit=True, key="5f0e1d2c3b")),
        (AOT_MISS, CompileCache(is_hit=False, key="5f0e1d2c3b", reason="Compile cache file corrupted.")),
        ((*WARM, COLD[3]), CompileCache(is_hit=False, key="0a1b2c3d4e")),
        (
            (AOT_MISS[0].replace("Compiling", "[backbone] Compiling"),),
            CompileCache(is_hit=False, key="5f0e1d2c3b", reason="Compile cache file corrupted."),
        ),
        (LOG, CompileCache()),
    ],
)
def test_what_a_start_found_in_its_compile_cache(lines: tuple[str, ...], found: CompileCache) -> None:
    assert compile_cache(lines) == found


def test_each_step_of_compiling_says_its_key_or_its_outcome() -> None:
    words = [step.words for line in (*COLD, *WARM[1:]) if (step := step_of(line)) and step.stage == Stage.COMPILE]
    assert words == [
        "compile: the model is being compiled, or taken from the cache",
        "compile: key 0a1b2c3d4e",
        "compile: traced in 3.21 s",
        "compile: cache miss, 10.11 s",
        "compile: 13.40 s",
        "compile: cache hit",
    ]


def test_graphs_and_memory_of_a_gpu() -> None:
    lines = (
        "(Worker_TP0 pid=2) INFO 11-22 12:00:40 [a.py:1] Model loading took 4.50 GiB memory and 3.802113 seconds",
        "(Worker_TP1 pid=3) INFO 11-22 12:00:40 [a.py:1] Model loading took 4.50 GiB memory and 3.802113 seconds",
        "(EngineCore pid=1) INFO 11-22 12:00:40 [a.py:1] Available KV cache memory: 2.00 GiB",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  51%|#####     | 2/4 [00:00<00:00]",
        "(Worker_TP0 pid=2) INFO 11-22 12:00:40 [a.py:1] Graph capturing finished in 2 secs, took 0.25 GiB",
    )
    allocated = parse_allocated(lines)
    assert (allocated.model, allocated.kv, allocated.compute) == (9216.0, 2048.0, 256.0)
    assert [step.words for line in lines[3:] if (step := step_of(line))] == ["graphs: 51 %", "graphs: captured in 2 s"]


def test_bytes_that_were_given_are_told_in_words_of_their_own() -> None:
    """Workers on GPUs log this line: v1/worker/gpu_worker.py:657 of 0.33.0."""
    line = (
        "(EngineCore pid=117) INFO 11-22 12:00:40 [gpu_worker.py:657] Initial free memory 78.2 GiB, reserved 2.00 GiB "
        "memory for KV Cache as specified by kv_cache_memory_bytes config and skipped memory profiling."
    )
    assert parse_allocated((line,)).kv == 2048.0


def test_the_cache_is_told_in_tokens_exactly() -> None:
    allocated = parse_allocated(LOG)
    assert (allocated.model, allocated.kv_tokens) == (0.0, 32_768)
    assert (parse_allocated(()).kv_tokens, parse_allocated(("KV cache size: 3 tokens",)).kv_tokens) == (0, 0)


def test_the_wait_of_one_process_for_another_is_neither_work_nor_an_error() -> None:
    line = "(EngineCore pid=1) INFO 11-22 12:00:40 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds."  # noqa: E501
    assert is_waiting(line)
    assert step_of(line) is None
    assert not is_error(line)
    assert not is_waiting(LOG[0])


@given(st.text(max_size=200))
def test_an_unknown_line_is_no_error(line: str) -> None:
    step = step_of(line)
    assert step is None or step.stage in set(Stage)


@pytest.mark.parametrize(
    "words",
    [
        "INFO 11-22 12:00:40 [logger.py:1] Received request: prompt: 'engine core exited unexpectedly'",
        "ERROR 11-22 12:00:40 [x.py:1] TemplateError: Worker proc VllmWorker-0 died unexpectedly",
        "Worker proc VllmWorker-0 died unexpectedly",
    ],
)
def test_what_a_client_says_ends_no_engine(words: str) -> None:
    assert not is_fatal(f"(APIServer pid=1) {words}")
    assert not is_fatal(words)


def test_a_lost_process_does() -> None:
    core = "(APIServer pid=1) WARNING 11-22 23:40:27 [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; bye"  # noqa: E501
    worker = "(EngineCore pid=2) ERROR 11-22 23:47:29 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"  # noqa: E501
    assert is_fatal(core)
    assert is_fatal(worker)
