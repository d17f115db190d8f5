"""Child process that reads energy and clocks of all GPUs: one line of JSON for each line on its standard input.

It stays, so that a reading costs a millisecond and not the start of a program. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pynvml  # type: ignore[import-untyped]

from appliance.probe.gpu.nvml import GPUS_MAX, fact
from appliance.probe.load.gpu_load import clocks_of
from appliance.probe.load.load import GpuMoment, GpuMoments


def read() -> GpuMoments:
    """Return one reading. A GPU that does not answer has only its index."""
    try:
        count = min(pynvml.nvmlDeviceGetCount(), GPUS_MAX)
    except pynvml.NVMLError as error:
        return GpuMoments(problem=f"NVML: {error}")
    return GpuMoments(gpus=tuple(_moment(index) for index in range(count)))


def _moment(index: int) -> GpuMoment:
    handle = fact(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return GpuMoment(index=index)
    clocks = clocks_of(index, handle)
    rates = fact(pynvml.nvmlDeviceGetUtilizationRates, handle)
    millijoules = fact(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    return GpuMoment(
        index=index,
        uuid=fact(pynvml.nvmlDeviceGetUUID, handle),
        joules=None if millijoules is None else int(millijoules) / 1000,
        sm_clock_mhz=clocks.sm_clock_mhz,
        sm_clock_max_mhz=clocks.sm_clock_max_mhz,
        reasons=clocks.reasons,
        utilization=None if rates is None else int(rates.gpu),
    )


def main() -> int:
    problem = None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        problem = f"NVML: {error}"
    for _ in sys.stdin:
        moments = GpuMoments(problem=problem) if problem else read()
        print(json.dumps(asdict(moments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
