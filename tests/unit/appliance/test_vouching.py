"""Requests in the engine's log, beside what a described /proc says that others did meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from profiles import profile

from appliance.profile.validate import GOOD_ENOUGH, Holds, Verdict
from appliance.tune.curve import Point
from appliance.vouching import Vouching

DECODE_MS = 20.0
LIMIT_S = 60.0


class Machine:
    """A /proc in which others may work."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ticks = 0
        own = root / f"proc/{os.getpid()}"
        own.mkdir(parents=True)
        (own / "stat").write_text(f"{os.getpid()} (a) S 1 " + "0 " * 20)
        self.work(0)

    def work(self, ticks: int) -> None:
        self._ticks += ticks
        part = self.root / "proc/part"
        part.write_text(f"cpu  {self._ticks} 0 0 0 0 0 0 0 0 0\n")
        part.rename(self.root / "proc/stat")


class Stage:
    def __init__(self, root: Path) -> None:
        self.machine = Machine(root)
        made = profile()
        point = Point(depth=2048, decode_ms=DECODE_MS, prefill_ms=1.0, prefill_tokens=2048)
        looks = tuple(replace(look, points=(point,)) for look in made.measurements if look.points)
        self.vouching = Vouching(replace(made, measurements=looks), made.plan, root=root)
        self.idle_s = 0.0
        self.asked = 0
        self._task = -1

    def begin(self) -> None:
        self._task += 1
        self._line("launch_slot_", "processing task, is_child = 0")
        self._line("operator()", "new prompt, n_ctx_slot = 64, n_keep = 0, task.n_tokens = 10")

    def end(self, *, times: float = 1.0) -> None:
        self._line("print_timing", "prompt eval time = 10.00 ms / 10 tokens (1.00 ms per token)")
        self._line("print_timing", f"eval time = {30 * DECODE_MS * times:.2f} ms / 31 tokens (each)")
        self._line("release", "stop processing: n_tokens = 41, truncated = 0")

    def _line(self, function: str, words: str) -> None:
        self.vouching.heard(f"0.01.000.000 I slot {function:>12}: id  0 | task {self._task} | {words}")

    @property
    def holds(self) -> Holds:
        assert self.vouching.holds is not None
        return self.vouching.holds

    async def ask(self) -> None:
        self.asked += 1
        self.begin()
        self.end()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[Holds | None]]:
        task = asyncio.create_task(self.vouching.run(idle_s=lambda: self.idle_s, ask=self.ask))
        async with asyncio.timeout(LIMIT_S):
            yield task
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def eventually_good(stage: Stage, count: int) -> None:
    for _ in range(round(LIMIT_S / 0.01)):
        if stage.holds.good == count:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"not {count} requests were found good: {stage.holds}")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_what_others_did_before_a_request_does_not_spoil_it(stage: Stage) -> None:
    """Nobody looks between requests, and so an old look can never stand for the moment when one begins."""
    async with stage.running():
        for count in (1, 2):
            stage.machine.work(1_000_000)
            stage.begin()
            stage.end()
            await eventually_good(stage, count)


async def test_a_request_beside_the_work_of_others_counts_for_nothing(stage: Stage) -> None:
    async with stage.running() as verdict:
        for _ in range(2 * GOOD_ENOUGH):
            stage.begin()
            stage.machine.work(1_000_000)
            stage.end(times=3.0)
        stage.begin()
        stage.end(times=1.0)
        await eventually_good(stage, 1)  # they are judged in the order in which they ended
        assert (stage.holds.verdict, stage.holds.slow) == (Verdict.OPEN, ())
        assert not verdict.done()


async def test_when_nobody_asks_for_long_it_asks_itself(stage: Stage) -> None:
    stage.idle_s = 1000.0
    async with stage.running() as verdict:
        assert (await verdict) is not None
    assert stage.holds.verdict is Verdict.HOLDS
    assert stage.asked == GOOD_ENOUGH
