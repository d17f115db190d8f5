"""Runs a program to its end, and only while nobody needs the machine: meanwhile a signal stops it."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from appliance.command import Command
from appliance.race import first_of
from appliance.supervisor import Crash, Supervisor

Wait = Callable[[], Awaitable[object]]
NICE = 10


class Pauses:
    """`until_busy` returns when the machine is needed, `until_quiet` when it no longer is."""

    def __init__(self, until_busy: Wait, until_quiet: Wait) -> None:
        self.until_busy = until_busy
        self.until_quiet = until_quiet

    async def drive(self, pid: int, work_s: float) -> None:
        """Stop and continue a process. Returns once it has run for `work_s`, pauses not counted."""
        with suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, pid, NICE)
        left = work_s
        while True:
            began = time.monotonic()
            await first_of(self.until_busy(), timeout_s=None if math.isinf(left) else left)
            left -= time.monotonic() - began
            if left <= 0:
                return
            _signal(pid, signal.SIGSTOP)
            await self.until_quiet()
            _signal(pid, signal.SIGCONT)


async def run_to_end(
    supervisor: Supervisor,
    command: Command,
    pauses: Pauses | None,
    is_enough: asyncio.Event | None = None,
    *,
    work_s: float = math.inf,
) -> Crash | None:
    """Run a program that is never ready. Returns how it ended; None if `is_enough` was set or `work_s` passed before.

    It is killed before this returns or raises.
    """

    async def limit() -> None:
        if pauses is not None and supervisor.pid is not None:
            await pauses.drive(supervisor.pid, work_s)
        else:
            await asyncio.wait_for(asyncio.Event().wait(), None if math.isinf(work_s) else work_s)

    try:
        if pauses is not None:
            await pauses.until_quiet()
            # While it is paused it shows no sign of work, and the stall timer would end it.
            command = replace(command, stall_timeout_s=math.inf)
        supervisor.start(command)
        ended, *_ = await first_of(supervisor.wait_ended(), limit(), (is_enough or asyncio.Event()).wait())
        return None if ended.cancelled() else ended.result()
    finally:
        await supervisor.stop(grace_s=0.0)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)
