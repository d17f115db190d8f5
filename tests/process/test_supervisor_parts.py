"""What the supervisor is made of, without a process: lines, words, transitions, /proc."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.process.log import is_error
from appliance.supervisor import Crash, State
from appliance.supervisor.log import KEPT_LINES, MAX_LINE_BYTES, Log
from appliance.supervisor.reaper import parse_stat, query_process
from appliance.supervisor.state import TRANSITIONS, IllegalTransitionError, checked
from appliance.supervisor.supervisor import Restart


@pytest.mark.parametrize(
    "line",
    [
        "0.00.014.824 E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file or directory)",
        "error: invalid argument: --bad-flag",
        "CUDA error: out of memory",
        'error while handling argument "-ctk": Unsupported cache type: q9',
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "Illegal instruction (core dumped)",
        "llama-server: error while loading shared libraries: x.so: cannot open shared object file: No such file",
        "ValueError: No supported config format found",
        "(EngineCore pid=7) ERROR 11-21 10:00:00 core.py:1] EngineCore failed to start",
    ],
)
def test_it_looks_like_an_error(line: str) -> None:
    assert is_error(line)


@pytest.mark.parametrize(
    "line",
    [
        "0.00.001.000 I srv  load_backend: failed to find a better one, which is fine",
        "0.00.001.000 W srv  llama_server: security: no API key is set",
        "INFO 11-21 10:00:00 model loaded with no error",
        "",
    ],
)
def test_it_looks_like_no_error(line: str) -> None:
    assert not is_error(line)


def test_the_first_error_outlives_the_kept_lines_before_readiness_only() -> None:
    log = Log(is_error)
    log.feed(b"error: the cause\n" + b"later\n" * 1000)
    assert log.first_error() == "error: the cause"
    assert len(log.lines) == KEPT_LINES
    log.feed(b"error: of a request\n")
    log.mark_ready()
    assert log.first_error() is None
    log.feed(b"served\n" * 1000 + b"error: at the end\n")
    assert log.first_error() == "error: at the end"


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_pieces_do_not_matter(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    seen: list[str] = []
    log = Log(is_error, seen.append)
    for chunk in chunks:
        log.feed(chunk)
    log.close()
    lines = whole.split(b"\n")
    expected = lines[:-1] if lines[-1] == b"" else lines
    assert seen == [line.decode("utf-8", "replace").rstrip("\r") for line in expected]
    assert log.count == len(seen)


def test_a_line_without_end_is_cut() -> None:
    log = Log(is_error)
    for _ in range(100):
        log.feed(b"x" * 1000)
    log.feed(b"\xff\nnext\n")
    assert log.lines == ("x" * MAX_LINE_BYTES, "next")


@pytest.mark.parametrize(
    ("crash", "words"),
    [
        (
            Crash(exit_code=1, signal=None, first_error="error: bad flag", seconds=0.1),
            "exited with code 1 before it was ready: error: bad flag",
        ),
        (
            Crash(exit_code=None, signal=signal.SIGKILL, first_error=None, was_ready=True, seconds=2.5),
            "was killed by SIGKILL (sent from outside: it may be the kernel's memory killer) while serving, "
            "after 2.5 s",
        ),
        (
            Crash(exit_code=None, signal=signal.SIGKILL, first_error=None, seconds=0.1, oom_kills=1),
            "was killed by SIGKILL (by the kernel's memory killer) before it was ready",
        ),
        (
            Crash(exit_code=None, signal=signal.SIGKILL, first_error=None, seconds=0.1, oom_kills=0),
            "was killed by SIGKILL (sent from outside, and not by the kernel's memory killer) before it was ready",
        ),
        (
            Crash(exit_code=None, signal=signal.SIGILL, first_error=None, seconds=0.1),
            "was killed by SIGILL (illegal instruction: this CPU lacks one that the program uses) before it was ready",
        ),
        (
            Crash(exit_code=None, signal=60, first_error=None, seconds=0.1),
            "was killed by signal 60 before it was ready",
        ),
        (
            Crash(exit_code=None, signal=signal.SIGTERM, first_error=None, seconds=0.1),
            "was killed by SIGTERM before it was ready",
        ),
        (
            Crash(exit_code=None, signal=9, first_error=None, stalled=True, seconds=120.0),
            "made no progress (no log line, no CPU time) and was killed 120.0 s after its start, before it was ready",
        ),
        (
            Crash(exit_code=None, signal=None, first_error=None, was_ready=True, seconds=1.0),
            "did not end even after SIGKILL while serving, after 1.0 s",
        ),
    ],
)
def test_an_ending_in_words(crash: Crash, words: str) -> None:
    assert crash.describe() == words


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set().union(*TRANSITIONS.values()) == set(State)
    assert all(TRANSITIONS.values())


def test_an_illegal_transition_is_a_bug() -> None:
    with pytest.raises(IllegalTransitionError, match="from stopped to ready"):
        checked(State.STOPPED, State.READY)


def test_backoff_grows_and_then_stays() -> None:
    restart = Restart(backoff_s=(0.5, 1.0))
    assert [restart.delay_s(deaths) for deaths in (1, 2, 3, 9)] == [0.5, 1.0, 1.0, 1.0]


def test_a_name_with_parentheses_and_spaces() -> None:
    tail = " ".join(["S", "5", "6", "7", *["0"] * 5, "11", "0", "3", "4", *["0"] * 6, "99", "0", "0"])
    process = parse_stat(f"12 (a) R (b c) {tail}\n")
    assert (process.pid, process.state, process.parent, process.group, process.session) == (12, "S", 5, 6, 7)
    assert (process.major_faults, process.cpu_ticks, process.start_ticks) == (11, 7, 99)


def test_this_process_is_found_and_a_missing_one_is_not() -> None:
    own = query_process(os.getpid())
    assert own is not None
    assert own.parent == os.getppid()
    assert not own.is_zombie
    assert query_process(2**22 + 1) is None
