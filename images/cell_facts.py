"""What `appliance plan` needs where no image is: the facts of every cell and the recipes, as data of that package.

`render` writes cells.json and recipes.json; `verify --record` writes beside them what the engine of a built image says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from appliance.image_facts import ENGINE_FACTS_PATH, dump_facts, dump_recipe, parse_engine_facts
from images import docker, recipe, render
from images.errors import VerificationError
from images.matrix import Cell
from images.recipe import RecipeRow
from images.verify import cell_pairs

FOLDER = Path("appliance/cells")
CELLS, RECIPES = FOLDER / "cells.json", FOLDER / "recipes.json"
_NOTE = f"DO NOT EDIT. Made from build_matrix.yaml and images/models by: {render.RENDER_COMMAND}"


def files(cells: Iterable[Cell], recipes: Iterable[RecipeRow]) -> dict[Path, str]:
    """Both texts by their path below the project."""
    return {
        CELLS: _dumped({"//": _NOTE, "cells": [_cell(cell) for cell in cells]}),
        RECIPES: _dumped({"//": _NOTE, "recipes": [_recipe(row) for row in recipes]}),
    }


def record(root: Path, cell: Cell, engine: docker.Engine, *, image: str) -> Path:
    """Write the engine's facts of an image that passed `verify`, and return the path below the project.

    Raises VerificationError if the image does not print them.
    """
    said = engine.run(image, (ENGINE_FACTS_PATH,), entrypoint=("cat",))
    try:
        text = dump_facts(parse_engine_facts("\n".join(said.lines)))
    except ValueError as error:
        message = f"engine facts of {image} cannot be read: {error}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id}") from error
    path = FOLDER / f"{cell.id}.json"
    (root / path).write_text(text, "utf-8", newline="\n")
    return path


def _cell(cell: Cell) -> dict[str, object]:
    pairs = [pair.split("-") for pair in cell_pairs(cell)]
    return {"image": json.loads(render.facts_text(cell)), "platforms": list(cell.platforms), "kv_pairs": pairs}


def _recipe(row: RecipeRow) -> dict[str, object]:
    vendors = [vendor.casefold() for vendor in row.vendors]
    return {"vendors": vendors, "recipe": json.loads(dump_recipe(recipe.as_recipe(row)))}


def _dumped(document: object) -> str:
    return json.dumps(document, indent=1) + "\n"
