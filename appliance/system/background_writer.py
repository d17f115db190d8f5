"""A thread that writes what requests leave behind: its place, a disk or a server, may be slow or away for long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from appliance.system.detached import HANGS_S
from appliance.system.lack import is_lack, tell

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Calls `write` some seconds after the first `wake`, so that it takes many things at once.

    `write` is given what was wrong with the place the last time, and returns what is wrong now; empty if nothing is. If
    it has to be tried again without anything new, it calls `wake` itself.
    """

    def __init__(self, name: str, write: Callable[[str], str], *, every_s: float, again_s: float) -> None:
        """`again_s` replaces `every_s` while something is wrong. `name` is the thread's."""
        self._name = name
        self._write = write
        self._every_s = every_s
        self._again_s = again_s
        self._has_some = threading.Event()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._writes_since: float | None = None  # monotonic seconds; None while nothing is written

    @property
    def silent_s(self) -> float:
        """How long the write that runs has taken; 0 if none runs."""
        began = self._writes_since
        return 0.0 if began is None else time.monotonic() - began

    @property
    def problem(self) -> str:
        """What is wrong with the place; empty if nothing is."""
        seconds = self.silent_s
        return f"it has not answered for {seconds:.0f} s" if seconds >= HANGS_S else self._problem

    @property
    def is_over(self) -> bool:
        """True once this is the last write."""
        return self._is_over.is_set()

    def wake(self) -> None:
        """Tell that something waits. Cheap: each request calls it."""
        if not self._has_some.is_set():
            self._has_some.set()
        if self._thread is None:
            self._start()

    def close(self, timeout_s: float) -> None:
        """Write the rest. Waits for `timeout_s` at most."""
        self._is_over.set()
        self._has_some.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _start(self) -> None:
        # A daemon: a place that stands still must not keep the process alive. Known before it runs, since it may wake.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            if not is_lack(error):
                raise
            tell(f"writing {self._name}", error)  # the next request tries again

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._has_some.wait()
            self._is_over.wait(self._again_s if self._problem else self._every_s)
            # In this order: a `close` after the second line wakes the next turn, which then is the last one.
            self._has_some.clear()
            is_last = self.is_over
            self._writes_since = time.monotonic()
            try:
                self._problem = self._write(self._problem)
            except Exception as error:  # whatever it is: what comes later is written
                _log.exception("writing %s failed", self._name)
                self._problem = str(error) or type(error).__name__
            finally:
                self._writes_since = None
