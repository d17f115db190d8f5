"""From a slot to an engine that answers, and the tasks beside it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.console.progress import Phase
from appliance.serve.background.loss_watch import LossWatch
from appliance.serve.background.memory_watch import MemoryWatch
from appliance.serve.background.other_work import OtherWork
from appliance.serve.background.tasks import BackgroundTasks
from appliance.serve.engine.choose_plan import choose_plan
from appliance.serve.engine.kernels import check_kernels
from appliance.serve.engine.load import launch, wait_loaded
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.gateway.stop import put_to_sleep
from appliance.serve.life.supervise import Tasks, serve_until_failure
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.gpus import cross_check_gpus
from appliance.serve.open.open import find_model
from appliance.system.detached import detached
from appliance.system.lack import outlast

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.plan import Plan


async def serve_model(slot: ModelSlot, backend: Backend) -> None:
    """Bring one of the models up and serve it. Never returns; raises FatalError once its engine is given up."""
    served = await bring_up(slot)
    await serve_until_failure(served, tasks_of(served, backend))


async def bring_up(slot: ModelSlot) -> ServedModel:
    """Fetch, plan and load the slot's model; returns when its engine answers.

    If it fails or is cancelled, the slot's engine is stopped first; the slot may be brought up again.
    """
    await prepare(slot)
    return await load(slot)


async def prepare(slot: ModelSlot) -> ServedModel:
    """Find and fetch the slot's model, if that was not done yet. Cancelled or failed, the slot stays absent."""
    try:
        if not (slot.served or slot.pending):
            # In a thread: requests to other models are answered meanwhile.
            slot.take(await detached(find_model, slot))
        return await fetched(slot)
    except BaseException:
        await _left(slot)
        raise


async def load(slot: ModelSlot) -> ServedModel:
    """Plan and load the model of a slot that was prepared. Cancelled or failed, its engine is stopped first."""
    served = slot.served
    if served is None:
        message = f"the model of this slot was not found yet: {slot.name}"
        raise RuntimeError(message)
    if slot.report.progress.phase is Phase.ASLEEP:
        slot.report.phase(Phase.STARTING)
    try:
        if not served.host.is_launched:
            plan = await outlast(partial(_chosen, slot, served), "choosing what to serve")
            launch(served, plan)
        await wait_loaded(served)
    except BaseException:
        await _left(slot)
        raise
    return served


async def _left(slot: ModelSlot) -> None:
    """Leave nothing behind of a slot that failed."""
    try:
        await put_to_sleep(slot)
    except Exception as failure:  # the first error is the one to raise
        slot.report.error("not_stopped", f"an engine may be left: {type(failure).__name__}: {failure}")


async def fetched(slot: ModelSlot) -> ServedModel:
    if slot.served:
        return slot.served
    # Imported late: a start whose model is on the volume never needs it.
    from appliance.serve.open.fetch import fetch_model

    return await fetch_model(slot)


async def _chosen(slot: ModelSlot, served: ServedModel) -> Plan:
    await check_kernels(served)
    await cross_check_gpus(served.hardware, served.environment, served.report)
    # Look again: the checks took seconds, and other engines may have been loaded or stopped since the model was opened.
    machine = await detached(slot.look)
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
