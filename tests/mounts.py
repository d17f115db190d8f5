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


class FreezableDisk:
    """An ext4 in a file. While it is frozen, every process that writes hangs in the kernel, and no signal ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.folder)], check=True)


@contextmanager
def freezable(folder: Path, image: Path) -> Iterator[FreezableDisk]:
    """Make `folder` and mount a new ext4 on it, whose content is the file `image`. Skips the test if this user may not
    mount one."""
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * 2**20)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk that can be frozen can be mounted here: {getattr(error, 'stderr', b'') or error}")
    disk = FreezableDisk(folder)
    try:
        yield disk
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], capture_output=True, check=False)
        # Lazily: a process that hung may still end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
