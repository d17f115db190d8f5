"""Whether GPUs compute, for a start of which no process is seen to work: kernels may run for minutes by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.probe.gpu_load import REST_UTILIZATION
from appliance.probe.load import parse_answer
from appliance.probe.watch import CHILD
from appliance.run import RunTimeout, run

TIMEOUT_S = 4.5  # less than the supervisor waits for an answer


def gpus_at_work(
    uuids: Sequence[str], environment: Mapping[str, str] | None = None, *, child: Sequence[str] = CHILD
) -> bool:
    """One of these, for the whole of two looks of a second. A driver that hangs does no work. Blocks for seconds;
    `environment` None is ours."""
    try:
        found = parse_answer(run(child, environment=environment, timeout_s=TIMEOUT_S))
    except (RunTimeout, OSError):
        return False
    busy = [
        {gpu.uuid for gpu in sample if (gpu.utilization or 0) > REST_UTILIZATION} & set(uuids)
        for sample in found.samples
    ]
    return bool(busy) and bool(set.intersection(*busy))
