"""The story of a start, one line a step: start reading here. Each step is a folder beside this file."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import ConfigError, ModelAwayError
from appliance.serve.background.loss_watch import LossWatch
from appliance.serve.background.memory_watch import MemoryWatch
from appliance.serve.background.other_work import OtherWork
from appliance.serve.background.tasks import BackgroundTasks
from appliance.serve.engine.choose_plan import choose_plan, start_from_profile
from appliance.serve.engine.kernels import check_kernels
from appliance.serve.engine.load import launch, wait_loaded
from appliance.serve.gateway.listen import open_gateway
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.gateway.stop import put_to_sleep, stoppable
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.gpus import cross_check_gpus
from appliance.serve.open.open import find_model, open_slot
from appliance.serve.supervise import Tasks, serve_until_failure
from appliance.settings import Settings
from appliance.start.machine import look_at_machine
from appliance.supervisor import become_subreaper
from appliance.system.lack import outlast

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.plan import Plan

OPEN = (
    "traffic between the hosts of a group is not encrypted, and anyone who reaches it can run code here: "
    "keep it on a network of its own"
)


async def serve(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Serve until a stop is asked for; returns 0 once everything is gone. Raises FatalError for any other ending."""
    become_subreaper()
    if settings.nodes > 1:
        return await serve_group(settings, environment, report)
    slot = open_slot(settings, environment, report.for_slot())
    if slot.served:
        start_from_profile(slot.served)  # the engine loads while the gateway is imported
    async with stoppable(report, slot), open_gateway(settings, report, slot) as gateway:
        await serve_model(slot, gateway.backends[0])
    return 0


async def serve_model(slot: ModelSlot, backend: Backend) -> None:
    """Bring one of the models up and serve it. Never returns; raises FatalError once its engine is given up."""
    served = await bring_up(slot)
    await serve_until_failure(served, tasks_of(served, backend))


async def bring_up(slot: ModelSlot) -> ServedModel:
    """Fetch, plan and load the slot's model; returns when its engine answers.

    If it fails or is cancelled, the slot's engine is stopped first; the slot may be brought up again.
    """
    if slot.report.progress.phase is Phase.ASLEEP:
        slot.report.phase(Phase.STARTING)
    try:
        served = await _opened(slot)
        if not served.host.is_launched:
            plan = await outlast(partial(_chosen, slot, served), "choosing what to serve")
            launch(served, plan)
        await wait_loaded(served)
    except BaseException:
        try:
            await put_to_sleep(slot)
        except Exception as failure:  # the first error is the one to raise
            slot.report.error("not_stopped", f"an engine may be left: {type(failure).__name__}: {failure}")
        raise
    return served


async def _opened(slot: ModelSlot) -> ServedModel:
    """Return the served model, found and fetched if that was not done yet."""
    if slot.served:
        return slot.served
    if not slot.pending:
        # In a thread: requests to other models are answered meanwhile.
        slot.take(await asyncio.to_thread(find_model, slot))
    served = await _fetched(slot)
    start_from_profile(served)  # the same weights may have been measured here before
    return served


async def _fetched(slot: ModelSlot) -> ServedModel:
    if slot.served:
        return slot.served
    # Imported late: a start whose model is on the volume never needs it.
    from appliance.serve.open.fetch import fetch_model

    return await fetch_model(slot)


async def _chosen(slot: ModelSlot, served: ServedModel) -> Plan:
    await check_kernels(served)
    await cross_check_gpus(served.hardware, served.environment, served.report)
    # Look again: the checks took seconds, and other engines may have been loaded or stopped since the model was opened.
    machine = await asyncio.to_thread(look_at_machine, slot.contents, slot.environment)
    served.set_start(served.start.on(machine.hardware))
    return await choose_plan(served)


def tasks_of(served: ServedModel, backend: Backend) -> Tasks:
    """Make the tasks that run while this model serves, by their names in the log."""
    return {
        "background tasks": partial(BackgroundTasks(served).run, backend),
        "watching memory": partial(MemoryWatch(served).run, backend.traffic),
        "watching for losses": partial(LossWatch(served).run, backend.traffic),
        "watching other programs": partial(OtherWork(served).run, backend.traffic),
    }


async def serve_group(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Serve as one of several hosts; returns and raises as `serve`."""
    from appliance.serve.hosts.follow import Follower  # both imported late: a start on one host never needs them
    from appliance.serve.hosts.lead import Leader

    report.info("tune_off", "several hosts serve the predicted plan: only a host that serves alone is measured")
    report.warning("open_traffic", OPEN)
    settings = replace(settings, tune="off")
    slot = open_slot(settings, environment, report.for_slot())
    host = Follower(settings) if settings.node_rank else Leader(settings, report)
    async with stoppable(report, slot), open_gateway(settings, report, slot, part=host.part):
        served = await _fetched(slot)
        await cross_check_gpus(served.hardware, environment, served.report)
        await (host.follow(served) if isinstance(host, Follower) else host.lead(served))
    return 0


async def measure_only(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Measure without serving, and keep the profile; returns 0, or 143 (SIGTERM's code) if it was stopped."""
    if settings.nodes > 1:
        message = f"several hosts cannot be measured: nodes is {settings.nodes} ({settings.sources['nodes']})"
        raise ConfigError(message, hint="measure on a host that serves alone; a group serves the predicted plan")
    become_subreaper()
    slot = open_slot(settings, environment, report.for_slot())
    if slot.served is None:
        raise ModelAwayError(slot.pending.words if slot.pending else slot.name)
    async with stoppable(report, slot) as stop:
        from appliance.serve.engine.measure import measure_alone  # imported late: the start of a model needs none of it

        await measure_alone(slot.served)
    return 143 if stop.is_set() else 0
