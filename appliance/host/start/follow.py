"""Follows a container from its start to its first readiness and shows the progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from docker.api import APIClient
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from appliance.errors import EngineNotReadyError, FatalError
from appliance.host.docker import containers
from appliance.host.docker.http import Gateway, ReadyPoll
from appliance.host.docker.log_lines import read_last_words

POLL_S = 0.05  # interval of readiness checks
LOOK_S = 0.5  # interval of checks that it still runs, which cost Docker more than a health route
LAST_LINES = 30
LINE_EVERY_S = 10.0  # interval of a download's progress lines in a log


class Display(Protocol):
    def show(self, document: dict[str, Any]) -> None: ...


def until_ready(client: APIClient, container_id: str, gateway: Gateway, display: Display) -> None:
    """Wait until the appliance is ready. Raises ContainerEndedError with exit code and last log lines if the container
    ends first."""
    poll, looked_s = ReadyPoll(gateway), 0.0
    try:
        while True:
            document = poll.ask()
            if document.get("status") == "ready":
                return
            display.show(document)
            if time.monotonic() - looked_s > LOOK_S:
                refuse_ended(client, container_id)
                looked_s = time.monotonic()
            time.sleep(POLL_S)
    finally:
        poll.close()


class ContainerEndedError(FatalError):
    """The container ended. Has the container's exit code, which is one of the appliance's own."""

    def __init__(self, message: str, *, hint: str, log: tuple[str, ...], exit_code: int) -> None:
        super().__init__(message, hint=hint, log=log)
        self.exit_code = exit_code


def refuse_ended(client: APIClient, container_id: str) -> None:
    state = containers.state(client, container_id)
    if state["Status"] not in ("exited", "dead", "restarting", "removing"):
        return
    code = int(state["ExitCode"])
    said = read_last_words(client.logs(container_id, tail=LAST_LINES).decode(errors="replace"))
    why = f": {said.message}" if said.message else ""
    why = ": killed by the kernel, memory ran out" if state.get("OOMKilled") else why
    message = f"the container ended with code {code}{why}"
    hint = said.hint or "see its log above; docs/errors.md explains each exit code"
    raise ContainerEndedError(message, hint=hint, log=said.before, exit_code=code or EngineNotReadyError.exit_code)


def display_on(console: Console) -> Live | Lines:
    return Live(console) if console.is_terminal else Lines(console)


class Lines:
    """Output for a log: each sentence once, a download's progress now and then."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._said = ""
        self._said_s = -LINE_EVERY_S

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no display to remove."""

    def show(self, document: dict[str, Any]) -> None:
        words, fetched = sentence(document), fetching(document)
        is_new = words != self._said
        if not is_new and not (fetched and self._clock() - self._said_s >= LINE_EVERY_S):
            return
        self._said, self._said_s = words, self._clock()
        self._console.print(f"{words}{f': {fetched}' if fetched else ''}", markup=False, soft_wrap=True)


class Live:
    """Output for a terminal: one line, with a bar if a total is known."""

    def __init__(self, console: Console) -> None:
        # On a narrow terminal only the end of the sentence is cut off.
        words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        right = TextColumn("{task.fields[right]}", table_column=Column(no_wrap=True))
        clock = TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7))
        spinner = SpinnerColumn(table_column=Column(no_wrap=True, min_width=1))
        columns = (spinner, clock, words, _Bar(bar_width=24), right)
        self._progress = Progress(*columns, console=console, transient=True, expand=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, document: dict[str, Any]) -> None:
        total, done = document.get("bytes_total"), document.get("bytes_done") or 0
        words = sentence(document).replace("[", r"\[")
        # A task's total cannot be removed once it is set.
        fields: dict[str, Any] = {"right": fetching(document), "has_bar": bool(total) and "bytes_done" in document}
        if self._task is None:
            self._task = self._progress.add_task(words, total=total, completed=done, **fields)
        self._progress.update(self._task, description=words, total=total, completed=done, **fields)


class _Bar(BarColumn):
    def render(self, task: Task) -> ProgressBar | Text:  # type: ignore[override]
        return super().render(task) if task.fields["has_bar"] else Text("")


def sentence(document: dict[str, Any]) -> str:
    return str(document.get("message") or "starting the container")


def fetching(document: dict[str, Any]) -> str:
    """Return the progress of a download, as in "1.2 of 4.9 GB, 38 MB/s, 1 min 37 s left"; empty while nothing is
    downloaded."""
    done, total = document.get("bytes_done"), document.get("bytes_total")
    if done is None:
        return ""
    words = [f"{done / 1e9:.1f} of {total / 1e9:.1f} GB" if total else f"{done / 1e9:.1f} GB"]
    if rate := document.get("bytes_per_s"):
        words.append(f"{rate / 1e6:.0f} MB/s")
    if (left_s := document.get("seconds_left")) is not None:
        words.append(f"{duration(left_s)} left")
    return ", ".join(words)


def duration(seconds: float) -> str:
    """Return a duration, as in "4.8 s", "1 min 37 s", "2 h 5 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
