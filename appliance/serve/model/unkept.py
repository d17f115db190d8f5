"""Results of measuring that the volume cannot take, since it is full, read-only or over its quota.

They are used from memory, and written when the volume has room again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from appliance.errors import VolumeError
from appliance.race import first_of

if TYPE_CHECKING:
    from appliance.console.report import Report
    from appliance.profile import Key, Profile, ProfileStore
    from appliance.tune.checkpoint import Partial

TRY_EVERY_S = 60.0


class Unkept:
    """An unfinished tuning's results, or a profile, that belongs on the volume under `key` and is only in memory.

    `is_enough` is False if nothing is served from memory: then `hold` raises the error of the volume.
    """

    def __init__(self, store: ProfileStore, report: Report, *, try_every_s: float = TRY_EVERY_S) -> None:
        self._store = store
        self._report = report
        self._try_every_s = try_every_s
        self._is_told = False
        self._is_wanted = asyncio.Event()  # set while there is a profile to write
        self._is_asked = asyncio.Event()  # set by a client that waits: the volume may have room by now
        self.is_enough = True
        self.key: Key | None = None
        self.partial: Partial | None = None
        self.profile: Profile | None = None

    def hold(
        self, key: Key, error: VolumeError, *, partial: Partial | None = None, profile: Profile | None = None
    ) -> None:
        """Keep the result in memory and say so once. Raises `error` unless memory is enough."""
        if not self.is_enough:
            raise error
        self.key, self.partial, self.profile = key, partial, profile
        if profile is not None:
            self._is_wanted.set()
        if not self._is_told:
            words = f"{error.message}; it is used from memory, and kept when the volume has room"
            self._report.warning("not_kept", words)
        self._is_told = True

    def clear(self) -> None:
        """Forget the result: the volume has it, or a newer one."""
        self.key, self.partial, self.profile = None, None, None
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
            profile = self.profile
            if profile is None:
                continue
            try:
                is_kept = await asyncio.to_thread(self._store.save, profile)
            except VolumeError:
                continue  # `hold` has said so
            if profile is self.profile:
                self.clear()
            what = "is on the volume now" if is_kept else "is not written: the one on the volume stays"
            self._report.info("profile_kept", f"profile {profile.key.id} {what}", profile=profile.key.id)
