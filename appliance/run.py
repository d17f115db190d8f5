"""Short commands: run one with a limit on time and output, and leave none of its processes behind."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from appliance.values import dataclass

OUTPUT_LIMIT_BYTES = 4 * 1024 * 1024  # of each stream; the longest `--help` of an engine is under 100 KiB
_CHUNK_BYTES = 64 * 1024
_EXIT_POLL_S = 0.05  # matters only if a grandchild keeps the pipes open after the child has exited
# SIGKILL takes milliseconds, unless the process is inside the kernel: a driver that hangs never returns.
_END_S = 1.0
_END_AT_ONCE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended. `returncode` is minus the signal's number if a signal killed it, as in `subprocess`."""

    returncode: int
    stdout: str
    stderr: str
    is_cut: bool = False  # True if a stream exceeded OUTPUT_LIMIT_BYTES; the rest was read and dropped


class RunTimeout(Exception):  # noqa: N818 - the name says what happened, as in asyncio
    """The command exceeded its time limit and was killed with its whole process group."""

    def __init__(self, argv: Sequence[str], timeout_s: float, stderr: str) -> None:
        super().__init__(f"{argv[0]} did not end within {timeout_s:g} s")
        self.argv = tuple(argv)
        self.timeout_s = timeout_s
        self.stderr = stderr


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Finished:
    """Run `argv` in its own process group and without standard input. Output is decoded as UTF-8; other bytes are
    replaced.

    `environment` is the child's whole environment and `folder` its working directory; None inherits ours. A non-zero
    exit raises nothing. Raises RunTimeout after `timeout_s`, or as soon as `is_wanted` returns False, and OSError if
    the program cannot be started. Every process left in its group is killed.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if environment is None else dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    return _collected(process, _Output(process), argv, timeout_s, is_wanted)


def run_shown(argv: Sequence[str], *, folder: Path | None = None) -> int:
    """Run `argv` on the user's terminal: Ctrl-C reaches it, and its output goes to standard error.

    Returns the exit code, or minus the signal's number if a signal killed it. Raises OSError if it cannot be started.
    """
    with subprocess.Popen(list(argv), cwd=folder, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()) as process:
        return process.wait()


def _collected(
    process: subprocess.Popen[bytes],
    output: _Output,
    argv: Sequence[str],
    timeout_s: float,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Finished:
    try:
        is_done = output.collect(time.monotonic() + timeout_s, is_wanted)
    finally:
        _kill_group(process, wait_s=_END_S if is_wanted() else _END_AT_ONCE_S)
        output.close()
    stdout, stderr = output.texts()
    if not is_done:
        raise RunTimeout(argv, timeout_s, stderr)
    return Finished(returncode=process.returncode, stdout=stdout, stderr=stderr, is_cut=output.is_cut)


class Running:
    """Long-running child process. Closing its standard input stops it, and so does the death of this process. After its
    first line it must print nothing until then: nobody reads, and a full pipe would block it."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """Start the program. Raises OSError if it cannot be started."""
        self._argv = tuple(argv)
        self._process = _with_input(argv, environment, stderr=subprocess.PIPE)
        self._output = _Output(self._process)

    def wait_line(self, *, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait for its first line. Returns False if it closed its output without one. Raises RunTimeout after
        `timeout_s`, or as soon as `is_wanted` returns False, and kills the child first. May be called from any
        thread."""
        deadline_s = time.monotonic() + timeout_s
        while (has_line := self._output.has_line()) is None:
            if (remaining_s := deadline_s - time.monotonic()) <= 0 or not is_wanted():
                self.kill()
                raise RunTimeout(self._argv, timeout_s, self._output.texts()[1])
            self._output.read_ready(min(remaining_s, _EXIT_POLL_S))
        return has_line

    def finish(self, *, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True) -> Finished:
        """Close its standard input and return its output after it ended. Raises RunTimeout as `wait_line` does. Its
        process group is killed in every case."""
        self._close_input()
        return _collected(self._process, self._output, self._argv, timeout_s, is_wanted)

    def kill(self) -> None:
        """Kill it at once and drop its output."""
        _kill_group(self._process, wait_s=_END_AT_ONCE_S)
        self._close_input()
        self._output.close()

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class Dialog:
    """Child process that answers each line on its standard input with one line. It ends when its input is closed, and
    so with this process. Not for several threads at once."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """Start the program. Raises OSError if it cannot be started."""
        self._argv = tuple(argv)
        self._process = _with_input(argv, environment, stderr=subprocess.DEVNULL)

    def ask(self, line: str, *, timeout_s: float) -> str:
        """Return the answer. Raises RunTimeout after `timeout_s`, and OSError if the child has ended; `close` it
        then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BrokenPipeError
        stdin.write(line.encode() + b"\n")
        stdin.flush()
        answer, deadline_s = bytearray(), time.monotonic() + timeout_s
        ready = select.poll()  # not `select.select`, which takes no descriptor above 1,023
        ready.register(stdout, select.POLLIN)
        while not answer.endswith(b"\n"):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not ready.poll(1000 * remaining_s):
                raise RunTimeout(self._argv, timeout_s, "")
            data = os.read(stdout.fileno(), _CHUNK_BYTES)
            if not data or len(answer) > OUTPUT_LIMIT_BYTES:
                message = "the child ended without an answer"
                raise BrokenPipeError(message)
            answer += data
        return answer.decode("utf-8", "replace")

    def close(self) -> None:
        """Kill it at once. May be called again."""
        _kill_group(self._process, wait_s=_END_AT_ONCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what was written last has not been read
                    pipe.close()


def _with_input(argv: Sequence[str], environment: Mapping[str, str] | None, *, stderr: int) -> subprocess.Popen[bytes]:
    """Start a child, in its own process group, whose standard input and output are pipes to us."""
    return subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=None if environment is None else dict(environment),
        start_new_session=True,
    )


class _Output:
    """Both output streams of one child, read as they come: a full pipe would block the child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.is_cut = False
        self._process = process
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self._kept = {pipe.fileno(): bytearray() for pipe in self._pipes}
        self._selector = selectors.DefaultSelector()
        for descriptor in self._kept:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def collect(self, deadline_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Read until the child has ended. Returns False if the deadline passed or `is_wanted` returned False before."""
        while not self._has_exited():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not is_wanted():
                return False
            if self._selector.get_map():
                self.read_ready(min(remaining_s, _EXIT_POLL_S))
            else:
                time.sleep(min(remaining_s, 0.002))  # both streams are closed, so the child ends soon
        while self._selector.get_map() and self.read_ready(0):
            pass
        return True

    def has_line(self) -> bool | None:
        """True if standard output holds a whole line, False if it ended without one, None if a line may still come."""
        stdout = next(iter(self._kept))
        if b"\n" in self._kept[stdout]:
            return True
        return None if stdout in self._selector.get_map() else False

    def _has_exited(self) -> bool:
        # WNOWAIT leaves the child a zombie, so its pid, which is also its group's, cannot be reused yet.
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def read_ready(self, timeout_s: float) -> bool:
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            data = os.read(key.fd, _CHUNK_BYTES)
            if not data:
                self._selector.unregister(key.fd)
            room = OUTPUT_LIMIT_BYTES - len(self._kept[key.fd])
            self._kept[key.fd] += data[:room]
            self.is_cut = self.is_cut or len(data) > room
        return bool(ready)

    def texts(self) -> tuple[str, str]:
        stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in self._kept.values())
        return stdout, stderr

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()


def _kill_group(process: subprocess.Popen[bytes], *, wait_s: float) -> None:
    """Kill the process group and wait up to `wait_s` for its leader. After that a thread waits for it, so that no
    zombie remains."""
    with suppress(ProcessLookupError):  # the group is empty already
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name=f"end of {process.pid}", daemon=True).start()
