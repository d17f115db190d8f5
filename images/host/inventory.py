"""Names and numbers of matrix and recipes as JSON, for programs that have no package for YAML. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from images.choice.select import DEFAULT_ENGINE
from images.host.published import Published
from images.matrix import compat, render, space
from images.matrix.compat import Facts
from images.matrix.matrix import Cell
from images.recipes import recipe
from images.recipes.recipe import RecipeRow

INVENTORY = Path("images/inventory.json")
_ARCHIVES, _ENGINE = Path("/archives"), Path("/engine")  # two places, to tell their needs apart


def inventory_file(cells: Iterable[Cell], recipes: Iterable[RecipeRow], published: Iterable[Published]) -> str:
    """Returns the text of images/inventory.json."""
    made = {
        "//": f"DO NOT EDIT. Made from build_matrix.yaml and images/models by: {render.RENDER_COMMAND}",
        "cells": {cell.id: _needs(cell) for cell in cells},
        **command_data(cells, recipes, published),
    }
    return json.dumps(made, indent=1) + "\n"


def command_data(
    cells: Iterable[Cell], recipes: Iterable[RecipeRow], published: Iterable[Published]
) -> dict[str, object]:
    """Returns what an installed host command needs: the cells to choose among, the recipes, the published images."""
    known = compat.facts()
    return {
        "choices": [_choice(cell, known) for cell in cells if cell.engine.name == DEFAULT_ENGINE],
        "images": [row.model_dump() for row in published],
        "recipes": [_recipe(row) for row in recipes],
    }


def _needs(cell: Cell) -> dict[str, int]:
    """Returns MiB that a build needs, in the project and in the engine's folder."""
    needs = space.needs(cell, archives=_ARCHIVES, engine_data=_ENGINE)
    return {
        f"{place.name}_mib": sum(need.mib for need in needs if need.path == place) for place in (_ARCHIVES, _ENGINE)
    }


def _choice(cell: Cell, known: Facts) -> dict[str, object]:
    """Returns what `select` would weigh. `drivers`: the oldest driver for each chip that the cell's code runs on."""
    release = known.releases.get(cell.target.cuda or "")
    is_apart = all(known.sms[sm].tegra for sm in cell.sms)
    return {
        "cell": cell.id,
        "platforms": list(cell.platforms),
        "cuda": cell.target.cuda,
        # Drivers of Tegras are numbered apart: only the branch says something there.
        "cuda_driver": release and (release.driver.partition(".")[0] if is_apart else release.driver),
        "built_for": [form.rstrip("af") for form in cell.forms],
        "drivers": {sm: compat.required_driver(cell, known, sm=sm) for sm in known.sms if _runs(cell, sm, known)},
    }


def _runs(cell: Cell, sm: str, known: Facts) -> bool:
    forms = (form for platform in cell.platforms for form in cell.serving(sm, platform))
    return any(compat.runs_on(form.form, sm, known) for form in forms)


def _recipe(row: RecipeRow) -> dict[str, object]:
    rungs = [{"name": rung.name, "published": rung.published} for rung in recipe.as_recipe(row).rungs]
    return {"name": row.name, "vendors": [vendor.casefold() for vendor in row.vendors], "rungs": rungs}
