"""Watch the machine while a block runs: `with Watch(hardware, environment) as watch: …; watch.conditions`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from appliance.probe.gpu.driver import reaching
from appliance.probe.load.conditions import Conditions, conditions
from appliance.probe.load.counters import query_load
from appliance.probe.load.load import GpuLoads, LoadSample, only_known, parse_answer
from appliance.probe.machine.hardware import Gpu, Hardware
from appliance.run import Running, RunTimeout
from appliance.system.detached import detached

T = TypeVar("T")
LOOK_EVERY_S = 1.0
CHILD = (sys.executable, "-m", "appliance.probe.load.gpu_load")
TIMEOUT_S = 15.0


class Watch:
    """Watches other load during one measurement.

    Our own engine must be at rest or absent when the block begins and ends: GPU load at these moments counts as
    foreign. Without GPUs this costs two samples of a millisecond or two. With GPUs a child samples before the block,
    during it, and up to 1.2 s after it, until the GPUs are at rest; its start and end are outside the measured
    interval. `async with` waits without blocking the event loop.
    """

    def __init__(
        self,
        hardware: Hardware,
        environment: Mapping[str, str],
        *,
        gpus: Sequence[Gpu] | None = None,
        sample: Callable[[], LoadSample] = query_load,
        child: Sequence[str] = CHILD,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`hardware` must be probed before our engine started: processes that held GPU memory then are foreign.

        Only `gpus` count, if given: a card that the engine cannot use may work for others.
        """
        self._known = hardware.gpus if gpus is None else replace(hardware.gpus, gpus=tuple(gpus))
        self._environment = reaching(environment, hardware.gpus.driver_dir, hardware.volume.path)
        self._sample = sample
        self._child = tuple(child)
        self._timeout_s = timeout_s
        self._gpus = GpuLoads()  # holds a `problem` if the child could not be started
        self._before: LoadSample
        self._running: Running | None = None
        self._is_wanted = True
        self._seen: Conditions | None = None

    @property
    def conditions(self) -> Conditions:
        """Conditions during the block. Raises RuntimeError before the block has ended without an exception."""
        if self._seen is None:
            message = "the conditions are known only after the watched block has ended"
            raise RuntimeError(message)
        return self._seen

    def so_far(self) -> Conditions:
        """CPU conditions so far, inside the block."""
        return conditions(self._before, self._sample(), known=self._known)

    async def until_crowded(self, *, every_s: float = LOOK_EVERY_S) -> str:
        """Return a description when others take much of the CPUs in two samples in a row: one may be a short event.

        May be called outside the block.
        """
        before: LoadSample | None = None
        was_crowded = False
        while True:
            with suppress(OSError):  # too many open files: the next sample is tried
                now = self._sample()
                words = conditions(before, now, known=self._known).crowd if before else None
                if words and was_crowded:
                    return words
                before, was_crowded = now, bool(words)
            await asyncio.sleep(every_s)

    def __enter__(self) -> Watch:
        self._seen = None
        self._gpus = GpuLoads() if not self._known.gpus else self._watched()
        self._before = self._sample()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        running, self._running = self._running, None
        if kind is not None:
            if running is not None:
                running.kill()
            return
        after = self._sample()
        self._seen = conditions(
            self._before,
            after,
            known=self._known,
            gpus=self._gpus if running is None else self._finished(running),
        )

    async def __aenter__(self) -> Watch:
        return await self._in_thread(self.__enter__)

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:  # a task that is being cancelled cannot wait for a thread
            self.__exit__(kind, *rest)
            return
        await self._in_thread(lambda: self.__exit__(None))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread. If cancelled, tell the thread, which stops within 0.05 s even if the driver hangs.

        A thread cannot be killed, and the child that it started must not be left behind.
        """
        self._is_wanted = True
        working = asyncio.create_task(detached(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._is_wanted = False
            try:
                await asyncio.gather(working, return_exceptions=True)
            finally:
                self.__exit__(asyncio.CancelledError)
            raise

    def _watched(self) -> GpuLoads:
        """Start the child and wait for its first sample."""
        try:
            running = Running(self._child, environment=self._environment)
            if not running.wait_line(timeout_s=self._timeout_s, is_wanted=lambda: self._is_wanted):
                return self._finished(running)
        except RunTimeout:
            return GpuLoads(problem=f"NVML did not answer within {self._timeout_s:g} s: the driver hangs")
        except OSError as error:
            return GpuLoads(problem=f"the child that watches GPUs could not be started: {error}")
        self._running = running
        return GpuLoads()

    def _finished(self, running: Running) -> GpuLoads:
        try:
            finished = running.finish(timeout_s=self._timeout_s, is_wanted=lambda: self._is_wanted)
        except RunTimeout:
            return GpuLoads(problem=f"NVML did not answer within {self._timeout_s:g} s: the driver hangs")
        return only_known(parse_answer(finished), self._known)
