"""How busy the machine is and with whose work: nouns. `counters.py` asks the CPUs, the child `gpu_load.py` the GPUs."""

from __future__ import annotations

from dataclasses import replace

from appliance.documents import load, read
from appliance.probe.machine.hardware import GpuHolder, GpuProbe
from appliance.run import Finished
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuProcess(GpuHolder):
    utilization: int | None = None  # per cent of the time in which its kernels ran; None: the driver does not tell


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """One device at one moment. Of a MIG slice clocks and reasons are those of the GPU that it is cut from."""

    index: int
    uuid: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    reasons: int | None = None  # NVML's bits for why it does not clock higher
    utilization: int | None = None  # per cent of the last moments in which a kernel ran, whoever's
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuLoads:
    """What the child saw, oldest first. In the first and the last of `samples` the devices had time to come to rest, so
    `utilization` there is somebody else's. `problem` says in words why there is nothing."""

    samples: tuple[tuple[GpuLoad, ...], ...] = ()
    own_pids: tuple[int, ...] = ()  # of our tree meanwhile: an engine may have come and gone
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Counters since the machine began, in seconds. None: nobody can say."""

    time_s: float  # monotonic
    cpus: int | None = None  # the CPUs that we may use and that are counted in the next two
    busy_s: float | None = None  # of programs, whoever's; interrupts are left out: they are anybody's
    steal_s: float | None = None  # that a hypervisor gave to others while something here wanted to run
    own_s: float | None = None  # CPU time of our process, its descendants and those of them that have ended
    own_pids: frozenset[int] = frozenset()


def parse_answer(finished: Finished) -> GpuLoads:
    if finished.returncode == 0:
        return parse_gpu_loads(finished.stdout)
    last = (finished.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return GpuLoads(problem=f"the child that watches GPUs ended with {finished.returncode}: {last[:200]}")


def parse_gpu_loads(text: str) -> GpuLoads:
    """What the child printed last. Anything else than its report is a problem, never an exception."""
    try:
        return read(GpuLoads, load(text.strip().rpartition("\n")[2]))
    except ValueError:
        return GpuLoads(problem=f"the child that watches GPUs printed another thing than its report: {text[:80]!r}")


def only_known(loads: GpuLoads, known: GpuProbe) -> GpuLoads:
    """Without the devices that `only_visible` left out of the probe: they are not ours."""
    uuids = {gpu.uuid for gpu in known.gpus if gpu.uuid}
    nameless = {gpu.index for gpu in known.gpus if gpu.uuid is None}
    samples = tuple(
        tuple(gpu for gpu in sample if gpu.uuid in uuids or gpu.index in nameless) for sample in loads.samples
    )
    return replace(loads, samples=samples)
