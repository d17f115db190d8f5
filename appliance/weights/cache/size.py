"""Sizes as text in decimal units, as the hub and disks count. Pure."""

from __future__ import annotations


def as_size(count: int) -> str:
    """Format a size: `5.03 GB`, `639.4 MB`; in bytes below one kB."""
    if count < 1000:
        return f"{count} bytes"
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
        if count >= 1000**power:
            return f"{count / 1000**power:,.{2 if power > 2 else 1}f} {unit}"
    return f"{count / 1000:.1f} kB"


def in_column(count: int) -> str:
    """Format a size with one decimal digit, to be compared in a column."""
    return f"{count / 1e9:,.1f} GB" if count >= 0.05e9 else f"{count / 1e6:,.1f} MB"
