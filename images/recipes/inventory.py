"""Names in the matrix and the recipes as JSON, for programs of a clone that have no package for YAML. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from images.matrix import render, space
from images.matrix.matrix import Cell
from images.recipes import recipe
from images.recipes.recipe import RecipeRow

INVENTORY = Path("images/inventory.json")
_ARCHIVES, _ENGINE = Path("/archives"), Path("/engine")  # two places, to tell their needs apart


def inventory_file(cells: Iterable[Cell], recipes: Iterable[RecipeRow]) -> str:
    """Returns the text of images/inventory.json."""
    made = {
        "//": f"DO NOT EDIT. Made from build_matrix.yaml and images/models by: {render.RENDER_COMMAND}",
        "cells": {cell.id: _cell(cell) for cell in cells},
        "recipes": [_recipe(row) for row in recipes],
    }
    return json.dumps(made, indent=1) + "\n"


def _cell(cell: Cell) -> dict[str, int]:
    """Returns MiB that a build needs, in the project and in the engine's folder."""
    needs = space.needs(cell, archives=_ARCHIVES, engine_data=_ENGINE)
    return {
        f"{place.name}_mib": sum(need.mib for need in needs if need.path == place) for place in (_ARCHIVES, _ENGINE)
    }


def _recipe(row: RecipeRow) -> dict[str, object]:
    rungs = [{"name": rung.name, "published": rung.published} for rung in recipe.as_recipe(row).rungs]
    return {"name": row.name, "vendors": [vendor.casefold() for vendor in row.vendors], "rungs": rungs}
