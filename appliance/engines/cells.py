"""Facts of images and their engines, for a plan made outside an image: package data, written by `python -m images`.

Each engine's folder has `cells/cells.json` with the facts of its cells of the build matrix. Every other file in
`cells/` holds the engine facts of one built cell.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from appliance import engines
from appliance.documents import load, read
from appliance.errors import ConfigError, damaged_data, printable
from appliance.image_facts import (
    EngineFacts,
    ImageFacts,
    parse_engine_facts,
    parse_image_facts,
)
from appliance.values import dataclass

FOLDER, CELLS = "cells", "cells.json"  # in each engine's folder


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the build matrix. `platforms` are such as linux/amd64; `kv_pairs` are the pairs of KV cache types
    that its GPU code is compiled for."""

    image: ImageFacts
    platforms: tuple[str, ...]
    kv_pairs: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.image.cell

    @property
    def pin(self) -> tuple[str, str, int]:
        """Engine, version and build. Flags differ between releases, so facts hold only for the same pin."""
        return self.image.engine, self.image.engine_version, self.image.engine_build


@cache
def cells() -> Mapping[str, Cell]:
    """Return every cell of the build matrix by name."""
    found = (_cell(row, folder / CELLS) for folder in _folders() for row in _load(folder / CELLS)["cells"])
    return {cell.name: cell for cell in found}


@cache
def built() -> tuple[Cell, ...]:
    """Return the cells that have a file of engine facts."""
    known = cells()
    return tuple(known[name] for name in _facts() if name in known)


def _folders() -> list[Path]:
    return sorted(path.parent for place in engines.__path__ for path in Path(place).glob(f"*/{FOLDER}/{CELLS}"))


def _facts() -> dict[str, Path]:
    """Return the file of engine facts of each built cell, by cell name."""
    return {path.stem: path for folder in _folders() for path in sorted(folder.glob("*.json")) if path.name != CELLS}


def find_cell(name: str) -> Cell:
    """Return the cell with this name. Raises ConfigError (10) if there is none."""
    known = cells()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    message = f"the build matrix has no cell of this name: {printable(name)} (flag --cell)"
    raise ConfigError(message, hint=f"perhaps you meant {near[0]}" if near else f"there are {', '.join(known)}")


def facts_source(cell: Cell) -> Cell:
    """Return the built cell whose engine facts are used: the cell itself, else the nearest one with the same pin.

    The nearest has GPU code if the cell has it, then the same CUDA release, then the same chips.
    Raises ConfigError (10) if no cell with the same pin was built.
    """
    same = [each for each in built() if each.pin == cell.pin]
    if not same:
        message = f"no image with the engine of {cell.name} was built: {' '.join(map(str, cell.pin))}"
        others = ", ".join(each.name for each in built())
        raise ConfigError(message, hint=f"plan in an image of it, or for another cell: {others}")
    return max(same, key=lambda each: _nearness(each, cell))


def _nearness(each: Cell, cell: Cell) -> tuple[bool, ...]:
    one, other = each.image, cell.image
    has_same_code = (one.cuda is None) == (other.cuda is None)
    return each.name == cell.name, has_same_code, one.cuda == other.cuda, one.sm == other.sm


def engine_facts(built_cell: Cell) -> EngineFacts:
    """Return the engine facts of a built cell. Raises ConfigError (10) if the file is damaged."""
    path = _facts()[built_cell.name]
    try:
        return parse_engine_facts(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged_data(path, error) from error


def _cell(row: Mapping[str, Any], path: Path) -> Cell:
    try:
        image = parse_image_facts(json.dumps(row["image"]))
        return read(Cell, {**row, "image": image}, image=lambda given: given)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged_data(path, error) from error


def _load(path: Path) -> dict[str, Any]:
    try:
        return load(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged_data(path, error) from error
