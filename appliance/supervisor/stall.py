"""Detects a program that should work and does nothing: while it loads, while it is measured, and while it serves.

Time is counted in turns of our own loop, each at most twice as long as it was meant to be. If our process stood still
itself, as in a paused container, the program did too, and that time does not count as silence.
"""

from __future__ import annotations

import asyncio
import time

from appliance.command import Command, Demand, Readiness
from appliance.race import first_of
from appliance.supervisor.child import Child
from appliance.supervisor.crash import Hang
from appliance.system.lack import is_lack, tell

_SAMPLE_S = 0.25
# CPU use below this share of one core is not work: answering our own questions costs an engine 0.2 %, idle pollers 0.5
# %.
_IDLE_SHARE = 0.01
_AT_WORK_MOST = 10.0  # the most that other work may delay the verdict: so many times the limit
_IDLE_S = 0.02  # two ticks of the kernel's clock: one may be rounding

_SERVING_SAMPLE_S = 2.0  # a look at all of /proc costs milliseconds, and a prefill may take an hour
_QUESTION_EVERY_S = 30.0
_ANSWER_S = 5.0
_WORK_ANSWER_S = 60.0  # an engine answers between two batches, and a slow CPU reads one of a prompt in less


async def until_stalled(child: Child, timeout_s: float) -> None:
    """Return after `timeout_s` without a log line, CPU work, or a page read from disk.

    If other work is seen, as on a GPU, return after _AT_WORK_MOST times that: the work may be another program's, or a
    kernel that waits for ever.
    """
    work = _Work(child, counts_lines=True)
    while not await work.is_missing(timeout_s):
        work.look(await _turn(min(_SAMPLE_S, timeout_s / 4)))


async def until_hung(child: Child, command: Command) -> Hang:
    """Return how a serving program hangs, once it does. Never returns for a command without `demand`."""
    demand = command.demand
    if demand is None:
        never: Hang = await asyncio.get_running_loop().create_future()
        return never
    demand.begin()
    waits = _until_away(child, command, demand), _until_silent(child, command, demand)
    found = await first_of(*waits)
    hang: Hang = next(each for each in found if not each.cancelled()).result()
    return hang


async def _until_away(child: Child, command: Command, demand: Demand) -> Hang:
    """Return once, for `stall_timeout_s`, one of its processes was stopped, or it answered no question while no request
    waited."""
    every_s = min(_QUESTION_EVERY_S, command.stall_timeout_s / 4)
    away_s, before = 0.0, ""
    while not before or away_s < command.stall_timeout_s:
        turn_s = await _turn(every_s / 4 if before else every_s)
        began = time.monotonic()
        words = await _why_away(child, command.is_answering, demand, min(_ANSWER_S, every_s))
        asked_s = min(time.monotonic() - began, _ANSWER_S)
        if not words:
            away_s = 0.0
        elif before:
            away_s += turn_s + asked_s
        else:
            away_s = asked_s
        before = words
    return Hang(words=before.format(f"{away_s:.0f} s"), seconds=away_s)


async def _why_away(child: Child, is_answering: Readiness | None, demand: Demand, timeout_s: float) -> str:
    """Return why the program counts as away, with `{}` for the time; empty if it does not."""
    if (progress := child.seen_progress()) is None:
        return ""
    if progress.stopped:
        return f"its process {progress.stopped[0]} has been stopped by a signal for {{}}"
    if demand.requests or is_answering is None:
        return ""
    try:
        async with asyncio.timeout(timeout_s):
            return "" if await is_answering() else "it has refused checks for {} while idle"
    except TimeoutError:
        return "it has not answered checks for {} while idle"
    except OSError as error:
        if not is_lack(error):
            raise
        tell("asking the engine", error)
        return ""  # we could not ask it


async def _until_silent(child: Child, command: Command, demand: Demand) -> Hang:
    """Return once requests wait and none got a part of its answer: after `stall_timeout_s` if no work was seen either,
    otherwise after `patience_s`."""
    turn_s = min(_SERVING_SAMPLE_S, command.stall_timeout_s / 8)
    asked_s = 0.0
    work: _Work | None = None
    pace = _Pace(command)
    while True:
        elapsed_s = asked_s + await _turn(turn_s)
        asked_s = 0.0
        silence = demand.pass_time(elapsed_s)
        if silence.seconds <= elapsed_s:
            work, pace = None, _Pace(command)
        elif silence.requests:
            # Log lines do not count: a process that waits for another one logs that every minute, for ever.
            is_new, work = work is None, work or _Work(child, counts_lines=False)
            if not (is_new or work.look(elapsed_s)):
                continue  # without file descriptors the program cannot be asked either
            began = time.monotonic()
            if silence.seconds >= command.stall_timeout_s and await work.is_missing(command.stall_timeout_s):
                return _hang(silence.requests, silence.seconds, "no work was seen")
            if await pace.is_lost(silence.seconds, silence.patience_s):
                return _hang(
                    silence.requests, silence.seconds, "none of them progressed, although the engine was working"
                )
            asked_s = min(time.monotonic() - began, _ANSWER_S + silence.patience_s / 2)


def _hang(requests: int, seconds: float, words: str) -> Hang:
    waited = "1 request" if requests == 1 else f"{requests} requests"
    return Hang(words=f"{waited} got nothing for {seconds:.0f} s, and {words}", seconds=seconds)


class _Work:
    """Counts for how long no work of a program was seen."""

    def __init__(self, child: Child, *, counts_lines: bool) -> None:
        self._child = child
        self._counts_lines = counts_lines
        self._before = child.seen_progress()
        self._missing_s = self._asks_at_s = 0.0

    def look(self, elapsed_s: float) -> bool:
        """Add `elapsed_s` and look for work. False if we cannot look now, so that the time does not count."""
        before, now = self._before, self._child.seen_progress()
        if before is None or now is None:
            self._before = now
            return False
        if not now.is_runnable:  # beside a busy machine a program may wait for a CPU as long as for its work
            self._missing_s += elapsed_s
        worked_s = abs(now.cpu_s - before.cpu_s)
        is_at_work = worked_s > max(_IDLE_S, _IDLE_SHARE * self._missing_s) or now.major_faults != before.major_faults
        says_something = self._counts_lines and now.lines != before.lines
        if now.stopped:
            self._before = now  # the other processes may look busy while they wait for the stopped one
        elif is_at_work or says_something:
            self._before, self._missing_s, self._asks_at_s = now, 0.0, 0.0
        return True

    async def is_missing(self, timeout_s: float) -> bool:
        """True if no work of its processes was seen for `timeout_s`, and no other work is seen now."""
        if self._missing_s < max(timeout_s, self._asks_at_s):
            return False
        if (self._before and self._before.stopped) or self._missing_s >= _AT_WORK_MOST * timeout_s:
            return True
        began = time.monotonic()
        is_elsewhere = await self._child.is_at_work()
        self._missing_s += min(time.monotonic() - began, _ANSWER_S)
        self._asks_at_s = self._missing_s + timeout_s / 4
        return not is_elsewhere


class _Pace:
    """Compares what a program reports as worked off while its requests get nothing. An answer that is not streamed
    comes in one piece at its end, which may take an hour."""

    def __init__(self, command: Command) -> None:
        self._ask = command.work_done
        self._said: object = None
        self._was_asked = False
        self._forgiven_s = 0.0

    async def is_lost(self, silent_s: float, patience_s: float) -> bool:
        """True after a silence of `patience_s` in which the reported work did not change: it is asked in the middle and
        at the end. False also if we cannot ask now for a lack of files or memory; the next turn asks again."""
        try:
            return await self._is_lost(silent_s - self._forgiven_s, patience_s)
        except OSError as error:
            if not is_lack(error):
                raise
            tell("asking the engine what it has worked off", error)
            return False

    async def _is_lost(self, silent_s: float, patience_s: float) -> bool:
        if not self._was_asked and silent_s >= patience_s / 2:
            self._said = await self._work_done(patience_s)
            self._was_asked = True
        if silent_s < patience_s:
            return False
        said = await self._work_done(patience_s)
        if said is None or said == self._said:
            return True
        self._forgiven_s += silent_s
        self._was_asked = False
        return False

    async def _work_done(self, patience_s: float) -> object:
        """Return what the program reports as worked off; None if it does not tell in time."""
        if self._ask is None:
            return None
        try:
            async with asyncio.timeout(min(_WORK_ANSWER_S, patience_s / 4)):
                return await self._ask()
        except TimeoutError:
            return None


async def _turn(seconds: float) -> float:
    """Sleep, and return how much of the passed time counts: at most twice `seconds`."""
    began = time.monotonic()
    await asyncio.sleep(seconds)
    return min(time.monotonic() - began, 2 * seconds)
