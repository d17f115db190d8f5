"""Bandwidths of a new machine, measured once in idle time: some seconds while the engine stays loaded.

Figures measured while other programs worked are not kept, since every later start would trust them: they are measured
again in a later idle minute. Plans of this process stay as predicted; the next start, `plan` and `probe` use the
measured figures.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from appliance.errors import VolumeError
from appliance.probe import SPEEDS_FOLDER, Speeds, probe
from appliance.race import first_of
from appliance.serve.background.idle_policy import CHECK_AGAIN_S, SETTLE_S
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    # for types only: importing the gateway takes half a second
    from appliance.gateway.clients.traffic import Traffic
    from appliance.probe.bandwidth.measure import Measured

AGAIN_S, AGAIN_MOST_S = 60.0, 3600.0  # wait after a disturbed measuring, doubled each time
_LOOK_EVERY_S = 0.5


class Bandwidths:
    """Measures the bandwidths until they are known. `is_known` is True once they are kept."""

    def __init__(self, served: ServedModel, *, alone: asyncio.Lock | None = None) -> None:
        """Hold `alone` while measuring: probes of the engine use the same lock."""
        self._served = served
        self._alone = alone or asyncio.Lock()
        self.is_known = False
        self._pause_s = min(AGAIN_S, served.settings.idle_s)
        self._not_before = 0.0
        self._is_told = False

    async def measure(self, traffic: Traffic) -> None:
        """Measure once, unless the last disturbed try was too recent.

        A request ends it within 0.1 s, and it begins again in the next pause. Raises nothing: without figures, plans
        use what the probe reads.
        """
        if self.is_known or time.monotonic() < self._not_before:
            return
        disturbance = await _measure_once(self._served, traffic, self._alone)
        self.is_known = not disturbance
        if disturbance:
            self._tell_once(disturbance)
            self._not_before = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, AGAIN_MOST_S)

    def _tell_once(self, disturbance: str) -> None:
        if not self._is_told:
            words = "no bandwidth is kept; measured again in a later idle minute"
            self._served.report.info("bandwidth_disturbed", f"{disturbance}: {words}")
        self._is_told = True

    async def until_known(self, traffic: Traffic) -> None:
        """Measure until it succeeds, with ever longer waits between the tries."""
        while not self.is_known:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            await self.measure(traffic)


async def _measure_once(served: ServedModel, traffic: Traffic, alone: asyncio.Lock) -> str:
    """Measure and keep the figures. Returns what disturbed it, empty if nothing did."""
    while True:
        await _until_quiet(served, traffic)
        served.report.info(
            "bandwidth_measure", "idle: measuring the bandwidth of memory and GPUs, once on this machine"
        )
        async with alone:
            measuring, _ = await first_of(_undisturbed(served), traffic.until_arrival())
        if not measuring.cancelled():
            break
        served.report.info("bandwidth_stopped", "a request came: bandwidths are measured in the next pause")
    found: Measured | str | None = measuring.result()
    if isinstance(found, str):
        return found
    if found is not None:
        await _keep(served, found)
    return ""


async def _undisturbed(served: ServedModel) -> Measured | str | None:
    """Return the figures, or what disturbed them.

    GPUs are looked at only before and after: a driver that numbers processes as the host does would take our own
    measuring child for another program.
    """
    if busy := await served.what_else_works():
        return busy
    async with served.watch(with_gpus=False) as watching:
        measuring, crowding = await first_of(_measure(served), served.until_crowded())
    if measuring.cancelled():
        return str(crowding.result())
    found: Measured | str | None = measuring.result()
    busy = watching.conditions.disturbance or ""
    if not busy and served.hardware.gpus.gpus:
        busy = await served.what_else_works()
    return busy or found


async def _until_quiet(served: ServedModel, traffic: Traffic) -> None:
    rest_s = min(SETTLE_S, served.settings.idle_s)
    while True:
        left_s = rest_s - traffic.idle_s
        if served.host.is_ready and not traffic.running and left_s <= 0:
            return
        await first_of(traffic.until_arrival(), timeout_s=max(_LOOK_EVERY_S, left_s))
        await traffic.until_idle(CHECK_AGAIN_S)


async def _measure(served: ServedModel) -> Measured | None:
    """Measure in a child process; None if it was ended."""
    from appliance.probe.bandwidth.measure import (
        measure_beside,  # here: a start on a machine that is known never needs it
    )

    is_wanted = True
    try:
        # Probed anew: memory that is free beside the engine.
        hardware = await detached(probe, served.settings.data_dir, served.environment)
        engine_dir = served.start.install.engine_dir
        return await detached(measure_beside, hardware, engine_dir, served.environment, is_wanted=lambda: is_wanted)
    finally:
        is_wanted = False


async def _keep(served: ServedModel, found: Measured) -> None:
    from appliance.probe.bandwidth.speeds import save_speeds  # here: a start on a machine that is known never needs it

    try:
        path = await detached(save_speeds, served.settings.data_dir / SPEEDS_FOLDER, served.hardware, found.speeds)
    except VolumeError as error:  # serving goes on; the next start measures again
        served.report.warning("bandwidth_not_kept", error.message)
        return
    words = "; ".join((*_figures(served, found.speeds), *found.problems))
    served.report.info("bandwidth_measured", f"measured in idle time: {words}", path=str(path))


def _figures(served: ServedModel, speeds: Speeds) -> list[str]:
    names = {gpu.uuid: gpu.name or f"GPU {gpu.index}" for gpu in served.hardware.gpus.gpus}
    said = [] if speeds.dram_gb_s is None else [f"host memory {speeds.dram_gb_s:.1f} GB/s"]
    for gpu in speeds.gpus:
        rates = (("memory", gpu.memory_gb_s), ("from pinned memory", gpu.pinned_gb_s), ("pageable", gpu.pageable_gb_s))
        known = ", ".join(f"{name} {rate:,.1f} GB/s" for name, rate in rates if rate is not None)
        said.append(f"{names.get(gpu.uuid, gpu.uuid)}: {known or 'nothing could be measured'}")
    return said
