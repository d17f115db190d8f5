"""The contents of the image: its facts, its engine, its recipe, and which settings mean something to that engine."""

from __future__ import annotations

from appliance.engines.engine import Engine, load
from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts, ImageFacts, Recipe, parse_engine_facts, parse_image_facts, parse_recipe
from appliance.settings import ENGINE_SETTINGS, NODES_MAX, Settings
from appliance.start.attachments import check_files
from appliance.values import dataclass

_OUTSIDE = (
    "outside of an image there are none: `docker run --rm -i IMAGE` has this verb, or name a folder with copies of "
    "its /opt/appliance with --facts-dir"
)


@dataclass(frozen=True, kw_only=True)
class ImageContents:
    """The image with the settings of this start; known before any model is looked at."""

    settings: Settings
    image: ImageFacts
    facts: EngineFacts
    engine: Engine
    recipe: Recipe | None = None


def read_contents(settings: Settings) -> ImageContents:
    """Read the image's files. Raises ConfigError (10) if one is damaged, or if a setting does not fit its engine."""
    image, facts = load_facts(settings)
    engine = load_engine(image)
    check_settings(settings, engine)
    check_files(settings)
    recipe = load_recipe(settings, image)
    return ImageContents(settings=settings, image=image, facts=facts, engine=engine, recipe=recipe)


def load_facts(settings: Settings) -> tuple[ImageFacts, EngineFacts]:
    """Read the facts of image and engine. Raises ConfigError (10) if a file is missing or damaged."""
    try:
        image = parse_image_facts((settings.facts_dir / "image_facts.json").read_text(encoding="utf-8"))
        engine = parse_engine_facts((settings.facts_dir / "engine_facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"facts of this image cannot be read: {settings.facts_dir}: {error}"
        hint = "the image is damaged; build or pull it again" if settings.facts_dir.is_dir() else _OUTSIDE
        raise ConfigError(message, hint=hint) from error
    return image, engine


def load_engine(image: ImageFacts) -> Engine:
    """Load the image's engine. Raises ConfigError (10) if this appliance cannot start it."""
    return load(image.engine, said_by=f"{image.engine} {image.engine_version} ({image.cell})")


def load_recipe(settings: Settings, image: ImageFacts) -> Recipe | None:
    """Read the recipe; None for an image without a model. Raises ConfigError (10) if it is missing or damaged."""
    if image.recipe is None:
        return None
    try:
        return parse_recipe((settings.facts_dir / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"recipe of this image cannot be read: {settings.facts_dir / 'recipe.json'}: {error}"
        raise ConfigError(message, hint="the image is damaged; build or pull it again") from error


def check_settings(settings: Settings, engine: Engine) -> None:
    """Raise ConfigError (10) for a setting that was given and means nothing to this engine."""
    for name in sorted(ENGINE_SETTINGS - engine.settings):
        if settings.is_set(name):
            value, source = getattr(settings, name), settings.sources[name]
            message = f"setting {name} means nothing to the engine {engine.name}: '{value}' ({source})"
            raise ConfigError(message, hint=f"take it out; {engine.name} takes {', '.join(sorted(engine.settings))}")
    check_nodes(settings, engine)


def check_nodes(settings: Settings, engine: Engine) -> None:
    """Raise ConfigError (10) if number, rank and leader of the hosts contradict each other or the engine."""
    nodes, rank, sources = settings.nodes, settings.node_rank, settings.sources
    if nodes > 1 and "nodes" not in engine.settings:
        message = f"engine {engine.name} serves a model on one host: setting nodes is '{nodes}' ({sources['nodes']})"
        hint = "start a replica on each host, with --nodes 1, behind a router: docs/clusters.md"
        raise ConfigError(message, hint=hint)
    if nodes > NODES_MAX:
        message = f"setting nodes is outside 1 to {NODES_MAX}: '{nodes}' ({sources['nodes']})"
        raise ConfigError(message, hint="make smaller groups, or serve alone: --nodes 1")
    if rank >= nodes:
        given = f"'{rank}' ({sources['node_rank']}), with nodes '{nodes}' ({sources['nodes']})"
        message = f"setting node_rank is outside 0 to {nodes - 1}: {given}"
        raise ConfigError(message, hint="number the hosts from 0, and give all of them the same --nodes")
    if nodes > 1 and settings.leader is None:
        message = f"setting leader is missing: host {rank} of {nodes} ({sources['nodes']}) must know who leads"
        raise ConfigError(message, hint="give all hosts the address of the one with --node-rank 0: --leader HOST")
