"""A crowd of connections without a key, from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "fakes/flood.py"


@contextmanager
def flooded(port: int, number: int) -> Iterator[None]:
    """Hold `number` connections open in the block, or as many as the other side allows. Closed ones are opened
    again."""
    argv = [sys.executable, "-I", "-S", str(PROGRAM), str(port), str(number)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        try:
            assert crowd.stdout.readline() == "open\n"
            yield
        finally:
            crowd.stdin.close()
            crowd.wait(60)
