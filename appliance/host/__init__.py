"""Code that runs on the user's machine, outside the container."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent / "docker/inventory.json"  # only in the wheel of the host command
