"""Whether GPUs compute, for an engine whose processes are not seen to work: a kernel may run for minutes by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

TIMEOUT_S = 4.5  # less than the supervisor waits for an answer


def gpu_work_of(uuids: Iterable[str]) -> Callable[[], bool] | None:
    """Return a function that says whether one of these computes now; None without any: processes show a CPU's work."""
    ids = tuple(uuids)
    return (lambda: gpus_at_work(ids)) if ids else None


def gpus_at_work(
    uuids: Sequence[str], environment: Mapping[str, str] | None = None, *, child: Sequence[str] | None = None
) -> bool:
    """True if one of these computes for the whole of two looks of a second. A driver that hangs does no work. Blocks
    for seconds; `environment` None is ours."""
    # Here: no start that goes well needs NVML.
    from appliance.probe.load.gpu_load import REST_UTILIZATION
    from appliance.probe.load.load import parse_answer
    from appliance.probe.load.watch import CHILD
    from appliance.run import RunTimeout, run

    try:
        found = parse_answer(run(child or CHILD, environment=environment, timeout_s=TIMEOUT_S))
    except (RunTimeout, OSError):
        return False
    busy = [
        {gpu.uuid for gpu in sample if (gpu.utilization or 0) > REST_UTILIZATION} & set(uuids)
        for sample in found.samples
    ]
    return bool(busy) and bool(set.intersection(*busy))
