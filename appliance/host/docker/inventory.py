"""Recipes, cells and published images: a clone's images/inventory.json, or the copy in an installed command. Standard
library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.errors import damaged_data
from appliance.host import SHIPPED
from appliance.model_names import NamedRecipe, NamedRung
from appliance.values import dataclass

CLONE = Path(__file__).parents[3]
INVENTORY = "images/inventory.json"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A cell that an image may be of. `cuda` and `cuda_driver` are None for machines without a GPU.

    `drivers` has the oldest driver for each SM that its code runs on, `built_for` the SMs that it was compiled for, and
    `cuda_driver` is the driver that its CUDA release came with.
    """

    cell: str
    platforms: tuple[str, ...]
    cuda: str | None
    cuda_driver: str | None
    built_for: tuple[str, ...]
    drivers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Published:
    """An image that a registry has. `recipe` is None if it has none."""

    cell: str
    recipe: str | None
    image: str  # with a tag
    digest: str
    compressed_bytes: int

    @property
    def reference(self) -> str:
        """The name to pull: the tag may move, the digest cannot."""
        return f"{self.image.rpartition(':')[0]}@{self.digest}"


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """`cells` holds the MiB that each cell's build needs: `archives_mib` in the project's folder and `engine_mib` in
    Docker. It is empty without a clone."""

    recipes: tuple[NamedRecipe, ...]
    cells: Mapping[str, Mapping[str, int]]
    choices: tuple[Choice, ...] = ()
    published: tuple[Published, ...] = ()

    def published_image(self, cell: str, recipe: str | None) -> Published | None:
        return next((each for each in self.published if (each.cell, each.recipe) == (cell, recipe)), None)


def load_inventory(clone: Path = CLONE) -> Inventory | None:
    """Return the clone's inventory, else the shipped one; None if there is neither. Raises ConfigError if it cannot be
    read."""
    path = next((each for each in (clone / INVENTORY, SHIPPED) if each.is_file()), None)
    if path is None:
        return None
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged_data(path, error) from error


def _parse(document: Mapping[str, Any]) -> Inventory:
    recipes = tuple(
        NamedRecipe(
            name=row["name"],
            vendors=tuple(row["vendors"]),
            rungs=tuple(NamedRung(name=rung["name"], published=tuple(rung["published"])) for rung in row["rungs"]),
        )
        for row in document["recipes"]
    )
    choices = tuple(
        Choice(**{**row, "platforms": tuple(row["platforms"]), "built_for": tuple(row["built_for"])})
        for row in document["choices"]
    )
    published = tuple(Published(**row) for row in document["images"])
    return Inventory(recipes=recipes, cells=document.get("cells", {}), choices=choices, published=published)


def recipes_here() -> tuple[NamedRecipe, ...]:
    """Return the known recipes; empty without an inventory."""
    inventory = load_inventory()
    return inventory.recipes if inventory else ()
