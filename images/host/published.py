"""images/published.yaml: the images that a registry has, each by its digest."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import Field

from images import rows
from images.errors import MatrixError, near_miss
from images.rows import Row

FILE = Path("images/published.yaml")


class Published(Row):
    """One image. `recipe` is None for a cell without a recipe; `compressed_bytes` is what one platform downloads."""

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


def _refuse_unknown(kind: str, name: str, known: Collection[str], path: Path) -> None:
    if name not in known:
        message = f"{path}: no such {kind}: {name}"
        raise MatrixError(message, hint=near_miss(name, known) or f"known are {', '.join(known)}")
