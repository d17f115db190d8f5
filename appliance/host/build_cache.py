"""Size of a cell's layers that are already in the builder's cache and need not be written again. Usable before any
package is installed."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([\d.]+)(B|kB|MB|GB|TB)")
_RUN = re.compile(r"^mount / from exec /bin/sh -c ")


def cached_mib(listing: str, dockerfile: str) -> int:
    """Return the cached size in MiB. `listing` is the output of `docker buildx du --verbose`. Records of the
    Dockerfile's commands count; a changed input may still force a command to run again, which only the build finds
    out."""
    commands = _one_line(re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)))
    found = 0.0
    for record in listing.split("\n\n"):
        fields = dict(re.findall(r"^(Size|Description):\s*(.*)$", record, re.MULTILINE))
        command, size = fields.get("Description", ""), _SIZE.fullmatch(fields.get("Size", "").strip())
        if size and _RUN.match(command) and _one_line(_RUN.sub("", command)) in commands:
            found += float(size[1]) * _UNITS[size[2]]
    return int(found / 2**20)


def _one_line(text: str) -> str:
    return " ".join(text.split())
