"""images/published.yaml: the images that a registry has, each by its digest."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from images import docker, rows
from images.errors import BuildError, MatrixError, near_miss
from images.layers.oci import compressed_bytes, platform_manifests
from images.rows import Row

FILE = Path("images/published.yaml")


class Published(Row):
    """One image. `recipe` is None for a cell without a recipe; `compressed_bytes` is what one platform downloads, the
    largest if there are several."""

    cell: rows.Text
    recipe: rows.Text | None = None
    # A registry's host, a repository and a tag: a name without a host would be looked for on a public registry.
    image: Annotated[str, Field(pattern=r"^[a-z0-9.-]+(?:\.[a-z]+|:\d+)/[a-z0-9._/-]+:[\w.-]+$")]
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    compressed_bytes: Annotated[int, Field(gt=0, strict=True)]


class _File(Row):
    images: tuple[Published, ...]


def load(path: Path, *, cells: Collection[str], recipes: Collection[str]) -> tuple[Published, ...]:
    """Returns the rows of the file. Raises MatrixError for an unknown cell or recipe, and for two rows of one kind."""
    found = rows.check(rows.load(path), _File, name=str(path)).images
    for row in found:
        _refuse_unknown("cell", row.cell, cells, path)
        if row.recipe is not None:
            _refuse_unknown("recipe", row.recipe, recipes, path)
    rows.refuse_twice("image", (f"{row.cell} of {row.recipe or 'no recipe'}" for row in found), name=str(path))
    return found


def ask(root: Path, registry: str, cell: str, recipe: str | None) -> Published:
    """Asks the registry for the image of a cell, or of a recipe on it. Raises BuildError if it has none."""
    repository = f"{registry}/{recipe}" if recipe else registry
    image = f"{repository}:{cell}"
    top = _document(root, image)
    digest = str(_inspected(root, image, "--format", "{{json .Manifest}}")["digest"])
    manifests = platform_manifests(top["manifests"], None) if "manifests" in top else None
    documents = (
        [top] if manifests is None else [_document(root, f"{repository}@{each['digest']}") for each in manifests]
    )
    return Published(
        cell=cell, recipe=recipe, image=image, digest=digest, compressed_bytes=max(map(compressed_bytes, documents))
    )


def merged(old: Iterable[Published], new: Sequence[Published]) -> tuple[Published, ...]:
    """Returns all rows by cell and recipe, of which the new ones replace old ones of the same kind."""
    rows_by_kind = {(row.cell, row.recipe or ""): row for row in (*old, *new)}
    return tuple(row for _, row in sorted(rows_by_kind.items()))


def text(before: str, found: Iterable[Published]) -> str:
    """Returns the file with these rows below the comments at its beginning."""
    comments = [line for line in before.splitlines() if line.startswith("#")]
    made = [_row(row) for row in found]
    return "\n".join([*comments, "images:" if made else "images: []", *made]) + "\n"


def _row(row: Published) -> str:
    fields = {name: value for name, value in row.model_dump().items() if value is not None}
    first, *rest = (f"{name}: {json.dumps(value)}" for name, value in fields.items())
    return "\n    ".join([f"  - {first}", *rest])


def _document(root: Path, reference: str) -> dict[str, Any]:
    return _inspected(root, reference, "--raw")


def _inspected(root: Path, reference: str, *words: str) -> dict[str, Any]:
    argv = ("docker", "buildx", "imagetools", "inspect", reference, *words)
    answer, asked = docker.feed(argv, "".join, cwd=root)
    if asked.code != 0:
        message = f"the registry does not have this image: {reference}: {' '.join(asked.lines)}"
        raise BuildError(message, hint="make release builds and pushes it; docker login, if the registry asks for it")
    try:
        return dict(json.loads(answer))
    except (TypeError, ValueError) as error:
        message = f"the registry's answer is not JSON: {reference}: {answer[:200]!r}"
        raise BuildError(message, hint=f"docker buildx imagetools inspect {reference} shows it") from error


def _refuse_unknown(kind: str, name: str, known: Collection[str], path: Path) -> None:
    if name not in known:
        message = f"{path}: no such {kind}: {name}"
        raise MatrixError(message, hint=near_miss(name, known) or f"known are {', '.join(known)}")
