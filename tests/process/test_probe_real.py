"""This machine and real children."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from appliance.probe import as_document, fingerprint, probe
from appliance.probe.machine.host import query_host
from appliance.run import OUTPUT_LIMIT_BYTES, Running, RunTimeout, run


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def is_gone(pid: int, deadline_s: float = 60.0) -> bool:
    """True if `pid` ends within the time. A zombie counts as ended."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_this_machine() -> None:
    hardware = probe(Path("/tmp"), os.environ)
    assert hardware.cpu.logical == len(os.sched_getaffinity(0))
    assert 1 <= hardware.cpu.cores <= hardware.cpu.logical
    assert hardware.cpu.threads_max <= hardware.cpu.logical
    assert 0 < hardware.memory.usable_mib <= hardware.memory.total_mib
    assert hardware.volume.is_writable
    assert as_document(hardware)["cpu"]["cores"] == hardware.cpu.cores
    assert fingerprint(hardware) == fingerprint(probe(Path("/tmp"), os.environ))


def test_no_heavy_module_is_imported() -> None:
    code = "import sys, appliance.probe, appliance.model; print(*sorted(sys.modules))"
    modules = set(run(python(code), timeout_s=90).stdout.split())
    assert not modules & {"pynvml", "asyncio", "pydantic", "yaml", "numpy", "aiohttp", "ctypes", "rich"}


def test_the_host_is_asked_quickly() -> None:
    took_s = []
    for _ in range(20):
        start = time.process_time()
        query_host(Path("/"), Path("/tmp"))
        took_s.append(time.process_time() - start)
    assert min(took_s) < 0.1  # of CPU time: some 3 ms, and an import or a program is more than this


def test_a_command_ends_with_its_code_and_its_words() -> None:
    code = "import sys, os; print('aé', os.environ.get('X')); sys.stderr.buffer.write(b'b\\xff'); sys.exit(3)"
    finished = run(python(code), timeout_s=90, environment={"X": "y", "PYTHONUTF8": "1"})
    assert (finished.returncode, finished.stdout, finished.stderr, finished.is_cut) == (3, "aé y\n", "b\ufffd", False)


def test_a_command_that_is_killed_has_a_negative_code() -> None:
    assert run(python("import os; os.kill(os.getpid(), 9)"), timeout_s=90).returncode == -9


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run(("/nowhere/command",), timeout_s=1)


def test_output_without_end_is_cut() -> None:
    code = f"import sys; sys.stdout.write('x' * {OUTPUT_LIMIT_BYTES + 1}); sys.stderr.write('y' * 3)"
    finished = run(python(code), timeout_s=90)
    assert (len(finished.stdout), finished.stderr, finished.is_cut) == (OUTPUT_LIMIT_BYTES, "yyy", True)


def test_a_hanging_command_dies_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.fork()\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')\n"
        "print('hanging', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    for limit_s in (2, 10, 60):  # where two seconds do not do for its beginning
        pids.write_text("")
        with pytest.raises(RunTimeout, match=f"did not end within {limit_s} s") as caught:
            run(python(code, str(pids)), timeout_s=limit_s)
        written = [int(line) for line in pids.read_text().split()]
        assert all(is_gone(pid) for pid in written)
        if len(written) == 2 and "hanging" in caught.value.stderr:
            break
    assert len(written) == 2
    assert "hanging" in caught.value.stderr


def test_a_grandchild_that_holds_the_pipe_does_not_hold_us() -> None:
    code = "import os, time\nif os.fork(): print('done', flush=True); os._exit(0)\ntime.sleep(600)\n"
    start = time.monotonic()
    finished = run(python(code), timeout_s=500)
    assert time.monotonic() - start < 300
    assert (finished.returncode, finished.stdout) == (0, "done\n")


UNTIL_TOLD = "import os, sys; print('ready', os.getpid(), flush=True); sys.stdin.read(); print('done')"


def test_a_command_beside_us_ends_when_it_is_told() -> None:
    running = Running(python(UNTIL_TOLD))
    assert running.wait_line(timeout_s=90)
    finished = running.finish(timeout_s=90)
    assert finished.returncode == 0
    assert finished.stdout.splitlines()[1:] == ["done"]


def test_a_command_beside_us_that_says_nothing() -> None:
    running = Running(python("import os; os.close(1); input()"))
    assert not running.wait_line(timeout_s=90)
    running.kill()


def test_a_command_beside_us_that_is_silent_too_long() -> None:
    with pytest.raises(RunTimeout):
        Running(python("input()")).wait_line(timeout_s=0.2)


def test_a_command_beside_us_that_does_not_end() -> None:
    running = Running(python("import os, time; print(os.getpid(), flush=True); time.sleep(60)"))
    assert running.wait_line(timeout_s=90)
    with pytest.raises(RunTimeout):
        running.finish(timeout_s=0.2)


def test_a_command_beside_us_ends_when_we_are_killed() -> None:
    parent = (
        "import os, signal, sys\nfrom appliance.run import Running\n"
        f"running = Running((sys.executable, '-c', {UNTIL_TOLD!r}))\nassert running.wait_line(timeout_s=90)\n"
        "print(running._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    finished = run(python(parent), timeout_s=60)
    assert finished.returncode == -9
    assert is_gone(int(finished.stdout))
