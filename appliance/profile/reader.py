"""Read profile files: ours, damaged ones, and those of another schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from appliance.errors import VolumeError
from appliance.profile.files import MAX_BYTES, ProfileFiles
from appliance.profile.record import SCHEMA, Key, OtherEngineError, OtherSchemaError, Profile, parse_plan, parse_profile
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class ForeignProfile:
    """Profile of another schema, or of an engine that this appliance does not have. It is left in place for that
    appliance."""

    id: str
    schema: str  # schema number, or a short description
    model: object  # model part of its key; None if it is missing


class ProfileReader:
    """Read files as profiles. `warn` is called for each file that is set aside."""

    def __init__(self, files: ProfileFiles, warn: Callable[[str], None]) -> None:
        self._files = files
        self._warn = warn

    def exact(self, key: Key) -> Profile | None:
        """Return the profile for this key, or None. A file whose content is for another key is set aside."""
        profile = self.read(key.id)
        if profile is not None and profile.key != key:
            self._set_aside(key.id, "it is for another key")
            return None
        return profile

    def read(self, id_: str, *, is_ours: bool = True) -> Profile | None:
        """Return the profile, or None if there is no usable one. A damaged file is set aside.

        With `is_ours`, a file of another schema is set aside too: it occupies the path of our own profile. Raises
        VolumeError if the file cannot be read.
        """
        path = self._files.path(id_)
        try:
            return parse(self._files.read(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"profile cannot be read: {path}: {error.strerror}"
            raise VolumeError(message, hint="check owner and mode of the volume's files") from error
        except OtherSchemaError as error:
            if is_ours:
                self._set_aside(id_, str(error), suffix=".other-schema")
        except ValueError as error:
            self._set_aside(id_, str(error))
        return None

    def peek(self, id_: str) -> Profile | None:
        """Like `read`, but never renames a file and never raises."""
        with suppress(ValueError, OSError):
            return parse(self._files.read(self._files.path(id_)))
        return None

    def foreign(self, id_: str) -> ForeignProfile | None:
        with suppress(OSError, ValueError, RecursionError):
            document = json.loads(self._files.read(self._files.path(id_)))
            if not isinstance(document, dict) or "schema" not in document:
                return None
            if document["schema"] != SCHEMA:
                return ForeignProfile(id=id_, schema=str(document["schema"]), model=_model_of(document))
            try:
                parse_plan(document.get("plan"))
            except OtherEngineError:
                words = f"{SCHEMA} of another engine"
                return ForeignProfile(id=id_, schema=words, model=_model_of(document))
        return None

    def _set_aside(self, id_: str, why: str, *, suffix: str = ".corrupt") -> None:
        path, aside = self._files.path(id_), self._files.path(id_, suffix)
        try:
            self._files.rename(path, aside)
        except FileNotFoundError:
            return  # another container renamed it first
        except OSError as error:
            message = f"profile is corrupt and cannot be set aside: {path}: {error.strerror}"
            raise VolumeError(message, hint="remove it by hand") from error
        self._warn(f"profile set aside as {aside.name}, measuring again: {why}")


def parse(data: bytes) -> Profile:
    """Parse the file's content. Raises ValueError if it is not a profile of this schema."""
    if len(data) > MAX_BYTES:
        message = f"it is larger than {MAX_BYTES} bytes"
        raise ValueError(message)
    return parse_profile(data.decode())


def _model_of(document: dict[str, object]) -> object:
    match document.get("key"):
        case {"parts": {"model": model}}:
            return model
    return None
