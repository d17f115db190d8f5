"""Endings of vLLM, kept in tests/endings, and what must be made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.vllm.process.endings import as_error, cause_of, shortage_of
from appliance.engines.vllm.process.log import is_error, is_worth_showing, parse_line
from appliance.errors import EngineDiedError, EngineError, EngineHostMemoryError, EngineNotReadyError
from appliance.plan import Shortage
from appliance.supervisor import Crash
from appliance.supervisor.log import Log
from tests.endings.kept import crash_of

FOLDER = Path(__file__).parents[3] / "endings"
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "vllm.yaml").read_text(encoding="utf-8"))
MEMORY = {name for name, row in INDEX.items() if row["code"] in (41, 42) or row.get("was_memory")}
BEFORE = {name: row for name, row in INDEX.items() if not row.get("was_ready")}
ULIMIT = (
    "(APIServer pid=1) WARNING 11-22 12:00:02 [system_utils.py:255] Found ulimit of 20000 and failed to automatically "
    "increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] "
    "Too many open files`. Consider increasing with ulimit -n"
)


def text_of(name: str) -> str:
    return (FOLDER / f"vllm-{name}.log").read_text(encoding="utf-8")


def read(name: str, **changes: Any) -> Crash:
    """The kept ending as a supervisor would tell it."""
    row = {**INDEX[name], **changes}
    log = Log(is_error)
    before, mark, after = text_of(name).partition("INFO:     Application startup complete.\n")
    log.feed((before + mark).encode())
    if row.get("was_ready"):
        log.mark_ready()
    log.feed(after.encode())
    log.close()
    return crash_of(row, log)


def crash(*log: str, **changes: Any) -> Crash:
    first_error = next((line for line in log if is_error(line)), None)
    return replace(Crash(exit_code=1, signal=None, first_error=first_error, log=log, seconds=1.0), **changes)


def test_every_kept_log_is_in_the_index_and_every_row_has_its_log() -> None:
    assert {path.stem.removeprefix("vllm-") for path in FOLDER.glob("vllm-*.log")} == set(INDEX)
    for name, row in INDEX.items():
        assert ("run" in row) != ("source" in row), name
        assert ("exit_code" in row) != ("signal" in row), name
        assert row["remedy"], name


@pytest.mark.parametrize("name", INDEX)
def test_an_ending_is_of_its_class_with_its_cause_and_remedy(name: str) -> None:
    row, found = INDEX[name], as_error(read(name))
    assert found.exit_code == row["code"]
    assert row.get("says", "") in found.message
    assert row["remedy"] in (found.hint or "")
    assert found.log == read(name).log


@pytest.mark.parametrize("name", [name for name, row in INDEX.items() if "from" in row and "oom_kills" not in row])
def test_the_cause_is_said_by_the_deepest_process_and_is_never_the_last_line(name: str) -> None:
    row, ending = INDEX[name], read(name)
    rule, line = cause_of(ending) or pytest.fail("no rule knows it")
    assert row["says"] in line
    assert parse_line(line).process == row["from"]
    assert rule.remedy
    assert line != ending.log[-1] or not row["from"]  # the API server fails last, for what others said


@pytest.mark.parametrize("name", INDEX)
def test_only_real_memory_is_called_memory_with_what_the_log_tells_of_it(name: str) -> None:
    row, ending = INDEX[name], read(name)
    found = as_error(ending)
    assert (isinstance(found, EngineError) and found.was_memory) == (name in MEMORY)
    shortage = shortage_of(found, text_of(name).splitlines())
    if "needed_mib" not in row:
        assert shortage is None
        return
    assert shortage
    assert shortage.refused_mib == pytest.approx(row["needed_mib"], abs=0.01)
    assert shortage.free_mib == pytest.approx(row.get("free_mib"))
    assert (shortage.device, shortage.context) == (row.get("device"), row.get("context"))
    assert shortage.is_whole == (name == "cuda-less-free"), "only vLLM's look at the card comes before any buffer"


@pytest.mark.parametrize("name", INDEX)
@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_served_died_while_serving_whatever_its_code_says(name: str, exit_code: int) -> None:
    found = as_error(read(name, exit_code=exit_code, signal=None), served=True)
    assert type(found) is EngineDiedError
    assert found.exit_code == 45
    assert found.was_memory == (name in MEMORY)
    assert "restart policy" in (found.hint or "")


@pytest.mark.parametrize("name", BEFORE)
def test_whatever_it_said_the_stall_timer_ended_it(name: str) -> None:
    found = as_error(read(name, stalled=True))
    assert type(found) is EngineNotReadyError
    assert not found.was_memory


@pytest.mark.parametrize("name", BEFORE)
def test_a_cause_that_left_the_kept_lines_still_counts(name: str) -> None:
    ending = read(name)
    if INDEX[name].get("oom_kills") or INDEX[name].get("needs_frames"):
        return
    shortened = replace(ending, log=ending.log[-1:])
    kept = [line for line in (ending.first_error, *shortened.log) if line and parse_line(line).is_cause]
    expected = INDEX[name]["code"] if any(INDEX[name].get("says", " ") in line for line in kept) else 43
    assert as_error(shortened).exit_code == expected


def test_a_warning_on_every_start_is_no_error() -> None:
    assert not is_error(ULIMIT)
    assert not is_worth_showing(ULIMIT)
    assert as_error(crash(ULIMIT)).exit_code == 43


def test_a_shallow_process_is_believed_only_where_the_deeper_ones_say_nothing() -> None:
    api = "(APIServer pid=1) ERROR 11-22 12:00:02 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried"
    worker = "(Worker_TP1 pid=9) ERROR 11-22 12:00:02 [a.py:1] ValueError: FP8 KV cache is not supported by the x"
    assert as_error(crash(api)).exit_code == 41
    assert as_error(crash(api, worker)).exit_code == 40
    assert as_error(crash(worker, api)).exit_code == 40


def test_a_line_that_is_marked_as_no_error_is_no_cause() -> None:
    line = "(EngineCore pid=9) {} 11-22 12:00:02 [a.py:1] torch.OutOfMemoryError: CUDA out of memory."
    assert [as_error(crash(line.format(level))).exit_code for level in ("INFO", "WARNING", "ERROR")] == [43, 43, 41]


def test_colours_hide_nothing() -> None:
    line = "\x1b[0;36m(EngineCore pid=9)\x1b[0;0m \x1b[31mERROR\x1b[0m 11-22 12:00:02 [a.py:1] ValueError: x"
    assert parse_line(line).process == "EngineCore"
    assert is_error(line)


@pytest.mark.parametrize("exit_code", ["-9", "None"])  # None: vLLM looked before it was there
@pytest.mark.parametrize(
    ("oom_kills", "code", "hint"), [(1, 42, "more memory"), (0, 43, "not the reason"), (None, 43, "dmesg")]
)
def test_a_process_that_was_killed_is_memory_only_by_the_kernels_count(
    oom_kills: int | None, code: int, hint: str, exit_code: str
) -> None:
    died = f"Worker proc VllmWorker-0 died unexpectedly (exit code: {exit_code}), x"
    line = f"(EngineCore pid=9) ERROR 11-22 12:00:02 [a.py:1] {died}"
    for ending in (crash(line, oom_kills=oom_kills), crash(exit_code=None, signal=9, oom_kills=oom_kills)):
        found = as_error(ending)
        assert (found.exit_code, isinstance(found, EngineHostMemoryError)) == (code, code == 42)
        assert hint in (found.hint or "")


def test_errors_of_single_requests_are_no_cause_of_a_later_end() -> None:
    old = "(APIServer pid=1) ERROR 11-22 12:00:02 [a.py:1] torch.OutOfMemoryError: CUDA out of memory."
    new = "(Worker pid=9) ERROR 11-22 12:09:02 [a.py:1] AssertionError"
    found = as_error(crash(old, new, first_error=new, was_ready=True))
    assert isinstance(found, EngineDiedError)
    assert not found.was_memory


def test_the_context_is_taken_as_the_engine_computed_it() -> None:
    said = (
        "(EngineCore pid=9) ERROR 11-22 12:00:02 [core.py:1] ValueError: To serve at least one request with the model's"
        " max seq len (8192), (0.18 GiB KV cache is needed, which is larger than the available KV cache memory "
        "(0.02 GiB). Based on the available memory, the estimated maximum model length is 768. Try increasing"
    )
    found = shortage_of(as_error(crash(said)), (said,))
    assert found
    assert replace(found, refused_mib=0.0) == Shortage(refused_mib=0.0, context=768)
    assert found.refused_mib == pytest.approx(163.84)


@given(st.one_of(st.none(), st.text(alphabet="abcdefg :", max_size=60)))
def test_what_is_not_understood_is_43_and_never_memory(line: str | None) -> None:
    found = as_error(crash(*([line] if line else []), first_error=line))
    assert type(found) is EngineNotReadyError
    assert not found.was_memory


@given(st.lists(st.text(max_size=60), max_size=8), st.integers(0, 8))
def test_no_log_makes_it_fail(lines: list[str], first: int) -> None:
    ending = crash(*lines, first_error=lines[first] if first < len(lines) else None)
    assert as_error(ending).log == tuple(lines)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/data/cache/b1/vllm/modelinfos/a.json", 43),
        ("/data/cache/b1/inductor/fx/a.bin", 43),
        ("/vol/cache/b1/flashinfer/a.json", 43),
        ("/data/models/cache/model.safetensors", 30),
        ("/root/.cache/huggingface/hub/models--a--b/snapshots/1/vllm/config.json", 30),
        ("/data/models/vllm/config.json", 30),
    ],
)
def test_a_file_that_is_gone_is_the_model_s_only_where_the_model_is(path: str, code: int) -> None:
    line = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
    assert as_error(crash(f"(EngineCore pid=9) ERROR 11-22 12:00:40 [core.py:1583] {line}")).exit_code == code


CORE = "(EngineCore pid=117) ERROR 11-22 12:00:40 [core.py:1583] "
GONE = (
    "(APIServer pid=17) WARNING 11-22 12:00:41 [core_client.py:688] [shutdown] MPClient: engine core exited "
    "unexpectedly"
)


@pytest.mark.parametrize(
    ("line", "code", "remedy"),
    [
        pytest.param(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            41,
            "smaller --ctx-size",
            id="cuBLAS",
        ),
        pytest.param(
            "x:211:211 [0] init.cc:87 NCCL WARN Cuda failure 2 'out of memory'", 41, "smaller --ctx-size", id="NCCL"
        ),
        pytest.param(
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 98304, Hardware limit: "
            "65536. Reducing block sizes or `num_stages` may help.",
            43,
            "--attention-backend",
            id="Triton",
        ),
        pytest.param(
            "TimeoutError: RPC call to sample_tokens timed out.", 43, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", id="RPC"
        ),
        pytest.param(
            "OSError: [Errno 28] No space left on device: '/data/cache/b/vllm/x'", 50, "volume is full", id="volume"
        ),
        pytest.param("OSError: [Errno 28] No space left on device: '/tmp/x'", 43, "last lines", id="not the volume"),
        pytest.param("ValueError: invalid literal for int() with base 10: 'lm_head'", 43, "last lines", id="no number"),
        pytest.param(
            "ImportError: This modeling file requires the following packages that were not found in your environment: "
            "flash_attn. Run `pip install flash_attn`",
            30,
            "another upload",
            id="code of the model",
        ),
    ],
)
def test_a_line_of_the_engine_is_its_cause(line: str, code: int, remedy: str) -> None:
    found = as_error(crash(line if "NCCL" in line else CORE + line, GONE))
    assert found.exit_code == code
    assert remedy in (found.hint or "")
    assert isinstance(found, EngineError) is (code >= 40 and code < 50)
    assert getattr(found, "was_memory", False) is (code == 41)


def test_what_a_client_sent_is_no_memory_that_ran_out() -> None:
    sent = "(APIServer pid=17) ERROR 11-22 12:00:40 [serving.py:1] ValueError: CUDA out of memory. Tried to allocate"
    served = as_error(crash(sent, GONE, was_ready=True))
    assert isinstance(served, EngineDiedError)
    assert not served.was_memory
    real = as_error(crash(sent, CORE + "torch.OutOfMemoryError: CUDA out of memory.", GONE, was_ready=True))
    assert isinstance(real, EngineDiedError)
    assert real.was_memory
