"""The address file: one line with host and port, written by a running gateway in its container."""

from __future__ import annotations

from pathlib import Path

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104


def read_address(path: Path) -> tuple[str, int] | None:
    """Return host and port at which the gateway can be reached from this container. None if the file is missing or is
    not readable as such."""
    try:
        host, port = path.read_text(encoding="ascii").split()
        return reachable(host), int(port)
    except (OSError, ValueError):
        return None


def reachable(host: str) -> str:
    return EVERY_ADDRESS.get(host, host)
