"""The formats of configuration files, each with the same three functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from appliance.host.inject import dotenv, jsonc, yaml_text
from appliance.host.inject.place import Place


class Format(Protocol):
    def load(self, text: str) -> dict[str, Any]:
        """ValueError, with the line, for what is not valid."""

    def put(self, text: str, place: Place, value: Any) -> str:  # noqa: ANN401
        """NotEditableError where that would rewrite what the user wrote."""

    def drop(self, text: str, place: Place) -> str:
        """The text as it is where nothing stands there. NotEditableError as `put`."""


FORMATS: Mapping[str, Format] = {"jsonc": jsonc, "yaml": yaml_text, "dotenv": dotenv}
