"""Data types: how busy the machine is and with whose work. `counters.py` reads the CPUs, the child `gpu_load.py` the
GPUs."""

from __future__ import annotations

from dataclasses import replace

from appliance.documents import load, read
from appliance.probe.machine.hardware import GpuHolder, GpuProbe
from appliance.run import Finished
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class GpuProcess(GpuHolder):
    utilization: int | None = None  # per cent of time in which its kernels ran; None if the driver does not report it


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """One device at one moment. Clocks and reasons of a MIG slice are those of its GPU."""

    index: int
    uuid: str | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    reasons: int | None = None  # NVML's bits for the reasons of not clocking higher
    utilization: int | None = None  # per cent of the last moments in which a kernel of any process ran
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuMoment:
    """One whole GPU at one moment, as the child `gpu_meter.py` reads it. `joules` are those since the driver was
    loaded."""

    index: int
    uuid: str | None = None
    joules: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    reasons: int | None = None  # NVML's bits for the reasons of not clocking higher
    utilization: int | None = None  # per cent

    @property
    def clock_share(self) -> float | None:
        """The clock relative to the highest; None if unknown."""
        if self.sm_clock_mhz is None or not self.sm_clock_max_mhz:
            return None
        return min(1.0, self.sm_clock_mhz / self.sm_clock_max_mhz)


@dataclass(frozen=True, kw_only=True)
class GpuMoments:
    """One answer of that child. `problem` says why nothing is known."""

    gpus: tuple[GpuMoment, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuLoads:
    """The child's samples, oldest first.

    The first and the last of `samples` were taken after our engine came to rest, so their `utilization` is foreign.
    `problem` says why there are no samples.
    """

    samples: tuple[tuple[GpuLoad, ...], ...] = ()
    own_pids: tuple[int, ...] = ()  # of our process tree during the measurement: an engine may have come and gone
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadSample:
    """Counters since boot, in seconds. None means unknown."""

    time_s: float  # monotonic
    cpus: int | None = None  # CPUs that we may use and that the next two fields count
    busy_s: float | None = None  # of all programs; interrupts are left out, because they cannot be attributed
    steal_s: float | None = None  # taken by a hypervisor for other machines while something here wanted to run
    own_s: float | None = None  # CPU time of our process, its descendants and those that have ended
    own_pids: frozenset[int] = frozenset()


def parse_answer(finished: Finished) -> GpuLoads:
    if finished.returncode == 0:
        return parse_gpu_loads(finished.stdout)
    last = (finished.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return GpuLoads(problem=f"the child that watches GPUs ended with {finished.returncode}: {last[:200]}")


def parse_gpu_loads(text: str) -> GpuLoads:
    """Parse the child's last line. Any other output becomes a problem, never an exception."""
    try:
        return read(GpuLoads, load(text.strip().rpartition("\n")[2]))
    except ValueError:
        return GpuLoads(problem=f"the output of the child that watches GPUs is not a report: {text[:80]!r}")


def only_known(loads: GpuLoads, known: GpuProbe) -> GpuLoads:
    """Return the samples without the devices that `only_visible` left out of the probe: they are not ours."""
    uuids = {gpu.uuid for gpu in known.gpus if gpu.uuid}
    nameless = {gpu.index for gpu in known.gpus if gpu.uuid is None}
    samples = tuple(
        tuple(gpu for gpu in sample if gpu.uuid in uuids or gpu.index in nameless) for sample in loads.samples
    )
    return replace(loads, samples=samples)
