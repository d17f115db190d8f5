"""What a tuning that was broken off has measured so far: `<id>.partial`, until there is a profile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key

if TYPE_CHECKING:
    from appliance.tune.checkpoint import Partial


class UnfinishedTunings:
    """`warn` is told about a file that cannot be read."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def keep(self, key: Key, partial: Partial) -> None:
        """Raises VolumeError."""
        from appliance.profile.partial import dump_partial  # here: a start from a profile never needs it

        path = self._files.path(key.id, ".partial")
        with self._files.locked(key.id), refusing(f"what was measured cannot be kept: {path}"):
            self._files.drop_leftovers(key.id)
            self._files.put(path, dump_partial(key, partial).encode())

    def kept(self, key: Key) -> Partial:
        """What cannot be read is said, set aside if it can be, and measured again: no reason to fail."""
        # Here: a start from a profile never needs it.
        from appliance.profile.partial import parse_partial
        from appliance.tune.checkpoint import Partial

        path = self._files.path(key.id, ".partial")
        try:
            return parse_partial(self._files.read(path).decode(), key)
        except FileNotFoundError:
            return Partial()
        except OSError as error:
            self._warn(f"what was measured before cannot be read, measuring again: {path}: {error.strerror}")
        except ValueError as error:
            aside = path.with_suffix(".partial-corrupt")
            with suppress(OSError):  # the next that is kept takes its place
                self._files.rename(path, aside)
            self._warn(f"what was measured before is set aside as {aside.name}, measuring again: {error}")
        return Partial()

    def forget(self, id_: str) -> None:
        """Under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".partial"))
