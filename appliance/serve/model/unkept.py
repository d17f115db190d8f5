"""Results of measuring that the volume does not have yet, or cannot take: it is full, read-only, over its quota or
hangs.

They are used from memory, and written in threads: soon, or when the volume has room again.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

from appliance.errors import VolumeError
from appliance.race import first_of
from appliance.system.background_writer import BackgroundWriter
from appliance.system.detached import answered, detached

if TYPE_CHECKING:
    from appliance.console.report import Report
    from appliance.profile import Key, Profile, ProfileStore
    from appliance.tune.checkpoint import Partial

TRY_EVERY_S = 60.0


class Unkept:
    """An unfinished tuning's results, or a profile, that belongs on the volume and is only in memory.

    `is_enough` is False if nothing is served from memory: then the error of the volume is raised.
    """

    def __init__(self, store: ProfileStore, report: Report, *, try_every_s: float = TRY_EVERY_S) -> None:
        self._store = store
        self._report = report
        self._try_every_s = try_every_s
        self._is_told = False
        self._is_wanted = asyncio.Event()  # set while there is a profile to write
        self._is_asked = asyncio.Event()  # set by a client that waits: the volume may have room by now
        self._writer = BackgroundWriter("results", self._write_partial, every_s=0.0, again_s=try_every_s)
        self._lock = threading.Lock()  # of the files: results must not follow a profile that has replaced them
        self.is_enough = True
        self._results: tuple[Key, Partial] | None = None  # one attribute, since a thread reads both
        self._profile: Profile | None = None

    def keep(self, key: Key, results: Partial) -> None:
        """Keep the results so far of an unfinished tuning: at once if memory is not enough, else soon. Raises
        VolumeError if memory is not enough."""
        if not self.is_enough:
            self._store.keep(key, results)
            return
        self._results = key, results
        self._writer.wake()

    def results(self, key: Key) -> Partial:
        """Return the results of unfinished tunings for the key; empty if there are none. May wait for the volume."""
        held = self._results
        return held[1] if held and held[0] == key else self._store.kept(key)

    async def save(self, profile: Profile) -> bool:
        """Save the profile, which replaces the results so far. False if another one stays. Raises VolumeError if memory
        is not enough."""
        try:
            is_kept = await answered(partial(self._saved, profile, self._results), self._store.folder)
        except VolumeError as error:
            self.hold(profile, error)
            return True
        self.clear()
        return is_kept

    def hold(self, profile: Profile, error: VolumeError) -> None:
        """Keep the profile in memory and say so once. Raises `error` unless memory is enough."""
        if not self.is_enough:
            raise error
        self._profile = profile
        if profile.goes_on_from is None:
            self._results = None
        self._is_wanted.set()
        self._tell(error)

    def holds(self, profile: Profile) -> bool:
        """True if the profile is only in memory."""
        return self._profile is profile

    def exchange(self, before: Profile, after: Profile) -> None:
        """Write `after` in the place of `before`, if that is held: its checks went on."""
        if self._profile is before:
            self._profile = after

    def close(self, timeout_s: float) -> None:
        """Write results that are left. Waits for `timeout_s` at most."""
        self._writer.close(timeout_s)

    def _saved(self, profile: Profile, replaced: tuple[Key, Partial] | None = None) -> bool:
        """Save the profile. `replaced` are the results that it was made of, if they may not be written yet."""
        with self._lock:
            if replaced is not None and profile.goes_on_from is not None:
                self._store.keep(*replaced)
            is_kept = self._store.save(profile)
            if self._results is replaced:
                self._results = None
            return is_kept

    def _write_partial(self, _before: str) -> str:
        with self._lock:
            held = self._results
            if held is None:
                return ""
            try:
                self._store.keep(*held)
            except VolumeError as error:
                self._tell(error)
                self._writer.wake()
                return error.message
            if self._results is held:
                self._results = None
            return ""

    def _tell(self, error: VolumeError) -> None:
        if not self._is_told:
            words = f"{error.message}; it is used from memory, and kept when the volume has room"
            self._report.warning("not_kept", words)
        self._is_told = True

    def clear(self) -> None:
        """Forget the profile: the volume has it, or a newer one."""
        self._profile = None
        self._is_told = False
        self._is_wanted.clear()

    def try_now(self) -> None:
        """Write at once instead of within a minute."""
        self._is_asked.set()

    async def write(self) -> None:
        """Write a held profile as soon as the volume takes it. Never returns."""
        while True:
            await self._is_wanted.wait()
            await first_of(self._is_asked.wait(), timeout_s=self._try_every_s)
            self._is_asked.clear()
            profile = self._profile
            if profile is None:
                continue
            try:
                is_kept = await detached(self._saved, profile)
            except VolumeError:
                continue  # `hold` has said so
            if profile is self._profile:
                self.clear()
            what = "is on the volume now" if is_kept else "is not written: the one on the volume stays"
            self._report.info("profile_kept", f"profile {profile.key.id} {what}", profile=profile.key.id)
