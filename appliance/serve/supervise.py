"""From the first readiness on: the engine that serves, its restarts, and its end."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from typing import TYPE_CHECKING

from appliance.console.progress import Phase
from appliance.errors import CpuUnsupportedError, FatalError
from appliance.race import first_of
from appliance.serve.kernels import plan_without
from appliance.serve.load import after_kills, on_ready, report_variant
from appliance.serve.served_model import ServedModel
from appliance.supervisor import Crash, State
from appliance.system.lack import outlast

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend

FOLLOW_EVERY_S = 0.05


async def serve_until_failure(served: ServedModel, backend: Backend) -> None:
    """Never returns. Raises the error of the engine's ending, after which nothing is restarted any more."""
    while True:
        plan = served.host.plan
        variant = plan.cpu_variant if plan else None
        try:
            killed = await _until_given_up(served, backend)
        except FatalError as error:
            await _serve_on(served, variant, error)
        else:
            await _serve_less(served, killed)


async def _serve_less(served: ServedModel, crash: Crash) -> None:
    """With a smaller plan, in place of an engine that the kernel's memory killer ended again. Raises the error of its
    ending where there is none, and of any other ending."""
    while True:
        before, error = served.host.plan, served.start.engine.as_error(crash, served=True)
        if before is None:
            raise error
        plan = after_kills(served, before, error)
        served.report.phase(Phase.RESTARTING, error.message)
        await served.host.detach()
        again = await served.host.load(plan)
        if again is None:
            await on_ready(served)
            return
        if not await served.memory_kills.note(served.start, plan, again):
            raise served.start.engine.as_error(again)
        crash = again


async def _serve_on(served: ServedModel, variant: str | None, error: FatalError) -> None:
    """With the next CPU variant, in place of an engine that died of this one. Raises the error of any other ending."""
    while True:
        plan = await plan_without(served, variant, error)
        report_variant(served, plan)
        served.report.phase(Phase.RESTARTING, error.message)
        await served.host.detach()
        crash = await served.host.load(plan)
        if crash is None:
            await on_ready(served)
            return
        variant, error = plan.cpu_variant, served.start.engine.as_error(crash)


async def _until_given_up(served: ServedModel, backend: Backend) -> Crash:
    """Returns a kill after which the plan has to be smaller. Raises the error of any other ending."""
    failing, following, *beside = await first_of(
        served.host.wait_failed(),
        _follow_state(served),
        outlast(partial(served.background.run, backend), "what goes on beside serving"),
        outlast(partial(served.memory_watch.run, backend.traffic), "watching memory"),
        outlast(partial(served.other_work.run, backend.traffic), "watching other programs"),
    )
    if not following.cancelled():
        killed: Crash = following.result()
        return killed
    if not failing.cancelled():
        if await served.memory_kills.note(served.start, served.host.plan, failing.result()):
            return failing.result()  # type: ignore[no-any-return]
        error = _ending(served, failing.result())
        await served.memory_watch.on_death(served.host.plan, error)
        raise error
    for task in beside:
        if not task.cancelled():
            task.result()  # none ever ends but by an error, which is the end of serving
    message = "nothing that serves has ended"
    raise RuntimeError(message)


def _ending(served: ServedModel, crash: Crash) -> FatalError:
    plan = served.host.plan
    if crash.signal == signal.SIGILL and plan is not None and plan.cpu_variant is not None:
        _report_death(served, crash)
        return CpuUnsupportedError(f"the engine {crash.describe()}", log=crash.log)
    return served.start.engine.as_error(crash, served=True)


async def _follow_state(served: ServedModel) -> Crash:
    """After a crash clients are told so until the next engine answers. An engine that is away on purpose is the idle
    tuner's business, who says so itself. Returns a kill after which the plan has to be smaller."""
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
            continue  # it has not ended yet, and its last crash is another one's
        is_hung = False
        if supervisor is before and was_ready and not is_ready and crash is not None:
            served.report.phase(Phase.RESTARTING, crash.describe())
            _report_death(served, crash)
            await served.memory_watch.on_death(served.host.plan, served.start.engine.as_error(crash, served=True))
        if crash is not None and await served.memory_kills.note(served.start, served.host.plan, crash):
            return crash
        if is_ready and (not was_ready or supervisor is not before):
            await outlast(partial(on_ready, served), "looking at the engine")
        was_ready, before = is_ready, supervisor
        await asyncio.sleep(FOLLOW_EVERY_S)


def _report_death(served: ServedModel, crash: Crash) -> None:
    served.report.error("engine_died", f"engine {crash.describe()}", log=list(crash.log[-20:]))
