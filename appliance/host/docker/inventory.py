"""The recipes and cells of a clone, from images/inventory.json. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from appliance.model_names import NamedRecipe, NamedRung
from appliance.values import dataclass

CLONE = Path(__file__).parents[3]
INVENTORY = "images/inventory.json"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """`cells` holds the MiB that each cell's build needs: `archives_mib` in the project's folder and `engine_mib` in
    Docker."""

    recipes: tuple[NamedRecipe, ...]
    cells: Mapping[str, Mapping[str, int]]


def load_inventory(clone: Path = CLONE) -> Inventory | None:
    """Return the clone's inventory; None for an installed command, which has no clone."""
    path = clone / INVENTORY
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    recipes = tuple(
        NamedRecipe(
            name=row["name"],
            vendors=tuple(row["vendors"]),
            rungs=tuple(NamedRung(name=rung["name"], published=tuple(rung["published"])) for rung in row["rungs"]),
        )
        for row in document["recipes"]
    )
    return Inventory(recipes=recipes, cells=document["cells"])


def recipes_here() -> tuple[NamedRecipe, ...]:
    """Return the clone's recipes; empty without a clone."""
    inventory = load_inventory()
    return inventory.recipes if inventory else ()
