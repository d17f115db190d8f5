"""The publisher of an image: its labels `source`, `url` and `vendor`. Pure.

Each comes from the matrix or the command line. A value that neither names has no label: no address is invented.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from images.errors import UsageError

PREFIX = "org.opencontainers.image."
ADDRESS = re.compile(r"https?://(?P<user>[^/@\s\"$\\]*@)?[^/\s@\"$\\]+(?:/[^\s\"$\\]*)?")
NAME = re.compile(r"[^\s\"$\\](?:[^\"$\\\r\n]*[^\s\"$\\])?")


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """`source` is the repository's address, `url` a page with more, `vendor` a name."""

    source: str | None = None
    url: str | None = None
    vendor: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        named = {f"{PREFIX}{each.name}": getattr(self, each.name) for each in fields(self)}
        return {label: value for label, value in named.items() if value is not None}

    def is_of(self, labels: Mapping[str, str]) -> bool:
        """True if the labels name this publisher and no other; without names, True if they name none."""
        known = (f"{PREFIX}{each.name}" for each in fields(self))
        return {label: labels[label] for label in known if label in labels} == self.labels

    def overridden(self, given: Mapping[str, str | None]) -> Publisher:
        """Returns the publisher with the command line's values in place of the matrix's."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return Publisher(**(own | {name: value for name, value in given.items() if value is not None}))


def parse_address(text: str) -> str:
    """Raises UsageError for what is no address, or holds a password: a label is as public as its image."""
    found = ADDRESS.fullmatch(text)
    if found and not found["user"]:
        return text
    if found:
        message = "an address for a label holds the name of a user or a password"
        raise UsageError(message, hint="give it without what stands before the @: labels are public")
    message = f"no address for a label: {text}"
    raise UsageError(message, hint="such as --source https://git.example/team/appliance")


def parse_vendor(text: str) -> str:
    """Raises UsageError for what cannot stand in a label between quotes."""
    if NAME.fullmatch(text):
        return text
    message = f"no name for the label vendor: {text!r}"
    raise UsageError(message, hint="one line without quotes, dollar signs and backslashes")
