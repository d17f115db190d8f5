"""Energy so far, and the clocks of GPUs now. What cannot be read is None, never 0 or a guess."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from appliance.documents import load, read
from appliance.probe.gpu.driver import reaching
from appliance.probe.load.load import GpuMoment, GpuMoments
from appliance.probe.load.rapl import CpuEnergy
from appliance.probe.machine.hardware import Gpu, Hardware
from appliance.run import Dialog, RunTimeout
from appliance.values import dataclass

CHILD = (sys.executable, "-m", "appliance.probe.load.gpu_meter")
FIRST_S, LATER_S = 15.0, 2.0  # time limits of the child's answers; the first loads the driver
KEPT = 600  # readings
WATTS_OVER_S = 0.8  # two readings closer than that tell no power: counters move in steps of up to 0.1 s
WATTS_HOLD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading. `joules` are those of the devices that compute, since the meter's first reading."""

    time_s: float  # monotonic
    joules: float | None = None
    gpus: tuple[GpuMoment, ...] = ()

    def is_fresh(self, seconds: float) -> bool:
        """True if it is at most so many seconds old."""
        return time.monotonic() - self.time_s <= seconds


class Meter:
    """Reads the energy of `gpus` and of the CPUs; without GPUs, of the CPUs alone.

    The joules of a GPU are those of the whole card, with the work of other programs. Those of the CPUs are added to
    them if they can be read. NVML is asked in a child process that is started with the first reading. A child that does
    not answer is ended, and not started again.
    """

    def __init__(
        self,
        hardware: Hardware,
        environment: Mapping[str, str],
        gpus: Iterable[Gpu] = (),
        *,
        root: Path = Path("/"),
        child: Sequence[str] = CHILD,
        first_s: float = FIRST_S,
    ) -> None:
        self._first_s = first_s
        self._gpus = tuple(gpus)
        self._environment = reaching(environment, hardware.gpus.driver_dir, hardware.volume.path)
        self._argv = tuple(child)
        self._child: Dialog | None = None
        self._cpu = CpuEnergy(root)
        self._lock = threading.Lock()
        self._first: dict[str, float] = {}  # joules of each GPU at the first reading, by uuid
        self.readings: deque[Reading] = deque(maxlen=KEPT)
        self.problem = ""
        """Why the GPUs cannot be read; empty if they can, or if there are none."""
        self.why_unknown = "not read yet"
        """Why the energy is unknown; empty if it is known."""

    @property
    def has_gpus(self) -> bool:
        return bool(self._gpus)

    @property
    def last(self) -> Reading | None:
        readings = self.readings
        return readings[-1] if readings else None

    def read(self, *, fresh_s: float = 0.0) -> Reading:
        """Return a reading that is at most `fresh_s` old. Takes a millisecond or two, and blocks up to the child's time
        limit: call it in a thread."""
        asked_s = time.monotonic()
        with self._lock:
            # Another thread may have read while this one waited.
            if (last := self.last) is not None and last.time_s >= asked_s - fresh_s:
                return last
            gpus = self._ask() if self._gpus and not self.problem else ()
            cpu = self._cpu.read()
            reading = Reading(time_s=time.monotonic(), joules=self._sum(gpus, cpu), gpus=gpus)
            self.readings.append(reading)
            return reading

    def since(self, time_s: float) -> list[Reading]:
        """Return the kept readings since that moment, oldest first."""
        return [reading for reading in tuple(self.readings) if reading.time_s >= time_s]

    @property
    def watts(self) -> float | None:
        """Mean power between the last two readings that are far enough apart; None if unknown or too long ago."""
        readings = tuple(self.readings)
        if not readings or readings[-1].joules is None or time.monotonic() - readings[-1].time_s > WATTS_HOLD_S:
            return None
        last = readings[-1]
        for before in reversed(readings):
            seconds = last.time_s - before.time_s
            if seconds >= WATTS_OVER_S:
                is_known = before.joules is not None and last.joules is not None and seconds <= WATTS_HOLD_S
                return (last.joules - before.joules) / seconds if is_known else None  # type: ignore[operator]
        return None

    def rest(self) -> None:
        """End the child, unless it is being asked. The next reading starts another."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """End the child at once, even if it is being asked: a driver may hang."""
        self._close()

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self) -> tuple[GpuMoment, ...]:
        is_first = self._child is None
        try:
            if self._child is None:
                self._child = Dialog(self._argv, environment=self._environment)
            told = read(GpuMoments, load(self._child.ask("", timeout_s=self._first_s if is_first else LATER_S)))
        except RunTimeout:
            self.problem = "NVML did not answer in time: the driver hangs"
        except (OSError, ValueError) as error:
            self.problem = f"the child that reads energy and clocks failed: {error}"
        else:
            if told.problem is None:
                uuids = {gpu.mig_parent or gpu.uuid for gpu in self._gpus}
                return tuple(gpu for gpu in told.gpus if gpu.uuid in uuids)
            self.problem = told.problem
        self._close()
        return ()

    def _sum(self, gpus: tuple[GpuMoment, ...], cpu: float | None) -> float | None:
        self.why_unknown = self._why_unknown(gpus, cpu)
        if self.why_unknown:
            return None
        whole = cpu or 0.0
        for gpu in gpus:
            uuid, joules = gpu.uuid or "", gpu.joules or 0.0
            whole += max(0.0, joules - self._first.setdefault(uuid, joules))
        return whole

    def _why_unknown(self, gpus: tuple[GpuMoment, ...], cpu: float | None) -> str:
        if not self._gpus:
            return "" if cpu is not None else self._cpu.why_unknown
        if any(gpu.mig_parent for gpu in self._gpus):
            return "the driver counts the energy of a whole GPU, not of a MIG slice"
        if self.problem:
            return self.problem
        known = {gpu.uuid for gpu in gpus if gpu.joules is not None}
        silent = [str(gpu.index) for gpu in self._gpus if gpu.uuid not in known]
        return f"the driver tells no energy of GPU {', '.join(silent)}" if silent else ""


class EnergyUse:
    """Joules of the times in which answers were made, and the tokens of those answers."""

    def __init__(self) -> None:
        self._joules = 0.0
        self._tokens = 0

    def add(self, joules: float | None, tokens: int | None) -> None:
        """Count one such time. It counts for nothing if either is unknown."""
        if joules is not None and tokens:
            self._joules += joules
            self._tokens += tokens

    @property
    def wh_per_1000_tokens(self) -> float | None:
        return self._joules / 3600 / self._tokens * 1000 if self._tokens else None
