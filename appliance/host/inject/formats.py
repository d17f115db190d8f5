"""The formats of configuration files, each with the same three functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from appliance.host.inject import dotenv, jsonc, yaml_text
from appliance.host.inject.place import Place


class Format(Protocol):
    def load(self, text: str) -> dict[str, Any]:
        """Return the document. Raises ValueError with the line number if the text is not valid."""

    def put(self, text: str, place: Place, value: Any) -> str:  # noqa: ANN401
        """Return the text with the value at that place. Raises NotEditableError if the user's own text would be
        rewritten."""

    def drop(self, text: str, place: Place) -> str:
        """Return the text without the value; unchanged if there is none. Raises NotEditableError as `put` does."""


FORMATS: Mapping[str, Format] = {"jsonc": jsonc, "yaml": yaml_text, "dotenv": dotenv}
