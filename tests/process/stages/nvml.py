"""A machine of tests/fakes/machines for real child processes: the environment in which nvidia-ml-py finds it.

Fixtures are in conftest.py; without a C compiler their tests are skipped and say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from appliance.image_facts import dump_facts
from tests.builders import facts
from tests.fakes.machines import describe
from tests.process.stages.boot import Home
from tests.shapes import SMALL, write_gguf

PutMachine = Callable[..., Mapping[str, str]]  # (name, **knobs) -> environment


def put_machine(library: Path, folder: Path, name: str, **knobs: object) -> Mapping[str, str]:
    """Write the description, and return this process's environment with what a child needs to see that machine."""
    file = folder / f"{name}.machine"
    file.write_text(describe(name, **knobs), encoding="utf-8")
    return {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_MACHINE": str(file)}


def laptop_home(folder: Path, described: Mapping[str, str]) -> Home:
    """Return a home on a described laptop with one GPU, `laptop-5060`. The model has 8,192 tokens of context and fits
    on the GPU."""
    home = Home.make(folder)
    (home.data / "models/small.gguf").unlink()
    write_gguf(home.data / "models/gqa.gguf", SMALL["gqa"])
    image, engine = facts(has_cuda=True)
    image = replace(image, cuda="13.0", sm=("120",), driver_floor_sass="580.65.06")
    (home.folder / "facts/image_facts.json").write_text(dump_facts(image))
    (home.folder / "facts/engine_facts.json").write_text(dump_facts(engine))
    home.variables = {name: described[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_MACHINE")}
    home.devices = "  CUDA0: NVIDIA GeForce RTX 5060 Laptop GPU (8151 MiB, 7800 MiB free)"
    home.set_engine()
    return home
