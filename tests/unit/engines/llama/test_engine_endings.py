"""Real endings, kept in tests/endings, and what must be made of them."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.process.endings import as_error, shortage_of
from appliance.engines.llama.process.log import is_error
from appliance.errors import EngineDiedError, EngineError, EngineHostMemoryError, EngineNotReadyError, FatalError
from appliance.plan import Shortage
from appliance.supervisor import Crash
from appliance.supervisor.log import Log
from tests.endings.kept import crash_of

FOLDER = Path(__file__).parents[3] / "endings"
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "index.yaml").read_text(encoding="utf-8"))
MEMORY = {name for name, row in INDEX.items() if row["code"] in (41, 42) or row.get("was_memory")}


def read(name: str, **changes: Any) -> Crash:
    """The kept ending as a supervisor would tell it."""
    row = {**INDEX[name], **changes}
    log = Log(is_error)
    log.feed((FOLDER / f"{name}.txt").read_bytes())
    log.close()
    return crash_of(row, log)


def crash(first_error: str | None, **changes: Any) -> Crash:
    log = ("begin", first_error, "end") if first_error else ("begin", "end")
    return replace(Crash(exit_code=1, signal=None, first_error=first_error, log=log, seconds=1.0), **changes)


def test_every_kept_log_is_in_the_index_and_every_row_has_its_log() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(INDEX)
    for name, row in INDEX.items():
        assert ("run" in row) != ("source" in row), name
        assert ("exit_code" in row) != ("signal" in row), name


@pytest.mark.parametrize("name", INDEX)
def test_a_real_ending_is_what_it_was(name: str) -> None:
    row, found = INDEX[name], as_error(read(name))
    assert found.exit_code == row["code"]
    assert row.get("says", "") in found.message
    assert found.log == read(name).log
    assert row.get("hint", "") in (found.hint or "")
    assert found.hint


@pytest.mark.parametrize("name", INDEX)
def test_only_real_memory_steps_down_and_to_what_the_log_says(name: str) -> None:
    found = as_error(read(name))
    assert (isinstance(found, EngineError) and found.was_memory) == (name in MEMORY)
    needed_mib = found.needed_mib if isinstance(found, EngineError) else None
    assert needed_mib == pytest.approx(INDEX[name].get("needed_mib"))


@pytest.mark.parametrize("name", INDEX)
def test_whatever_it_said_what_served_died_while_serving(name: str) -> None:
    found = as_error(read(name), served=True)
    assert found.exit_code == 45
    assert isinstance(found, EngineDiedError)
    assert found.was_memory == (name in MEMORY)
    assert "restart policy" in (found.hint or "")


@pytest.mark.parametrize("name", INDEX)
def test_whatever_it_said_the_stall_timer_ended_it(name: str) -> None:
    found = as_error(read(name, stalled=True, was_ready=False))
    assert type(found) is EngineNotReadyError
    assert not found.was_memory


@pytest.mark.parametrize(
    ("oom_kills", "kind", "words", "hint"),
    [
        (1, EngineHostMemoryError, "killed by SIGKILL (by the kernel's memory killer)", "more memory"),
        (0, EngineNotReadyError, "and not by the kernel's memory killer", "memory was not the reason"),
        (None, EngineNotReadyError, "it may be the kernel's memory killer", "dmesg"),
    ],
)
def test_a_plain_sigkill_is_memory_only_by_the_kernels_count(
    oom_kills: int | None, kind: type[FatalError], words: str, hint: str
) -> None:
    killed = crash("E failed to allocate buffer of size 9", exit_code=None, signal=9, oom_kills=oom_kills)
    found = as_error(killed)
    assert type(found) is kind
    assert words in found.message
    assert hint in (found.hint or "")
    assert isinstance(found, EngineError)
    assert found.was_memory == (kind is EngineHostMemoryError)


def test_a_count_without_a_kill_of_the_engine_is_no_evidence() -> None:
    """The counter belongs to the whole control group: the killed process may have been a shell of `docker exec`."""
    assert as_error(crash("error: invalid argument: --x", oom_kills=1)).exit_code == 40
    assert as_error(crash(None, oom_kills=1)).exit_code == 43


@pytest.mark.parametrize(
    ("first_error", "code"),
    [
        ("0.00.000.100 E error: unknown argument: --foo", 40),
        ("llama-server: /lib/libm.so.6: version `GLIBC_2.99' not found (required by libllama.so)", 44),
        ("terminate called after throwing an instance of 'std::bad_alloc'", 42),
        ("0.01.000.000 E llama_model_load: error loading model: mmap failed: Cannot allocate memory", 42),
        ("0.01.000.000 E gguf_init_from_file: read error: Invalid argument", 30),  # the kernel's words, not a bad flag
        ("0.01.000.000 E alloc_tensor_range: failed to allocate CUDA_Host buffer of size 1048576", 42),
        ("0.01.000.000 E alloc_tensor_range: failed to allocate CUDA1 buffer of size 1048576", 41),
        ("0.01.000.000 E CUDA error: an illegal memory access was encountered", 23),
        (None, 43),
    ],
)
def test_words(first_error: str | None, code: int) -> None:
    assert as_error(crash(first_error)).exit_code == code


def test_a_cause_that_left_the_kept_lines_still_counts() -> None:
    gone = crash("0.00.000.100 E error: invalid argument: --x", log=("0.09.000.000 E out of memory", "end"))
    assert as_error(gone).exit_code == 40


def test_a_linkers_words_that_look_like_no_error_are_read() -> None:
    said = "/opt/llama/llama-server: /lib/libc.so.6: version `GLIBC_2.99' not found (required by libllama.so)"
    assert as_error(crash(None, log=(said,))).exit_code == 44
    assert as_error(crash(None, log=("0.00.000.001 W out of memory",))).exit_code == 43


def test_a_line_that_is_marked_as_no_error_is_no_cause() -> None:
    log = ("0.01.000.000 E something new", "0.01.000.001 I retried: out of memory", "0.01.000.002 D failed to allocate")
    assert as_error(crash(log[0], log=log)).exit_code == 43


def test_the_line_that_decides_is_named_when_it_is_not_the_first() -> None:
    found = as_error(read("cuda-no-kernel-image"))
    assert found.message.endswith("; the cause is 0.03.120.105 E CUDA error: no kernel image is available for "
                                  "execution on the device")  # fmt: skip


@given(st.one_of(st.none(), st.text(alphabet="abcdefg :", max_size=60)))
def test_what_is_not_understood_is_43_and_never_memory(first_error: str | None) -> None:
    found = as_error(crash(first_error))
    assert type(found) is EngineNotReadyError
    assert not found.was_memory


@given(st.lists(st.text(max_size=60), max_size=8), st.integers(0, 8))
def test_no_log_makes_it_fail(lines: list[str], first: int) -> None:
    log = tuple(lines)
    first_error = log[first] if first < len(log) else None
    assert as_error(crash(first_error, log=log)).log == log


@pytest.mark.parametrize("name", INDEX)
def test_only_a_load_that_lacked_so_much_memory_tells_a_shortage(name: str) -> None:
    row, crash_ = INDEX[name], read(name)
    found = shortage_of(as_error(crash_), crash_.log)
    if row["code"] not in (41, 42) or "needed_mib" not in row:
        assert found is None
        return
    device = {"cuda-weights": "CUDA0", "cuda-compute-buffers": "CUDA1"}.get(name)
    assert found
    assert found.refused_mib == pytest.approx(row["needed_mib"])
    assert replace(found, refused_mib=1.0) == Shortage(refused_mib=1.0, device=device)
    assert (row["code"] == 41) is (device is not None)


def test_what_was_free_on_that_gpu_when_the_engine_began() -> None:
    """The first line about a GPU counts: a draft model that is loaded later finds less free memory."""
    using = "0.00.0{}0.001 I llama_model_load_from_file_impl: using device CUDA{} (NVIDIA H200) (0:0) - {} MiB free"
    lines = [using.format(1, 0, 142566), using.format(1, 1, 20000), using.format(9, 1, 300), "nothing of that kind"]
    found = shortage_of(as_error(read("cuda-compute-buffers")), lines)
    assert found == Shortage(refused_mib=40000.0, device="CUDA1", free_mib=20000.0)
    assert shortage_of(as_error(read("allocation-of-kv-cache")), lines) == Shortage(refused_mib=8791.88)


def test_a_gpu_that_is_not_named_tells_no_shortage() -> None:
    found = as_error(crash("0.01.000.000 E CUDA error: out of memory, allocating a buffer of size 1048576"))
    assert (found.exit_code, found.needed_mib if isinstance(found, EngineError) else None) == (41, 1.0)
    assert shortage_of(found, ()) is None


@pytest.mark.parametrize("oom_kills", [None, 0])
def test_one_that_stalled_was_killed_by_us_and_not_by_somebody(oom_kills: int | None) -> None:
    found = as_error(crash(None, exit_code=None, signal=signal.SIGKILL, stalled=True, oom_kills=oom_kills))
    assert "--stall-timeout-s" in (found.hint or "")
    assert "killed" not in (found.hint or "")
    killed = as_error(crash(None, exit_code=None, signal=signal.SIGKILL, oom_kills=oom_kills))
    assert "it was killed" in (killed.hint or "")
    assert ("dmesg" in (killed.hint or "")) == (oom_kills is None)
