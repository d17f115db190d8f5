"""Where a running gateway says that it listens: a line of host and port in a file of its container."""

from __future__ import annotations

from pathlib import Path

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104


def read_address(path: Path) -> tuple[str, int] | None:
    """Where it can be reached from this container; None where no appliance has said anything."""
    try:
        host, port = path.read_text(encoding="ascii").split()
        return reachable(host), int(port)
    except (OSError, ValueError):
        return None


def reachable(host: str) -> str:
    return EVERY_ADDRESS.get(host, host)
