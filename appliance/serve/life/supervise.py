"""The engine that serves, from its first readiness on: its restarts, its replacements and its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from appliance.console.progress import Phase
from appliance.errors import CpuUnsupportedError, FatalError
from appliance.race import first_of
from appliance.serve.engine.kernels import plan_without
from appliance.serve.engine.load import after_kills, doubt_peak, on_ready, report_variant
from appliance.serve.model.served_model import ServedModel
from appliance.supervisor import Crash, State
from appliance.system.lack import outlast

Tasks = Mapping[str, Callable[[], Awaitable[None]]]  # tasks that run while the model serves, by their names in the log

FOLLOW_EVERY_S = 0.05


async def serve_until_failure(served: ServedModel, tasks: Tasks) -> None:
    """Serve, and run `tasks` meanwhile. Never returns.

    Raises the error of an engine that is not restarted any more, or of a task.
    """
    while True:
        plan = served.host.plan
        variant = plan.cpu_variant if plan else None
        try:
            killed = await _until_given_up(served, tasks)
        except FatalError as error:
            await _serve_on(served, variant, error)
        else:
            await _serve_less(served, killed)


async def _serve_less(served: ServedModel, crash: Crash) -> None:
    """Load a smaller plan after the kernel's memory killer ended the engine again.

    Raises the engine's error if no smaller plan fits, or if the new engine ends for another reason.
    """
    while True:
        before, error = served.host.plan, served.start.engine.as_error(crash, served=True)
        if before is None:
            raise error
        plan = after_kills(served, before, error)
        served.report.phase(Phase.RESTARTING, error.message)
        await served.host.stop_current()
        again = await served.host.load(plan)
        if again is None:
            await on_ready(served)
            return
        if not await served.memory_kills.note(served.start, plan, again):
            raise served.start.engine.as_error(again)
        crash = again


async def _serve_on(served: ServedModel, variant: str | None, error: FatalError) -> None:
    """Load the next CPU variant after the engine died of this one. Raises the error of any other ending."""
    while True:
        plan = await plan_without(served, variant, error)
        report_variant(served, plan)
        served.report.phase(Phase.RESTARTING, error.message)
        await served.host.stop_current()
        crash = await served.host.load(plan)
        if crash is None:
            await on_ready(served)
            return
        variant, error = plan.cpu_variant, served.start.engine.as_error(crash)


async def _until_given_up(served: ServedModel, tasks: Tasks) -> Crash:
    """Serve until a kill after which the plan has to be smaller. Raises the error of any other ending."""
    failing, following, *others = await first_of(
        served.host.wait_failed(),
        _follow_state(served),
        *(outlast(work, name) for name, work in tasks.items()),
    )
    if not following.cancelled():
        killed: Crash = following.result()
        return killed
    if not failing.cancelled():
        if await served.memory_kills.note(served.start, served.host.plan, failing.result()):
            return failing.result()  # type: ignore[no-any-return]
        error = _ending(served, failing.result())
        await doubt_peak(served, served.host.plan, error)
        raise error
    for task in others:
        if not task.cancelled():
            task.result()  # a task ends only by an error, which ends serving
    message = "nothing that serves has ended"
    raise RuntimeError(message)


def _ending(served: ServedModel, crash: Crash) -> FatalError:
    plan = served.host.plan
    if crash.signal == signal.SIGILL and plan is not None and plan.cpu_variant is not None:
        served.report_death(crash)
        return CpuUnsupportedError(f"the engine {crash.describe()}", log=crash.log)
    return served.start.engine.as_error(crash, served=True)


async def _follow_state(served: ServedModel) -> Crash:
    """Show clients each crash until the next engine answers. Returns a kill after which the plan has to be smaller.

    An engine that is away on purpose is left out: the idle tuner sets the phase itself.
    """
    was_ready, before, is_hung = True, served.host.supervisor, False
    while True:
        supervisor = served.host.supervisor
        is_ready = supervisor is not None and supervisor.state is State.READY
        crash = supervisor.crash if supervisor else None
        if supervisor is not None and supervisor.hang is not None:
            if not is_hung:
                served.report.phase(Phase.RESTARTING, f"hung: {supervisor.hang.words}")
            is_hung = True
            await asyncio.sleep(FOLLOW_EVERY_S)
            continue  # it has not ended yet: `crash` is an earlier one
        is_hung = False
        if supervisor is before and was_ready and not is_ready and crash is not None:
            served.report.phase(Phase.RESTARTING, crash.describe())
            await doubt_peak(served, served.host.plan, served.report_death(crash))
        if crash is not None and await served.memory_kills.note(served.start, served.host.plan, crash):
            return crash
        if is_ready and (not was_ready or supervisor is not before):
            await outlast(partial(on_ready, served), "looking at the engine")
        was_ready, before = is_ready, supervisor
        await asyncio.sleep(FOLLOW_EVERY_S)
