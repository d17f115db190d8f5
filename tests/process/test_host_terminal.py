"""The host command on a terminal: what is drawn, and what Ctrl-C asks."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time

import pytest

from tests.ports import free_port
from tests.process.stages.daemon import IMAGE, Host, on_host

LIMIT_S = 60.0
AGAIN_S = 5.0


class Terminal:
    """One program on a pseudo-terminal of its own; the caller closes it."""

    def __init__(self, host: Host, *words: str) -> None:
        self.shown = ""
        self._seen = 0
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(host.place)
            environment = {**host.environment, "TERM": "xterm-256color", "COLUMNS": "160"}
            os.execve(sys.executable, [sys.executable, "-m", "appliance.host", *words], environment)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while words not in self.shown[self._seen :]:
            assert time.monotonic() < deadline, f"it never said {words!r}: {self.shown}"
            assert self._read(), f"it ended without {words!r}: {self.shown}"
        self._seen = self.shown.index(words, self._seen) + len(words)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt(self) -> None:
        """Send SIGINT. A typed Ctrl-C would not do: the kernel sometimes drops what is printed in answer to it."""
        os.kill(self._pid, signal.SIGINT)

    def interrupt_until(self, words: str) -> None:
        """Interrupt again and again until `words` appear. A signal between the prompt and the wait for a key does not
        wake readline's `input()`."""
        for _ in range(int(LIMIT_S / AGAIN_S)):
            self.interrupt()
            while words not in self.shown[self._seen :] and self._read(AGAIN_S):
                pass
            if words in self.shown[self._seen :] or self._has_ended():
                break
        self.wait_for(words)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def code(self) -> int:
        while self._read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self, limit_s: float = LIMIT_S) -> bool:
        """True if the program wrote something within the limit. False if it was silent or has ended."""
        if not select.select([self._terminal], [], [], limit_s)[0]:
            return False
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # how a pseudo-terminal tells that the program has ended
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)


def test_a_download_has_a_bar_and_loading_has_none() -> None:
    with on_host("--fetch-for", "0.6", "--ready-after", "0.4") as host:
        program = Terminal(host, "run", host.model(), "-d", "--image", IMAGE, "--port", str(free_port()))
        assert program.code() == 0, program.shown
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", each) for each in re.split(r"[\r\n]+", program.shown)]
    fetching = [each for each in frames if "weights are fetched" in each]
    loading = [each for each in frames if "being loaded" in each]
    assert any("━" in each and "of 4.9 GB, 38 MB/s" in each for each in fetching), fetching
    assert loading
    assert not any("━" in each for each in loading)


@pytest.mark.parametrize(
    ("answer", "code", "runs"), [("n\n", 0, True), ("y\n", 130, False), ("\n", 130, False), ("", 130, False)]
)
def test_ctrl_c_asks_whether_to_stop(answer: str, code: int, runs: bool) -> None:
    with on_host() as host:
        words = ("--name", "one", "--image", IMAGE, "--port", str(free_port()))
        program = Terminal(host, "run", host.model(), *words)
        program.wait_for("the model is ready")
        program.interrupt()
        program.wait_for("stop one? [Y/n] ")
        program.type(answer) if answer else program.interrupt()
        assert program.code() == code, program.shown
        assert (IMAGE in host.run("list").out) is runs
    assert "Traceback" not in program.shown


def test_building_is_asked_for() -> None:
    with on_host("--image", "other:x") as host:
        program = Terminal(host, "run", host.model(), "-d")
        program.wait_for("Build it now? Compiling the engine takes up to half an hour [y/N] ")
        program.type("n\n")
        assert program.code() == 10, program.shown
    assert "no such image here: appliance:llama-cpu" in program.shown


def test_a_conversation() -> None:
    with on_host() as host:
        host.serving()
        program = Terminal(host, "chat")
        program.wait_for(">>> ")
        program.type("what is a lighthouse for?\n")
        program.wait_for("1: It guides ships.")
        program.wait_for(">>> ")
        program.interrupt_until(">>> ")
        program.type("/exit\n")
        assert program.code() == 0, program.shown
    assert "tiny.gguf: /exit ends" in program.shown
