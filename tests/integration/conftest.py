"""What tests with a real child process share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from supervisor_harness import MakeCommand, fake_command


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Short, as a unix socket's path must be: pytest's own temporary folders can exceed its 108 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="sv", dir="/tmp"))
    yield folder / "e.sock"
    shutil.rmtree(folder)


@pytest.fixture
def make_command(socket_path: Path) -> MakeCommand:
    return partial(fake_command, socket_path)
