"""Show progress: a download as a bar on a terminal, else as lines; reading of files as one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from appliance.console.shown import beneath, shown
from appliance.weights.download.meter import FetchProgress, Meter

LINE_EVERY_S = 10.0


class Lines:
    """Prints a line at the beginning of each file, when the reason for waiting changes, and every ten seconds."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._now = now
        self._told: tuple[str, str | None] | None = None
        self._at = 0.0

    def __call__(self, progress: FetchProgress) -> None:
        news = (progress.file, progress.waiting_for)
        if news != self._told or self._now() - self._at >= LINE_EVERY_S:
            self._told, self._at = news, self._now()
            self._say(progress.describe())


@contextmanager
def progress_shown(
    stream: TextIO | None = None,
) -> Iterator[tuple[Callable[[FetchProgress], None], Callable[[str], None]]]:
    """Yield two functions: one takes progress, one prints a line of text."""
    to = stream or sys.stderr

    def say(words: str) -> None:
        print(words, file=to, flush=True)

    if not to.isatty():
        yield Lines(say), say
        return
    with _bar(to) as pair:
        yield pair


@contextmanager
def _bar(to: TextIO) -> Iterator[tuple[Callable[[FetchProgress], None], Callable[[str], None]]]:
    # here: importing it takes 60 ms of a start, and only a terminal needs it
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from appliance.console.terminal import Terminal

    console = Terminal(file=to, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}", markup=False), console=console) as bar:
        task = bar.add_task("asking the hub", total=None, words="")

        def on_progress(progress: FetchProgress) -> None:
            words = progress.describe().partition(", ")[2]
            bar.update(
                task,
                description=progress.file,
                completed=progress.bytes_done,
                total=progress.bytes_total,
                words=words,
            )

        yield on_progress, lambda words: console.print(words, markup=False)


class Counted:
    """Progress of reading, called with numbers of bytes: share, rate and time left.

    On a terminal one line is overwritten, else a line is printed every ten seconds.
    """

    def __init__(
        self, doing: str, total: int, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._now = beneath(stream or sys.stderr), now
        self._is_terminal = self._stream.isatty()
        self._is_shown, self._at = False, now()
        self._done = 0
        self._doing, self._meter = doing, Meter(total, self._show, now)

    def __call__(self, count: int) -> None:
        if not self._done:  # a file that is refused before it is read gets no line
            self._meter.begin(self._doing, 0)
        self._done += count
        self._meter.received(self._done, count)

    def end(self) -> None:
        """Clear the unfinished line, before other text is printed."""
        if self._is_shown:
            self._write("\r\x1b[K")
            self._is_shown = False

    def _show(self, progress: FetchProgress) -> None:
        if self._is_terminal:
            self._write(f"\r{shown(progress.describe())}\x1b[K")
            self._is_shown = True
        elif self._now() - self._at >= LINE_EVERY_S:
            self._at = self._now()
            self._write(f"{shown(progress.describe())}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
