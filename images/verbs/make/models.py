"""Model images of `images build --model`: the cell with a recipe, and the weights if they are baked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from appliance.image_facts import Recipe
from images import docker
from images.build import build, model
from images.ci import push
from images.console import ROOT, progress
from images.errors import UsageError
from images.matrix import space
from images.matrix.matrix import Cell
from images.recipes import recipe
from images.verbs.weights import WEIGHTS, rung_of, weights_of


def add_prefix(parser: argparse.ArgumentParser) -> None:
    about = "prefix of the names of model images, instead of appliance: registry.example/team"
    parser.add_argument("--image-prefix", metavar="PREFIX", default=model.PREFIX, help=about)


def models_of(options: argparse.Namespace, cells: Sequence[Cell]) -> list[tuple[Recipe, recipe.RungRow]]:
    """Returns the recipe of --model for each cell, with the chosen rung of a format that its engine serves.

    It is read before the build, which takes long.
    """
    if options.model is None:
        _refuse_without_model(options)
        return []
    model.check_prefix(options.image_prefix)
    row = recipe.load(ROOT, options.model)
    rungs = [rung_of(options, row, cell.engine.files.serves) for cell in cells]
    return [(recipe.carried(row, rung, is_baked=options.bake_weights), rung) for rung in rungs]


def _refuse_without_model(options: argparse.Namespace) -> None:
    """Refuses flags that mean nothing without --model."""
    for flag in ("--memory-mib", "--rung", "--bake-weights", "--alias"):
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value is not False:
            said = "" if value is True else f": {value}"
            message = f"{flag} is about the weights of a model, and none is named{said}"
            raise UsageError(message, hint="--model qwen")


def build_model(
    cell: Cell,
    result: dict[str, object],
    engine: docker.Engine,
    options: argparse.Namespace,
    named: Recipe,
    rung: recipe.RungRow,
) -> dict[str, object]:
    image = str(result["tag"])
    weights = _bring(cell, rung, engine, options, named, image) if options.bake_weights else None
    epoch_s = build.query_origin(ROOT, cell, epoch_s=None).epoch_s
    prefix = model.check_prefix(options.image_prefix)
    made = model.build(ROOT, cell, named, engine, image=image, epoch_s=epoch_s, prefix=prefix, weights=weights)
    others = sum(each.format == rung.format for each in named.rungs)
    has = f"has {rung.name} in it" if weights else f"takes one of {others} rungs when it starts"
    progress(cell.id, f"{'reused: ' if made.is_reused else ''}{made.tag} {has}")
    alias = model.set_alias(named.name, cell.id, engine, prefix) if options.alias else None
    pushed = push.push_model(ROOT, cell, made, engine, name=f"{options.push}/{named.name}") if options.push else None
    return result | {
        "tag": made.tag,
        "cell_tag": result["tag"],
        "alias": alias,
        "rung": rung.name,
        "file": rung.files[0].path,
        "is_baked": weights is not None,
        "digest": made.digest,
        "pushed": pushed,
    }


def _bring(
    cell: Cell, rung: recipe.RungRow, engine: docker.Engine, options: argparse.Namespace, named: Recipe, image: str
) -> model.Weights:
    """Returns the weights to bake, from .make/models or fetched. `image` is the cell's."""
    if not options.no_space_check:
        archives, data = ROOT / build.ARCHIVES, engine.data_folder()
        space.refuse_full(cell, space.needs_baked(rung.bytes, archives=archives, engine_data=data))
    ca_bundle = build.check_ca_bundle(options.ca_bundle)
    row = recipe.load(ROOT, named.name)
    files = weights_of(row, rung, WEIGHTS, ca_bundle, options.hub, image)
    return model.Weights(rung=named.default_rung, files=files)
