"""Output of a start: text with styles on a terminal, otherwise JSON lines; and the phase that clients are shown.

One event a line, as {"time", "level", "event", "message", …facts}; `event` is stable for scripts, `message` is for
people.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

from appliance.console.progress import Phase, Progress

KEPT_LINES = 50
KEPT_FACTS = ("exit_code", "hint")  # of a line, for pages: the code that docs/errors.md explains, and what to do
_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


class Report:
    """Writes the output. `form` is auto, text or json. /health/ready answers from `progress`."""

    def __init__(self, form: str = "auto", stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_text = form == "text" or (form == "auto" and self._stream.isatty())
        self.progress = Progress(phase=Phase.STARTING)
        self.began = time.monotonic()
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_LINES)
        """The latest lines, oldest first: `time`, `level`, `event`, `message`, and those of `KEPT_FACTS` that are
        known."""

    def for_slot(self) -> Report:
        """Return a report of one model: its own phase, in the same log."""
        made = Report("text" if self._is_text else "json", self._stream)
        made.began = self.began
        made.recent = self.recent
        return made

    def info(self, event: str, message: str, **facts: Any) -> None:  # noqa: ANN401 - anything that JSON knows
        self._say("info", event, message, facts)

    def warning(self, event: str, message: str, **facts: Any) -> None:  # noqa: ANN401
        self._say("warning", event, message, facts)

    def error(self, event: str, message: str, **facts: Any) -> None:  # noqa: ANN401
        self._say("error", event, message, facts)

    def phase(self, phase: Phase, message: str = "", **facts: Any) -> None:  # noqa: ANN401
        """Set the phase that clients are shown; `since` changes only with the phase."""
        since = self.progress.since if phase is self.progress.phase else time.monotonic()
        self.progress = Progress(phase=phase, message=message, since=since, facts=facts)

    @contextmanager
    def taking_logs(self) -> Iterator[Report]:
        """Write the logs of modules without a report of their own as events `log`, so that scripts get JSON lines
        only."""
        logger, handler = logging.getLogger("appliance"), _LogHandler(self)
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield self
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    def _say(self, level: str, event: str, message: str, facts: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = {"time": now, "level": level, "event": event, "message": message}
        self.recent.append({**row, **{name: facts[name] for name in KEPT_FACTS if facts.get(name)}})
        if self._is_text:
            self._say_text(level, message)
            return
        print(json.dumps({**row, **facts}, default=str), file=self._stream, flush=True)

    def _say_text(self, level: str, message: str) -> None:
        # imported here: a container without a terminal never needs it, and it costs 60 ms
        from rich.text import Text

        from appliance.console.terminal import Terminal

        seconds = f"{time.monotonic() - self.began:6.1f} s  "
        Terminal(file=self._stream, soft_wrap=True, highlight=False).print(
            Text.assemble((seconds, "dim"), (message, _STYLES[level]))
        )


class _LogHandler(logging.Handler):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        say = self._report.info if record.levelno < logging.WARNING else self._report.warning
        say("log", record.getMessage())
