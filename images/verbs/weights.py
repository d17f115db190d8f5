"""Weights of a recipe: which variant is meant, and its files on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.image_facts import WeightsFormat
from images.console import ROOT
from images.errors import UsageError
from images.recipes import convert, fetch, recipe

WEIGHTS = ROOT / ".make/models"


def add_rung(parser: argparse.ArgumentParser) -> None:
    about = "name of the weights in the recipe, or its beginning: 8b-q4_k_m (default: the recipe's)"
    parser.add_argument("--rung", metavar="NAME", help=about)
    about = "memory of GPU or machine, instead of --rung: takes the largest weights that leave a quarter of it free"
    parser.add_argument("--memory-mib", metavar="MIB", type=int, help=about)
    about = "address of the hub for weights that a recipe names by repository"
    parser.add_argument("--hub", metavar="URL", default=recipe.HUB, help=f"{about}; {recipe.HUB} without it")


def rung_of(options: argparse.Namespace, row: recipe.RecipeRow, serves: WeightsFormat | None = None) -> recipe.RungRow:
    if options.rung is None:
        return recipe.choose(row, options.memory_mib, serves)
    if options.memory_mib is not None:
        message = f"--rung names the weights, and --memory-mib chooses others: {options.memory_mib}"
        raise UsageError(message, hint="give one of the two")
    return recipe.find_rung(row, options.rung, serves)


def folder_of(row: recipe.RecipeRow, rung: recipe.RungRow, to: Path) -> Path:
    """Returns the folder of a rung's files. Converted files have a folder next to the file they were made of."""
    if rung.made_of is None:
        return to
    return fetch.target_of(row.rung(rung.made_of).files[0], to).with_suffix("")


def weights_of(
    row: recipe.RecipeRow,
    rung: recipe.RungRow,
    to: Path,
    ca_bundle: Path | None,
    hub: str,
    image: str = convert.IMAGE,
) -> tuple[Path, ...]:
    """Fetches the rung's files. A rung that is made of another is converted from it, in the image."""
    if rung.made_of is None:
        return fetch.fetch(ROOT, rung, to, ca_bundle=ca_bundle, hub=hub)
    (source,) = fetch.fetch(ROOT, row.rung(rung.made_of), to, ca_bundle=ca_bundle, hub=hub)
    return convert.check(convert.to_safetensors(ROOT, source, ca_bundle=ca_bundle, image=image), rung)
