"""A cell with a recipe: the same image, and one more layer that says which weights it may serve."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.image_facts import Recipe, dump_facts, dump_recipe, parse_image_facts
from images import docker, render
from images.build import ARCHIVES, BUILD_ID_LABEL, RECIPE_LABEL, explain_failure, manifest_digest, refuse_store
from images.errors import BuildError
from images.matrix import Cell
from images.recipe import MODELS

DOCKERFILE = MODELS / "Dockerfile"
TITLE_LABEL = "org.opencontainers.image.title"


@dataclass(frozen=True, kw_only=True)
class ModelImage:
    tag: str
    cell: str
    digest: str  # of the image's manifest


def alias_of(name: str) -> str:
    """What a user types who does not care which cell: of this machine only, never pushed."""
    return f"appliance/{name}"


def tag_of(name: str, cell_id: str) -> str:
    return f"{alias_of(name)}:{cell_id}"


def build(root: Path, cell: Cell, recipe: Recipe, engine: docker.Engine, *, image: str, epoch_s: int) -> ModelImage:
    """On the cell's image that the engine has under the name `image`. BuildError when there is none."""
    found = engine.image(image)
    if found is None:
        message = f"cell {cell.id} has no image here: {image}"
        raise BuildError(message, hint=f"python -m images build --only {cell.id}")
    refuse_store(engine.image_store)
    tag = tag_of(recipe.name, cell.id)
    archive = root / ARCHIVES / f"{recipe.name}-{cell.id}.oci.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    text = facts(root, cell, recipe, build_id=found.labels[BUILD_ID_LABEL])
    try:
        with tempfile.TemporaryDirectory(prefix="model-", dir=archive.parent) as context:
            (Path(context) / "image_facts.json").write_text(text, "utf-8")
            (Path(context) / "recipe.json").write_text(dump_recipe(recipe), "utf-8")
            labels = {RECIPE_LABEL: recipe.name, TITLE_LABEL: tag}
            finished = docker.stream(model_argv(image, tag, labels, archive, context, epoch_s=epoch_s), cwd=root)
        if finished.code != 0:
            raise explain_failure(cell, finished.lines)
        digest = manifest_digest(archive)
        engine.load(archive)
    finally:
        archive.unlink(missing_ok=True)
    return ModelImage(tag=tag, cell=cell.id, digest=digest)


def facts(root: Path, cell: Cell, recipe: Recipe, *, build_id: str) -> str:
    """The cell's own, build id included: the engine is the same, and so are its caches and profiles."""
    rendered = (root / cell.folder / "image_facts.json").read_text("utf-8")
    known = parse_image_facts(rendered.replace(render.BUILD_ID_MARK, build_id))
    return dump_facts(replace(known, recipe=recipe.name))


def model_argv(
    image: str, tag: str, labels: dict[str, str], archive: Path, context: str, *, epoch_s: int
) -> tuple[str, ...]:
    return (
        *("docker", "buildx", "build", "--progress", "plain", "--provenance=false", "--sbom=false"),
        *("--file", DOCKERFILE.as_posix(), "--build-arg", f"CELL={image}"),
        *("--build-arg", f"SOURCE_DATE_EPOCH={epoch_s}"),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        *("--output", f"type=oci,name={tag},dest={archive},rewrite-timestamp=true,oci-mediatypes=true"),
        context,
    )


def set_alias(name: str, cell_id: str, engine: docker.Engine) -> str:
    """`appliance/NAME` means the model image of this cell from now on. BuildError when it is not here."""
    tag = tag_of(name, cell_id)
    if engine.image(tag) is None:
        message = f"no image to give the name {alias_of(name)}: {tag} is not here"
        raise BuildError(message, hint=f"python -m images build --only {cell_id} --model {name}")
    engine.tag(tag, alias_of(name))
    return alias_of(name)
