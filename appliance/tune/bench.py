"""Several plans that need no reload between them, measured in one llama-bench process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from appliance.command import Command
from appliance.engines.llama.endings import as_error
from appliance.engines.llama_bench import BINARY, Cell, Grid, Row, Steps, Task, is_loaded, parse_row, tasks
from appliance.errors import EngineNotReadyError
from appliance.image_facts import EngineFacts
from appliance.plan import Plan
from appliance.supervisor import Crash, Supervisor
from appliance.tune.curve import Point
from appliance.tune.measure import Step

Done = Callable[[Cell, tuple[Point, ...]], None]


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """`load_s` is from the start to the first task; `cells` are in the order in which they were measured."""

    seconds: float
    load_s: float
    cells: tuple[tuple[Cell, tuple[Point, ...]], ...]


async def bench(
    plan: Plan,
    grid: Grid,
    steps: Steps,
    facts: EngineFacts,
    start: Callable[[Plan, Grid, Steps], Command],
    *,
    tell: Callable[[Step], None],
    done: Done,
) -> BenchRun:
    """Each cell goes to `done` when its last row is there, so that an interrupted run keeps what it measured.

    Raises what `as_error` makes of an ending, and EngineNotReadyError when a row is of other work than asked, or is
    missing. There is no fixed limit, only `Command.stall_timeout_s`. Cancelled, it leaves no process.
    """
    began = time.monotonic()
    lines: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
    supervisor = Supervisor(on_line=lambda line: lines.put_nowait((time.monotonic(), line)))
    reading = _Reading(plan, tasks(plan, grid, steps, facts), len(steps.depths), tell, done)
    tell(Step(plan=plan, what="loading"))
    try:
        supervisor.start(start(plan, grid, steps))
        crash = await _followed(supervisor, lines, reading)
    finally:
        await supervisor.stop()
    if crash is not None:
        raise _cause(crash, reading)
    return BenchRun(
        seconds=time.monotonic() - began,
        load_s=(reading.loaded_at or began) - began,
        cells=tuple(reading.cells),
    )


async def _followed(supervisor: Supervisor, lines: asyncio.Queue[tuple[float, str]], reading: _Reading) -> Crash | None:
    """None when every row has come, before or with its end; else how it ended."""

    async def follow() -> None:
        while not reading.is_complete:
            reading.take(*await lines.get())

    following, ending = asyncio.create_task(follow()), asyncio.create_task(supervisor.wait_ready())
    try:
        await asyncio.wait((following, ending), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
            return None
        crash = ending.result()
    finally:
        for task in (following, ending):
            task.cancel()
        await asyncio.gather(following, ending, return_exceptions=True)
    while not lines.empty():  # what it said last is read before its end is seen
        reading.take(*lines.get_nowait())
    return None if reading.is_complete else crash


def _cause(crash: Crash, reading: _Reading) -> Exception:
    if crash.exit_code != 0:
        return as_error(crash, name=BINARY)
    message = f"engine {BINARY} ended without all its rows: the next was to be {reading.awaited.in_words()}"
    return EngineNotReadyError(message, hint="its last lines are above", log=crash.log)


class _Reading:
    """Lines in, cells out: each row is the one that is awaited, or an error."""

    def __init__(
        self, plan: Plan, expected: Sequence[Task], depths: int, tell: Callable[[Step], None], done: Done
    ) -> None:
        self.cells: list[tuple[Cell, tuple[Point, ...]]] = []
        self.loaded_at: float | None = None
        self._plan = plan
        self._expected = tuple(expected)
        self._rows_each = 2 * depths
        self._rows: list[Row] = []
        self._tell = tell
        self._done = done

    @property
    def is_complete(self) -> bool:
        return len(self._rows) == len(self._expected)

    @property
    def awaited(self) -> Task:
        return self._expected[len(self._rows)]

    def take(self, when: float, line: str) -> None:
        if self.loaded_at is None and is_loaded(line):
            self.loaded_at = when
            self._tell_next()
        if self.is_complete or (row := parse_row(line)) is None:
            return
        if row.task != self.awaited:
            message = f"{BINARY} did other work than asked: {row.task}, and not {self.awaited}"
            raise EngineNotReadyError(message)
        self._rows.append(row)
        if len(self._rows) % self._rows_each == 0:
            self._finish(self._rows[-self._rows_each :])
        if not self.is_complete:
            self._tell_next()

    def _finish(self, rows: Sequence[Row]) -> None:
        task = rows[0].task
        cell = Cell(threads=task.threads, ubatch=task.ubatch, kv_type=task.k_type)
        self.cells.append((cell, points(rows)))
        self._done(*self.cells[-1])

    def _tell_next(self) -> None:
        at = f"{len(self._rows) + 1} of {len(self._expected)}"
        self._tell(Step(plan=self._plan, what=f"task {at}: {self.awaited.in_words()}"))


def points(rows: Iterable[Row]) -> tuple[Point, ...]:
    """Of one cell, a point a depth: what was read up to it is what a prompt took that began so many tokens before."""
    found = list(rows)
    read = {row.task.depth + row.task.read_tokens: row for row in found if row.task.read_tokens}
    return tuple(_point(row, read.get(row.task.depth)) for row in found if row.task.decode_tokens)


def _point(decoded: Row, read: Row | None) -> Point:
    """An empty cache took no reading. Each token here is a step; of llama-server's the first comes of the prompt."""
    tokens = read.task.read_tokens if read else 0
    return Point(
        depth=decoded.task.depth,
        decode_ms=decoded.ms / decoded.task.decode_tokens,
        prefill_ms=read.ms / tokens if read else 0.0,
        prefill_tokens=tokens,
    )
