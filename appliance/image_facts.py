"""What this image was built for and what its engine can do: written while the image is built, read at every start.

Two files lie beside each other in an image. `image_facts.json` is rendered from the matrix; `engine_facts.json` is what
the engine's own binary said when it was asked (`appliance engine-facts`), so nothing parses `--help` at start.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from appliance.documents import read
from appliance.values import dataclass

SCHEMA = 1
IMAGE_FACTS_PATH = "/opt/appliance/image_facts.json"
ENGINE_FACTS_PATH = "/opt/appliance/engine_facts.json"
# Chips of Jetson and of DRIVE: machine code neither comes from another chip nor goes to one, whatever the numbers say.
# CUDA C++ Programming Guide, 6.1.2; images/facts/nvidia.yaml has the same, and a test holds the two together.
TEGRA = frozenset({"87", "101", "110"})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The model that a named image serves when it is given none."""

    name: str
    file: str  # below models/ on the volume
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What it was built for. `build_id` hashes Dockerfile, locks, sources and base; it keys caches and profiles."""

    build_id: str
    cell: str
    engine: str
    engine_version: str
    engine_build: int
    engine_commit: str
    cuda: str | None = None
    sm: tuple[str, ...] = ()
    driver_floor_sass: str | None = None
    driver_floor_ptx: str | None = None
    cpu_variants: tuple[str, ...] = ()
    recipe: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class CpuVariant:
    """One build of the engine's CPU kernels. `isa` is what it was compiled for, in /proc/cpuinfo's words."""

    name: str
    isa: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the engine binary says of itself."""

    version: str
    build: int
    commit: str
    flags: tuple[str, ...]  # every spelling that --help lists, sorted
    kv_types: tuple[str, ...]
    kv_pairs: tuple[tuple[str, str], ...] = ()  # pairs with fast flash attention; empty: any pair of equal types
    backends: tuple[str, ...] = ()  # file names of the loadable backends, sorted
    split_modes: tuple[str, ...] = ()  # how it can split a model across GPUs
    cpu_variants: tuple[CpuVariant, ...] = ()  # those that are there, the fastest last; empty: it has one, or none


def runs_on(form: str, sm: str) -> bool:
    """Whether machine code of a form (`80`, `90a`, `120f`) runs on the chip `sm`.

    Plain and `f`: same major, equal or higher minor, never from or to a Tegra. `a`: that chip alone.
    """
    own = form.rstrip("af")
    if form.endswith("a") or own in TEGRA or sm in TEGRA:
        return own == sm
    return own[:-1] == sm[:-1] and int(own) <= int(sm)


def dump_facts(facts: ImageFacts | EngineFacts) -> str:
    """JSON with sorted keys and a final newline: the same facts are the same bytes."""
    return json.dumps({"schema": SCHEMA, **asdict(facts)}, indent=1, sort_keys=True) + "\n"


def parse_image_facts(text: str) -> ImageFacts:
    """Raises ValueError when `text` is not what `dump_facts` writes."""
    return read(ImageFacts, _checked(text, "image facts"))


def parse_engine_facts(text: str) -> EngineFacts:
    """Raises ValueError when `text` is not what `dump_facts` writes."""
    return read(EngineFacts, _checked(text, "engine facts"))


def _checked(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{what} are not JSON: {error}"
        raise ValueError(message) from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        message = f"{what} have another schema than {SCHEMA}"
        raise ValueError(message)
    return data
