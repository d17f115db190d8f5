"""The recipes of model images, for a plan without an image: recipes.json, written by `python -m images render`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from appliance.documents import load
from appliance.errors import damaged_data
from appliance.image_facts import Recipe, parse_recipe
from appliance.model_names import NamedRecipe, NamedRung, nearest, resolve

DATA = Path(__file__).with_name("recipes.json")


def find_recipe(called: str) -> tuple[Recipe, str] | None:
    """Return the recipe that has a model of this name, and the model's name there: `qwen:8b`. None if no recipe has
    it."""
    found = _recipes()
    meant = resolve(called, tuple(found))
    if meant is None:
        return None
    return next((recipe, meant.words) for named, recipe in found.items() if named.name == meant.recipe)


def near_models(called: str) -> tuple[str, ...]:
    """Return the names of recipe models that are closest to an unknown name."""
    return nearest(called, tuple(_recipes()))


@cache
def _recipes() -> Mapping[NamedRecipe, Recipe]:
    found = {}
    try:
        for row in load(DATA.read_bytes())["recipes"]:
            recipe = parse_recipe(json.dumps(row["recipe"]))
            rungs = tuple(NamedRung(name=rung.name, published=rung.published) for rung in recipe.rungs)
            found[NamedRecipe(name=recipe.name, vendors=tuple(row["vendors"]), rungs=rungs)] = recipe
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged_data(DATA, error) from error
    return found
