"""A machine of tests/fakes/machines for real child processes: the environment in which nvidia-ml-py finds it.

Fixtures are in conftest.py; without a C compiler their tests are skipped and say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fakes.machines import describe

PutMachine = Callable[..., Mapping[str, str]]  # (name, **knobs) -> environment


def put_machine(library: Path, folder: Path, name: str, **knobs: object) -> Mapping[str, str]:
    """Write the description, and return this process's environment with what a child needs to see that machine."""
    file = folder / f"{name}.machine"
    file.write_text(describe(name, **knobs), encoding="utf-8")
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_MACHINE": str(file)}
