"""Check whether GPUs compute. One kernel may run for minutes without CPU time, and the engine then looks stalled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

TIMEOUT_S = 4.5  # below the time that the supervisor waits for an answer


def gpu_work_of(uuids: Iterable[str]) -> Callable[[], bool] | None:
    """Return a function that is True if one of these GPUs computes now. None without GPUs: CPU time of the processes
    then shows the work."""
    ids = tuple(uuids)
    return (lambda: gpus_at_work(ids)) if ids else None


def gpus_at_work(
    uuids: Sequence[str], environment: Mapping[str, str] | None = None, *, child: Sequence[str] | None = None
) -> bool:
    """True if one of these GPUs computes in all samples of one second each. False if the driver hangs or does not
    answer. Blocks for seconds. If `environment` is None, the child inherits ours."""
    # Imported here, since a start that goes well needs no NVML.
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
