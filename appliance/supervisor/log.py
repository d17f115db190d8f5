"""A program's log, read from a pipe: splits it into lines, keeps the last 200 and finds the first error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

KEPT_LINES = 200
MAX_LINE_BYTES = 8192


class Log:
    """Takes bytes and yields lines. Memory is bounded: long lines are cut, old lines are dropped."""

    def __init__(
        self,
        is_error: Callable[[str], bool],
        on_line: Callable[[str], None] | None = None,
        is_waiting: Callable[[str], bool] | None = None,
    ) -> None:
        self.count = 0
        self.signs_of_work = 0  # number of lines, without those that only say that the program waits
        self._is_error = is_error
        self._is_waiting = is_waiting
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        self._first_error: str | None = None
        self._ready_at: int | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def feed(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self._grow(first)
        for chunk in rest:
            self._finish_line()
            self._grow(chunk)

    def close(self) -> None:
        """Finish the last line, which may lack its line break."""
        if self._partial:
            self._finish_line()

    def mark_ready(self) -> None:
        """Note that the program is ready. From now on errors of single requests are normal, and the cause of a crash is
        among the last lines."""
        self._ready_at = self.count
        self._first_error = None

    def first_error(self) -> str | None:
        if self._ready_at is None:
            return self._first_error
        forgotten = self.count - len(self._lines)
        recent = islice(self._lines, max(0, self._ready_at - forgotten), None)
        return next((line for line in recent if self._is_error(line)), None)

    def _grow(self, chunk: bytes) -> None:
        self._partial += chunk[: MAX_LINE_BYTES - len(self._partial)]

    def _finish_line(self) -> None:
        line = self._partial.decode("utf-8", "replace").rstrip("\r")
        self._partial = b""
        self.count += 1
        if self._is_waiting is None or not self._is_waiting(line):
            self.signs_of_work += 1
        self._lines.append(line)
        if self._ready_at is None and self._first_error is None and self._is_error(line):
            self._first_error = line
        if self._on_line:
            self._on_line(line)
