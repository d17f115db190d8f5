"""Short commands: run one, bounded in time and in output, and leave none of its processes behind."""

from __future__ import annotations

import os
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
_EXIT_POLL_S = 0.05  # only felt when a grandchild keeps the pipes open after the child itself has gone
# SIGKILL takes milliseconds, unless the kernel is at work for the process: a driver that hangs never gives it back.
_END_S = 1.0
_END_AT_ONCE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended. `returncode` is minus the signal's number when it was killed, as in `subprocess`."""

    returncode: int
    stdout: str
    stderr: str
    is_cut: bool = False  # a stream went beyond OUTPUT_LIMIT_BYTES; the rest was read and dropped


class RunTimeout(Exception):  # noqa: N818 - the name says what happened, as in asyncio
    """The command ran past its limit and was killed with its whole process group."""

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
    """Run `argv` in its own process group and without standard input; text is UTF-8, other bytes are replaced.

    `environment` is the child's whole environment and `folder` where it works; None inherits ours. A non-zero
    exit raises nothing. Raises RunTimeout, also as soon as `is_wanted` says no, and OSError when the program cannot be
    started. Whatever the command left in its group is killed.
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
    """Run `argv` where the user sees it: on our terminal, with its Ctrl-C, and its output on standard error.

    Returns the exit code, minus the signal's number when it was killed. Raises OSError when it cannot be started.
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
    """A command that goes on beside us until it is told to end, by the end of its standard input; that comes too when
    this process dies. Beyond its first line it prints only then: meanwhile nobody reads, and a full pipe stops it."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """Raises OSError when the program cannot be started."""
        self._argv = tuple(argv)
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if environment is None else dict(environment),
            start_new_session=True,
        )
        self._output = _Output(self._process)

    def wait_line(self, *, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait for its first line; False when it closed its output without one. Killed when RunTimeout is raised, which
        is also as soon as `is_wanted` says no, from whichever thread."""
        deadline_s = time.monotonic() + timeout_s
        while (has_line := self._output.has_line()) is None:
            if (remaining_s := deadline_s - time.monotonic()) <= 0 or not is_wanted():
                self.kill()
                raise RunTimeout(self._argv, timeout_s, self._output.texts()[1])
            self._output.read_ready(min(remaining_s, _EXIT_POLL_S))
        return has_line

    def finish(self, *, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True) -> Finished:
        """Tell it to end and wait for what it prints. Raises RunTimeout as `wait_line` does; its process group is
        killed in either case."""
        self._close_input()
        return _collected(self._process, self._output, self._argv, timeout_s, is_wanted)

    def kill(self) -> None:
        """End it at once; what it would have said is of no use."""
        _kill_group(self._process, wait_s=_END_AT_ONCE_S)
        self._close_input()
        self._output.close()

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


class _Output:
    """Both streams of one child, read as they come: a full pipe would stop it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.is_cut = False
        self._process = process
        self._pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self._kept = {pipe.fileno(): bytearray() for pipe in self._pipes}
        self._selector = selectors.DefaultSelector()
        for descriptor in self._kept:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def collect(self, deadline_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Read until the child has ended; False when the deadline came first, or nobody wants it any more."""
        while not self._has_exited():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not is_wanted():
                return False
            if self._selector.get_map():
                self.read_ready(min(remaining_s, _EXIT_POLL_S))
            else:
                time.sleep(min(remaining_s, 0.002))  # both streams are closed: the end is a moment away
        while self._selector.get_map() and self.read_ready(0):
            pass
        return True

    def has_line(self) -> bool | None:
        """Whether standard output holds one; None: it may still come."""
        stdout = next(iter(self._kept))
        if b"\n" in self._kept[stdout]:
            return True
        return None if stdout in self._selector.get_map() else False

    def _has_exited(self) -> bool:
        # WNOWAIT leaves the child a zombie, so its id, which is the group's, cannot be given to anybody else yet.
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
    """Whoever does not end within `wait_s` is waited for by a thread of its own, so that no zombie stays behind."""
    with suppress(ProcessLookupError):  # the group is empty already
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name=f"end of {process.pid}", daemon=True).start()
