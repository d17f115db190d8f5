"""Results of an unfinished tuning: `<id>.partial`, until there is a profile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from appliance.profile.files import ProfileFiles, refusing
from appliance.profile.record import Key

if TYPE_CHECKING:
    from appliance.tune.checkpoint import Partial


class UnfinishedTunings:
    """Kept results of unfinished tunings. `warn` is called for an unreadable file."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def keep(self, key: Key, partial: Partial) -> None:
        """Keep the results so far. Raises VolumeError."""
        from appliance.profile.partial import dump_partial  # here: a start from a profile never needs it

        path = self._files.path(key.id, ".partial")
        with self._files.locked(key.id), refusing(f"what was measured cannot be kept: {path}"):
            self._files.drop_leftovers(key.id)
            self._files.put(path, dump_partial(key, partial).encode())

    def kept(self, key: Key) -> Partial:
        """Return the kept results; empty if there are none.

        An unreadable file is reported, set aside if possible, and measured again: it must not be fatal.
        """
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
            with suppress(OSError):  # the next `keep` replaces the file
                self._files.rename(path, aside)
            self._warn(f"what was measured before is set aside as {aside.name}, measuring again: {error}")
        return Partial()

    def forget(self, id_: str) -> None:
        """Remove the file. Call it under the profile's lock. Raises OSError."""
        self._files.remove(self._files.path(id_, ".partial"))
