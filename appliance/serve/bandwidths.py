"""The bandwidths of a new machine, measured once while nobody asks: seconds, beside the engine that serves.

What was measured while something else was at work is not kept, since it would be believed for good: it is measured
again in a later idle minute. Plans of this process stay as they were predicted; the next start, `plan` and `probe` go
by what was measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from appliance.errors import VolumeError
from appliance.probe import SPEEDS_FOLDER, Speeds, probe
from appliance.race import first_of
from appliance.serve.idle_policy import CHECK_AGAIN_S, SETTLE_S

if TYPE_CHECKING:
    # For the names only: what the gateway needs to run takes half a second to import.
    from appliance.gateway.clients.traffic import Traffic
    from appliance.probe.bandwidth.measure import Measured
    from appliance.serve.served_model import ServedModel

AGAIN_S, AGAIN_MOST_S = 60.0, 3600.0  # from one disturbed measuring to the next: twice as long each time
_LOOK_EVERY_S = 0.5


class Bandwidths:
    """Whether they are known, and when they are measured again where something disturbed that."""

    def __init__(self, served: ServedModel, *, alone: asyncio.Lock | None = None) -> None:
        """`alone` is held while they are measured."""
        self._served = served
        self._alone = alone or asyncio.Lock()
        self.is_known = False
        self._pause_s = min(AGAIN_S, served.settings.idle_s)
        self._not_before = 0.0
        self._is_told = False

    async def measure(self, traffic: Traffic) -> None:
        """Once, unless that is too soon after the last time. A request ends it within a tenth of a second; it begins
        again when nobody asks. Raises nothing: without figures plans go by what the probe reads."""
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
        """However often something disturbs it, ever less often."""
        while not self.is_known:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            await self.measure(traffic)


async def _measure_once(served: ServedModel, traffic: Traffic, alone: asyncio.Lock) -> str:
    """What disturbed it, in words; else what was measured is kept."""
    while True:
        await _until_quiet(served, traffic)
        served.report.info(
            "bandwidth_measure", "nobody asks: measuring the bandwidth of memory and GPUs, once on this machine"
        )
        async with alone:
            measuring, _ = await first_of(_undisturbed(served), traffic.until_arrival())
        if not measuring.cancelled():
            break
        served.report.info("bandwidth_stopped", "a request came: bandwidths are measured when nobody asks")
    found: Measured | str | None = measuring.result()
    if isinstance(found, str):
        return found
    if found is not None:
        await _keep(served, found)
    return ""


async def _undisturbed(served: ServedModel) -> Measured | str | None:
    """Or what else was at work. GPUs are looked at while ours rest: a driver that numbers processes as the host does
    would take the child that copies for somebody else."""
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
    """None where it was ended."""
    from appliance.probe.bandwidth.measure import (
        measure_beside,  # here: a start on a machine that is known never needs it
    )

    is_wanted = True
    try:
        # What is free now, beside the engine.
        hardware = await asyncio.to_thread(probe, served.settings.data_dir, served.environment)
        engine_dir = served.start.install.engine_dir
        return await asyncio.to_thread(
            measure_beside, hardware, engine_dir, served.environment, is_wanted=lambda: is_wanted
        )
    finally:
        is_wanted = False


async def _keep(served: ServedModel, found: Measured) -> None:
    from appliance.probe.bandwidth.speeds import save_speeds  # here: a start on a machine that is known never needs it

    try:
        path = await asyncio.to_thread(
            save_speeds, served.settings.data_dir / SPEEDS_FOLDER, served.hardware, found.speeds
        )
    except VolumeError as error:  # serving goes on; the next start measures again
        served.report.warning("bandwidth_not_kept", error.message)
        return
    words = "; ".join((*_figures(served, found.speeds), *found.problems))
    served.report.info("bandwidth_measured", f"measured while nobody asked: {words}", path=str(path))


def _figures(served: ServedModel, speeds: Speeds) -> list[str]:
    names = {gpu.uuid: gpu.name or f"GPU {gpu.index}" for gpu in served.hardware.gpus.gpus}
    said = [] if speeds.dram_gb_s is None else [f"host memory {speeds.dram_gb_s:.1f} GB/s"]
    for gpu in speeds.gpus:
        rates = (("memory", gpu.memory_gb_s), ("from pinned memory", gpu.pinned_gb_s), ("pageable", gpu.pageable_gb_s))
        known = ", ".join(f"{name} {rate:,.1f} GB/s" for name, rate in rates if rate is not None)
        said.append(f"{names.get(gpu.uuid, gpu.uuid)}: {known or 'nothing could be measured'}")
    return said
