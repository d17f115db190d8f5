"""Each rule of the engines' endings by lines that its source prints (tests/endings/lines.yaml)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.endings import Rule, meaning
from appliance.engines.llama.process import ending_rules as llama_rules
from appliance.engines.llama.process import endings as llama
from appliance.engines.llama.process import log as llama_log
from appliance.engines.vllm.process import ending_rules as vllm_rules
from appliance.engines.vllm.process import endings as vllm
from appliance.engines.vllm.process import log as vllm_log
from appliance.errors import EngineError, FatalError
from appliance.supervisor import Crash
from appliance.supervisor.log import Log

FOLDER = Path(__file__).parents[2] / "endings"
LINES: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load((FOLDER / "lines.yaml").read_text(encoding="utf-8"))
ENDINGS: dict[str, tuple[ModuleType, ModuleType, tuple[Rule, ...], str]] = {
    "llama": (llama, llama_log, llama_rules.RULES, "0.12.345.678 E "),
    "vllm": (vllm, vllm_log, vllm_rules.RULES, "(EngineCore pid=117) ERROR 11-22 12:00:40 [core.py:1583] "),
}
CASES = [
    pytest.param(engine, name, row, id=f"{engine}-{name}-{row['says'][:40]}")
    for engine, rules in LINES.items()
    for name, rows in rules.items()
    for row in rows
]


def ended(engine: str, *lines: str, is_bare: bool = False, served: bool = False, **how: Any) -> FatalError:
    """Return the error of an engine that ended after these lines, kept in the way that a supervisor keeps them."""
    endings, log_module, _, mark = ENDINGS[engine]
    log = Log(log_module.is_error)
    if served:
        log.mark_ready()
    log.feed("".join(f"{'' if is_bare else mark}{line}\n" for line in lines).encode())
    log.close()
    end = {"exit_code": None if "signal" in how else 1, "signal": None} | how
    crash = Crash(first_error=log.first_error(), log=log.lines, was_ready=served, seconds=1.0, **end)
    found: FatalError = endings.as_error(crash)
    return found


def test_each_rule_has_a_source_and_a_line_of_it() -> None:
    for engine, (_, _, rules, _) in ENDINGS.items():
        assert {rule.name for rule in rules} == set(LINES[engine])
        assert all(rule.source and rule.remedy for rule in rules)
        assert all(row["source"] for rows in LINES[engine].values() for row in rows)


@pytest.mark.parametrize(("engine", "name", "row"), CASES)
def test_a_line_is_understood_by_its_rule_alone(engine: str, name: str, row: dict[str, Any]) -> None:
    rules = ENDINGS[engine][2]
    found = meaning(row["says"], rules) or meaning(row["says"], rules, vague=True)
    assert found
    assert found.name == name
    error = ended(engine, row["says"], is_bare=row.get("bare", False))
    assert error.exit_code == row["code"]
    assert error.hint == found.remedy
    assert isinstance(error, EngineError) and error.was_memory if row["code"] in (41, 42) else True


@pytest.mark.parametrize(("engine", "name", "row"), CASES)
def test_while_serving_it_is_45_and_memory_only_if_it_was_before(engine: str, name: str, row: dict[str, Any]) -> None:
    error = ended(engine, row["says"], is_bare=row.get("bare", False), served=True)
    assert error.exit_code == 45
    assert isinstance(error, EngineError)
    assert not error.was_memory or row["code"] in (41, 42)
    assert "restart policy" in (error.hint or "")


HARMLESS = [
    (engine, warned)
    for line in (FOLDER / "harmless.lines").read_text(encoding="utf-8").splitlines()
    for engine, _, warned in [line.partition(": ")]
    if engine in ENDINGS
]
WARNING = {"llama": "0.12.345.001 W ", "vllm": "(EngineCore pid=117) WARNING 11-22 12:00:39 [a.py:1] "}
OTHER_CAUSES = [
    (engine, row)
    for engine, rules in LINES.items()
    for name, rows in rules.items()
    for row in rows
    if not any(each.is_vague for each in ENDINGS[engine][2] if each.name == name) and row["code"] not in (41, 42)
]


@pytest.mark.parametrize("engine", ENDINGS)
@pytest.mark.parametrize("served", [False, True])
def test_what_an_engine_warns_of_and_goes_on_from_is_no_memory_that_ran_out(engine: str, *, served: bool) -> None:
    warnings = [warned for name, warned in HARMLESS if name == engine]
    assert len(warnings) > 50
    reasons = ("alpha", "Cannot allocate memory", "out of memory")
    marked = [WARNING[engine] + warned.replace("alpha", reason) for warned in warnings for reason in reasons]
    for line in (*warnings, *marked):
        error = ended(engine, line, is_bare=True, served=served)
        assert (line, error.exit_code) == (line, 45 if served else 43)
        assert isinstance(error, EngineError)
        assert (line, error.was_memory) == (line, False)


@given(st.sampled_from(OTHER_CAUSES), st.data())
def test_a_warning_changes_no_ending(cause: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    engine, row = cause
    warnings = st.sampled_from([words for name, words in HARMLESS if name == engine])
    before, after = (data.draw(st.lists(warnings, max_size=3)) for _ in range(2))
    mark = "" if row.get("bare") else ENDINGS[engine][3]
    lines = (*(WARNING[engine] + each for each in before), mark + row["says"])
    alone = ended(engine, mark + row["says"], is_bare=True)
    among = ended(engine, *lines, *(WARNING[engine] + each for each in after), is_bare=True)
    assert (type(among), among.hint) == (type(alone), alone.hint)
    assert among.exit_code == row["code"]


def test_a_pinned_buffer_is_named_no_error_and_no_cause() -> None:
    pinned = "ggml_cuda_host_malloc: failed to allocate 1900,00 MiB of pinned memory: invalid argument"
    why = "0.12.345.678 E llama_model_load: error loading model: unknown model architecture: 'foo'"
    error = ended("llama", pinned, why, is_bare=True)
    assert error.exit_code == 30
    assert "pinned" not in error.message


def test_the_last_refused_allocation_counts() -> None:
    said = (
        "alloc_buffer: allocating {} MiB on device {}: cudaMalloc failed: out of memory",
        "ggml_gallocr_reserve_n_impl: failed to allocate CUDA{} buffer of size {}",
    )
    retry = "0.12.345.678 W sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism"
    first = (said[0].format("51748,72", 1), said[1].format(1, 54262464512))
    second = (said[0].format("1024,00", 0), said[1].format(0, 1073741824))
    for between in ((), (retry,)):
        lines = (*(f"0.12.345.678 E {line}" for line in first), *between, *(f"0.12.345.678 E {x}" for x in second))
        error = ended("llama", *lines, is_bare=True)
        assert isinstance(error, EngineError)
        assert (error.exit_code, error.needed_mib, error.device) == (41, 1024.0, "CUDA0")
    assert ended("llama", *(f"0.12.345.678 E {line}" for line in first), retry, is_bare=True).exit_code == 43


def test_what_is_said_after_a_refused_allocation_counts_more() -> None:
    refused = "ggml_aligned_malloc: insufficient memory (attempted to allocate 8791.88 MB)"
    other = "llama_model_load: error loading model: unknown model architecture: 'foo'"
    assert ended("llama", refused, other).exit_code == 30
    assert (
        ended("llama", refused, "llama_model_load: error loading model: unable to allocate CPU buffer").exit_code == 42
    )


CORE = ENDINGS["vllm"][3]


def test_what_vllm_falls_back_from_is_no_cause() -> None:
    """logger.exception of model_loader/weight_cache/ipc_loader.py: its traceback ends in an error, too."""
    mark = "(EngineCore pid=117) ERROR 11-22 12:00:20 [ipc_loader.py:264] "
    mended = (
        f"{mark}Weight cache IPC loading failed; falling back to disk loading",
        f"{mark}Traceback (most recent call last):",
        f"{mark}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    )
    assert ended("vllm", *mended, is_bare=True).exit_code == 43
    real = f"{CORE}KeyError: 'layers.0.mlp.gate.weight'"
    assert ended("vllm", *mended, real, is_bare=True).exit_code == 30
    assert ended("vllm", f"{CORE}torch.OutOfMemoryError: CUDA out of memory.", *mended, is_bare=True).exit_code == 41


@pytest.mark.parametrize(
    ("below", "code", "remedy"),
    [
        ("Cuda failure 802 'system not yet initialized'", 23, "nvidia-fabricmanager"),
        ("Cuda failure 'uncorrectable ECC error encountered'", 23, "nvidia-smi -q -d ECC"),
        ("socketStartConnect: Connect to 10.0.0.2 failed", 23, "dmesg | grep Xid"),
    ],
)
def test_what_stands_below_a_cause_belongs_to_it(below: str, code: int, remedy: str) -> None:
    lines = (
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "Last error:",
        below,
    )
    error = ended("vllm", *lines)
    assert error.exit_code == code
    assert remedy in (error.hint or "")


def test_a_name_below_tells_of_a_text_that_a_later_release_words_anew() -> None:
    below = "Search for `cudaErrorSystemNotReady' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    error = ended("vllm", "torch.AcceleratorError: CUDA error: the fabric is not there yet", below)
    assert "nvidia-fabricmanager" in (error.hint or "")


def test_why_no_gpu_was_found_is_taken_from_the_warning_above() -> None:
    """torch warns (CUDAFunctions.cpp device_count), and vLLM ends over what follows from it."""
    warned = (
        "/opt/vllm/lib/torch/cuda/__init__.py:184: UserWarning: CUDA initialization: Unexpected error from "
        "cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already "
        "set an error? Error 802: system not yet initialized (Triggered internally at /pytorch/CUDAFunctions.cpp:119.)"
    )
    end = "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`"
    assert "fabricmanager" in (ended("vllm", warned, end, is_bare=True).hint or "")
    old = "x.py:1: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12080)."
    assert ended("vllm", old, end, is_bare=True).exit_code == 21
    assert ended("vllm", warned, "ValueError: something else", is_bare=True).exit_code == 43


def test_a_bare_assertion_is_told_by_what_was_asserted() -> None:
    frames = (
        'File "/opt/vllm/lib/vllm/model_executor/parameter.py", line 150, in load_column_parallel_weight',
        "    assert self.data.shape == loaded_weight.shape",
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    )
    assert ended("vllm", *frames, "AssertionError").exit_code == 30
    assert ended("vllm", "    assert self.intermediate_tensors is not None", "AssertionError").exit_code == 43


@pytest.mark.parametrize(
    ("number", "code", "remedy"), [(4, 22, "older CPU"), (7, 43, "--shm-size"), (11, 43, "last lines")]
)
def test_a_process_of_vllm_that_a_signal_ended(number: int, code: int, remedy: str) -> None:
    line = f"Worker proc VllmWorker-1 died unexpectedly (exit code: -{number}), shutting down executor."
    error = ended("vllm", line)
    assert error.exit_code == code
    assert remedy in (error.hint or "")


def test_a_torch_rank_in_front_hides_no_cause() -> None:
    line = "[rank0]: torch.AcceleratorError: CUDA error: an illegal instruction was encountered"
    assert ended("vllm", line, is_bare=True).exit_code == 23


def test_a_bus_error_has_a_remedy() -> None:
    error = ended("llama", "0.00.000.001 I loading", is_bare=True, signal=7)
    assert error.exit_code == 43
    assert "dmesg" in (error.hint or "")
