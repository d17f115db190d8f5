"""Small disks for tests: full, or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PIECE = 64 * 1024


def fill_up(path: Path, size: int) -> None:
    """Write a file of that size, or a smaller one if others have taken the space meanwhile."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(size // _PIECE):
            file.write(bytes(_PIECE))


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Make `folder` and mount a tmpfs on it. Skips the test if this user may not mount."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
