"""A cell with a recipe: the same image and a layer that names the allowed weights, or holds one rung of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from appliance.image_facts import (
    RECIPE_PATH,
    Recipe,
    Rung,
    dump_facts,
    dump_recipe,
    parse_image_facts,
)
from images import docker
from images.build.build import ARCHIVES, BUILD_ID_LABEL, RECIPE_LABEL, explain_failure, manifest_digest, refuse_store
from images.errors import BuildError, UsageError
from images.layers.integrity import WEIGHTS
from images.layers.tree import Entry, Tree
from images.matrix import render
from images.matrix.matrix import Cell
from images.recipes.recipe import MODELS, RecipeRow, carried

DOCKERFILE = MODELS / "Dockerfile"
IDENTITY_LABEL = f"{RECIPE_LABEL}.id"  # hash of the layer's content and of the cell's image below it
WEIGHTS_LABEL = f"{RECIPE_LABEL}.weights"  # the rung whose weights are in the image
TITLE_LABEL = "org.opencontainers.image.title"
# Prefix of local names. Nobody here owns it on a public hub, so `docker run` takes `--pull never` with such a name.
PREFIX = "appliance/"
NAMED, BAKED = "named", "baked"  # stages of the Dockerfile


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A rung and its files on this machine."""

    rung: Rung
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class ModelImage:
    tag: str
    cell: str
    digest: str  # digest of the image's manifest
    is_reused: bool


def check_prefix(prefix: str) -> str:
    """Returns the prefix with its slash. Raises UsageError if no image's name can begin with it."""
    found = f"{prefix.removesuffix('/')}/"
    if docker.IMAGE_NAME.match(f"{found}x"):
        return found
    message = f"--image-prefix does not begin an image's name: '{prefix}'"
    raise UsageError(message, hint="as in registry.example/team; without it it is appliance")


def alias_of(name: str, prefix: str = PREFIX) -> str:
    """Returns the name without a cell. It is this machine's only and never pushed."""
    return f"{prefix}{name}"


def tag_of(name: str, cell_id: str, prefix: str = PREFIX) -> str:
    return f"{alias_of(name, prefix)}:{cell_id}"


def build(
    root: Path,
    cell: Cell,
    recipe: Recipe,
    engine: docker.Engine,
    *,
    image: str,
    epoch_s: int,
    prefix: str = PREFIX,
    weights: Weights | None = None,
) -> ModelImage:
    """Builds on the engine's image of the name `image`. Raises BuildError if there is none."""
    found = engine.image(image)
    if found is None:
        message = f"cell {cell.id} has no image here: {image}"
        raise BuildError(message, hint=f"python -m images build --only {cell.id}")
    refuse_store(engine.image_store)
    tag = tag_of(recipe.name, cell.id, prefix)
    texts = {
        "image_facts.json": facts(root, cell, recipe, build_id=found.labels[BUILD_ID_LABEL]),
        "recipe.json": dump_recipe(recipe),
    }
    labels = labels_of(recipe, tag, found.id, texts, weights)
    here = engine.image(tag)
    if here and labels.items() <= here.labels.items():
        return ModelImage(tag=tag, cell=cell.id, digest=here.id, is_reused=True)
    archive = root / ARCHIVES / f"{recipe.name}-{cell.id}.oci.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="model-", dir=archive.parent) as context:
            lay_out(Path(context), texts, weights, epoch_s=epoch_s)
            stage = BAKED if weights else NAMED
            argv = model_argv(image, tag, labels, archive, context, epoch_s=epoch_s, stage=stage)
            finished = docker.stream(argv, cwd=root)
        if finished.code != 0:
            raise explain_failure(cell, finished.lines)
        digest = manifest_digest(archive)
        engine.load(archive)
    finally:
        archive.unlink(missing_ok=True)
    return ModelImage(tag=tag, cell=cell.id, digest=digest, is_reused=False)


def facts(root: Path, cell: Cell, recipe: Recipe, *, build_id: str) -> str:
    """Returns the cell's own facts, build id included: engine, caches and profiles are the same."""
    rendered = (root / cell.folder / "image_facts.json").read_text("utf-8")
    known = parse_image_facts(rendered.replace(render.BUILD_ID_MARK, build_id))
    return dump_facts(replace(known, recipe=recipe.name))


def lay_out(context: Path, texts: Mapping[str, str], weights: Weights | None, *, epoch_s: int) -> None:
    """Lays out the build's context as the image will have it. One date and mode make the layer the same everywhere."""
    for name, text in texts.items():
        (context / name).write_text(text, "utf-8")
    if weights:
        _lay_out_cache(context / "models", weights)
    for path in (context, *context.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)


def _lay_out_cache(folder: Path, weights: Weights) -> None:
    """Lays files out in the Hugging Face client's form: blobs by hash, snapshots of links. Else plain files."""
    for file, source in zip(weights.rung.files, weights.files, strict=True):
        target = folder / weights.rung.place(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        if weights.rung.repo is None:
            _link(source, target)
            continue
        cache = folder / target.relative_to(folder).parts[0]
        blob = cache / "blobs" / file.sha256
        blob.parent.mkdir(exist_ok=True)
        if not blob.exists():
            _link(source, blob)
        target.symlink_to(os.path.relpath(blob, target.parent))
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs/main").write_text(str(weights.rung.revision), "utf-8")


def _link(source: Path, target: Path) -> None:
    """Gives the file a second name if the disk allows it: weights are gigabytes."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def foreign(tree: Tree, labels: Mapping[str, str], row: RecipeRow | None) -> list[str]:
    """Returns a line for each recipe or weight that `build --model` does not put into an image. Pure.

    `row`: the recipe of this tree that the image's label names.
    """
    name, baked = labels.get(RECIPE_LABEL), labels.get(WEIGHTS_LABEL)
    found = {path: each for path, each in tree.files.items() if path.startswith(WEIGHTS)}
    there = {path: _said(each) for path, each in found.items() if each.kind != "folder"}
    text = tree.files.get(RECIPE_PATH.lstrip("/"))
    if name is None:
        return [f"of no recipe that a label names: {path}" for path in (*([text.path] if text else ()), *there)]
    if row is None or text is None:
        return [f"missing: {RECIPE_PATH}" if row else f"{MODELS} has no recipe of the label's name: {name}"]
    rungs = [carried(row, rung, is_baked=baked is not None) for rung in row.rungs if baked in (None, rung.name)]
    own = next((each for each in rungs if dump_recipe(each).encode() == text.content), None)
    if own is None:
        return [f"not a recipe of {MODELS}/{name}.yaml: {text.path}"]
    expected = _laid_out(own.default_rung) if baked else {}
    other = sorted(path for path in {*there, *expected} if there.get(path) != expected.get(path))
    return [f"{'gone' if path not in there else 'foreign weights'}: {path}" for path in other]


def _laid_out(rung: Rung) -> dict[str, str]:
    """Returns paths in the image with the content that `_said` gives them: the layout of `_lay_out_cache`."""
    folder, places = PurePosixPath(WEIGHTS), {}
    for file in rung.files:
        target = folder / rung.place(file)
        if rung.repo is None:
            places[str(target)] = file.sha256
            continue
        cache = folder / target.relative_to(folder).parts[0]
        blob = cache / "blobs" / file.sha256
        places[str(blob)] = file.sha256
        places[str(target)] = f"-> {os.path.relpath(blob, target.parent)}"
        places[str(cache / "refs/main")] = hashlib.sha256(str(rung.revision).encode()).hexdigest()
    return places


def _said(entry: Entry) -> str:
    return f"-> {entry.target}" if entry.kind == "link" else entry.sha256


def model_argv(
    image: str, tag: str, labels: Mapping[str, str], archive: Path, context: str, *, epoch_s: int, stage: str = NAMED
) -> tuple[str, ...]:
    # Weights hardly get smaller, and gzip takes half a minute a gigabyte.
    compression = ",compression=uncompressed" if stage == BAKED else ""
    return (
        *("docker", "buildx", "build", "--progress", "plain", "--provenance=false", "--sbom=false"),
        *("--file", DOCKERFILE.as_posix(), "--target", stage, "--build-arg", f"CELL={image}"),
        *("--build-arg", f"SOURCE_DATE_EPOCH={epoch_s}"),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        *("--output", f"type=oci,name={tag},dest={archive},rewrite-timestamp=true,oci-mediatypes=true{compression}"),
        context,
    )


def set_alias(name: str, cell_id: str, engine: docker.Engine, prefix: str = PREFIX) -> str:
    """Makes `appliance/NAME` the model image of this cell. Raises BuildError if that image is not here."""
    tag = tag_of(name, cell_id, prefix)
    if engine.image(tag) is None:
        message = f"no image to give the name {alias_of(name, prefix)}: {tag} is not here"
        raise BuildError(message, hint=f"python -m images build --only {cell_id} --model {name}")
    engine.tag(tag, alias_of(name, prefix))
    return alias_of(name, prefix)


def labels_of(
    recipe: Recipe, tag: str, cell_image_id: str, texts: Mapping[str, str], weights: Weights | None
) -> dict[str, str]:
    baked = weights.rung.name if weights else ""
    identity = hashlib.sha256("\0".join((cell_image_id, *texts.values(), baked)).encode()).hexdigest()[:32]
    labels = {RECIPE_LABEL: recipe.name, IDENTITY_LABEL: identity, TITLE_LABEL: tag}
    return labels | ({WEIGHTS_LABEL: baked} if baked else {})
