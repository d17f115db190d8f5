"""Child process that samples GPUs until its standard input ends, then prints JSON.

Clocks, reasons and utilization are momentary values, so they must be sampled during the measurement. The first and the
last sample are taken at rest: utilization is an average of up to a second, so the child waits until it has fallen. It
prints a line after the first sample. If its parent dies, its input ends and it exits.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pynvml  # type: ignore[import-untyped]

from appliance.probe.gpu.nvml import GPUS_MAX, fact, holders_of, is_cut, slices_of
from appliance.probe.load.load import GpuLoad, GpuLoads, GpuProcess
from appliance.probe.load.processes import query_tree

EVERY_S = 0.5
SAMPLES_MAX = 240  # two minutes; beyond that every second sample is dropped and the interval doubles
REST_S = 1.2  # utilization is averaged over at most a second
REST_UTILIZATION = 2
RUNNING_S = 1.0
_SAMPLE_S = 0.1


def watch(parent: int) -> GpuLoads:
    """Sample until the input ends and return the report. Our own work is the process tree below `parent`."""
    first = at_rest()
    print("watching", flush=True)
    samples: list[tuple[GpuLoad, ...]] = []
    own_pids: set[int] = set()
    every_s = EVERY_S
    while not _is_over(every_s):
        samples.append(tuple(query_loads()))
        own_pids |= query_tree(parent).keys()
        if len(samples) > SAMPLES_MAX:
            samples, every_s = samples[1::2], every_s * 2
    return GpuLoads(samples=(first, *samples, at_rest()), own_pids=tuple(sorted(own_pids)))


def at_rest() -> tuple[GpuLoad, ...]:
    """Return one sample with the lowest `utilization` seen within REST_S."""
    deadline_s = time.monotonic() + REST_S
    seen = tuple(query_loads())
    while time.monotonic() < deadline_s and any((gpu.utilization or 0) > REST_UTILIZATION for gpu in seen):
        time.sleep(_SAMPLE_S)
        seen = tuple(_least(*pair) for pair in zip(seen, query_loads(), strict=True))
    return seen


def query_loads() -> Iterator[GpuLoad]:
    """Yield one sample per device. Raises NVMLError if the devices cannot even be counted."""
    for index in range(min(pynvml.nvmlDeviceGetCount(), GPUS_MAX)):
        handle = fact(pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            yield GpuLoad(index=index)
            continue
        whole = clocks_of(index, handle)
        for device in slices_of(handle) if is_cut(handle) else (handle,):
            yield _with_use(whole, device)


def clocks_of(index: int, handle: Any) -> GpuLoad:  # noqa: ANN401 - NVML's opaque pointer
    """Return the clocks of a whole GPU and the reasons for them, without its use."""
    reasons = fact(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # its name before driver 535
        reasons = fact(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return GpuLoad(
        index=index,
        sm_clock_mhz=fact(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=fact(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        reasons=reasons,
    )


def _with_use(whole: GpuLoad, device: Any) -> GpuLoad:  # noqa: ANN401
    rates = fact(pynvml.nvmlDeviceGetUtilizationRates, device)
    holders = holders_of(device)
    running = _running(device, [holder["pid"] for holder in holders])
    return replace(
        whole,
        uuid=fact(pynvml.nvmlDeviceGetUUID, device),
        utilization=None if rates is None else int(rates.gpu),
        processes=tuple(GpuProcess(**holder, utilization=running.get(holder["pid"])) for holder in holders),
    )


def _running(device: Any, pids: list[int]) -> dict[int, int]:  # noqa: ANN401
    """Return the per cent of the last second by pid.

    Empty if the driver does not report it, or if it reports other pids than the holders, as when only one of its two
    lists uses this container's pids.
    """
    since_us = int((time.time() - RUNNING_S) * 1e6)
    try:
        entries = pynvml.nvmlDeviceGetProcessUtilization(device, since_us)
    except pynvml.NVMLError as error:
        # "No entry" is an answer: no process ran.
        return dict.fromkeys(pids, 0) if error.value in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND) else {}
    newest = {entry.pid: min(100, entry.smUtil) for entry in sorted(entries, key=lambda entry: entry.timeStamp)}
    return {pid: newest.get(pid, 0) for pid in pids} if newest.keys() & set(pids) else {}


def _least(one: GpuLoad, other: GpuLoad) -> GpuLoad:
    known = [gpu.utilization for gpu in (one, other) if gpu.utilization is not None]
    return replace(other, utilization=min(known, default=None))


def _is_over(wait_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], wait_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def main() -> int:
    parent = os.getppid()
    try:
        pynvml.nvmlInit()
        report = watch(parent)
    except pynvml.NVMLError as error:
        report = GpuLoads(problem=f"NVML: {error}")
    json.dump(asdict(report), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
