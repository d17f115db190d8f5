"""Models that come to the volume while others serve, and a volume that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from appliance.console.report import Report
from appliance.serve.fleet.catalogue import Named
from appliance.system.detached import HANGS_S, detached
from appliance.system.lack import outlast

LOOK_EVERY_S = 5.0  # whether files have come to the volume
FRESH_S = 2.0
WAIT_S = 5.0  # most time that a client waits for a look


class Arrivals:
    """Looks at the volume, one look at a time, in threads that nothing waits for: the volume may hang."""

    def __init__(
        self,
        models_dir: Path,
        report: Report,
        *,
        is_ready: Callable[[], bool],
        scan: Callable[[], Callable[[], Iterable[Named]]],
        welcome: Callable[[Named], None],
        silent_s: Callable[[], float],
    ) -> None:
        """Nothing is looked for until `is_ready`: the first model may be on its way. `scan` returns a call, for a
        thread, that finds models that are not known yet. `silent_s` tells for how long a write has hung."""
        self._models_dir = models_dir
        self._report = report
        self._is_ready = is_ready
        self._scan = scan
        self._welcome = welcome
        self._silent_s = silent_s
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self._seen: tuple[int, ...] = ()
        self._told = ""  # why the last look failed
        self.problem = ""  # that the volume does not answer; empty if it does

    async def watch(self) -> None:
        """Look whenever the folder of models has changed. Never returns."""
        asking: asyncio.Task[tuple[int, ...]] | None = None
        ask = partial(outlast, partial(detached, self._folder_times), "looking at the volume")
        try:
            while True:
                asking = asking or asyncio.create_task(ask())
                await asyncio.wait((asking,), timeout=HANGS_S)
                self._judge(is_read=asking.done())
                if asking.done():
                    folders, asking = asking.result(), None
                    if folders != self._seen and self._is_ready() and not self._is_looking:
                        self._seen = folders
                        self._begin()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            for task in (asking, self._looking):
                if task is not None:
                    task.cancel()

    def _folder_times(self) -> tuple[int, ...]:
        try:
            return (self._models_dir.stat().st_mtime_ns,)
        except OSError:  # the folder is gone: nothing has come
            return self._seen

    def _judge(self, *, is_read: bool) -> None:
        """Say once that the volume does not answer, and once that it does again."""
        before, is_silent = self.problem, not is_read or self._silent_s() >= HANGS_S
        place = self._models_dir.parent
        self.problem = f"volume does not answer: {place}" if is_silent else ""
        if is_silent and not before:
            words = "loaded models go on; no other is loaded, and nothing is kept, until it answers"
            self._report.warning("volume_silent", f"{self.problem}: {words}; check the disk, or the network share")
        elif before and not is_silent:
            self._report.info("volume_answers", f"volume answers again: {place}")

    async def look(self) -> None:
        """Look for models that have come to the volume, at most every FRESH_S seconds. Waits for WAIT_S at most."""
        is_fresh = asyncio.get_running_loop().time() - self._looked_at < FRESH_S
        if self._is_ready() and not is_fresh:
            await asyncio.wait((self._begin(),), timeout=0.0 if self.problem else WAIT_S)

    @property
    def _is_looking(self) -> bool:
        return self._looking is not None and not self._looking.done()

    def _begin(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looked_at = asyncio.get_running_loop().time()
            self._looking = asyncio.create_task(self._take_in(), name="looking for models")
        return self._looking

    async def _take_in(self) -> None:
        try:
            scan = self._scan()
            for named in await detached(lambda: list(scan())):
                self._welcome(named)
        except Exception as error:  # what lies on the volume must not end the models that serve
            words = f"models that came to the volume are not listed: {type(error).__name__}: {error}"
            if words != self._told:
                self._report.warning("models_not_listed", words)
            self._told = words
