"""What `appliance plan` needs where no image is: the facts of every cell and the recipes, as data of that package.

`render` writes cells.json of each engine and recipes.json; `verify --record` writes what a built image's engine says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from appliance.image_facts import dump_facts, dump_recipe, parse_engine_facts
from images.errors import VerificationError
from images.matrix import render
from images.matrix.matrix import Cell
from images.proof.verify import cell_pairs
from images.recipes import recipe
from images.recipes.recipe import RecipeRow

ENGINES, RECIPES = Path("appliance/engines"), Path("appliance/model/recipes.json")
_NOTE = f"DO NOT EDIT. Made from build_matrix.yaml and images/models by: {render.RENDER_COMMAND}"


def files(cells: Iterable[Cell], recipes: Iterable[RecipeRow]) -> dict[Path, str]:
    """The cells of each engine and all recipes: texts by their path below the project."""
    rows: dict[str, list[dict[str, object]]] = {}
    for cell in cells:
        rows.setdefault(cell.engine.name, []).append(_cell(cell))
    made = {_folder(name) / "cells.json": _dumped({"//": _NOTE, "cells": found}) for name, found in rows.items()}
    return {**made, RECIPES: _dumped({"//": _NOTE, "recipes": [_recipe(row) for row in recipes]})}


def _folder(engine: str) -> Path:
    return ENGINES / engine / "cells"


def record(root: Path, cell: Cell, said: str) -> Path:
    """Write what an image that passed `verify` has as its engine's facts, and return the path below the project.

    Raises VerificationError if that is something else.
    """
    try:
        text = dump_facts(parse_engine_facts(said))
    except ValueError as error:
        message = f"engine facts of {cell.id} cannot be recorded: {error}"
        raise VerificationError(message, hint=f"python -m images build --only {cell.id}") from error
    path = _folder(cell.engine.name) / f"{cell.id}.json"
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, "utf-8", newline="\n")
    return path


def _cell(cell: Cell) -> dict[str, object]:
    pairs = [pair.split("-") for pair in cell_pairs(cell)]
    return {"image": json.loads(render.facts_text(cell)), "platforms": list(cell.platforms), "kv_pairs": pairs}


def _recipe(row: RecipeRow) -> dict[str, object]:
    """Without what its quantizations cost and where that was read, which no plan depends on."""
    found = recipe.as_recipe(row)
    source = (recipe.MODELS / f"{row.name}.yaml").as_posix()
    rungs = tuple(replace(rung, loss=None, loss_source=None, source=source) for rung in found.rungs)
    vendors = [vendor.casefold() for vendor in row.vendors]
    return {"vendors": vendors, "recipe": json.loads(dump_recipe(replace(found, rungs=rungs)))}


def _dumped(document: object) -> str:
    return json.dumps(document, indent=1) + "\n"
