"""Recipes in images/models: the weights that a model image may serve. Each fact is cited. Images carry recipe.json.

A file has `models`, with what all quantizations of one model share, and `rungs`, one quantization each, with its files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from appliance.image_facts import Recipe, RecipeFile, Rung, Tier, WeightsFormat, is_projector
from images import rows
from images.errors import MatrixError, UsageError, near_miss
from images.rows import Names, Row, Text

MODELS = Path("images/models")
HUB = "https://huggingface.co"
# The rest is for the KV cache, compute buffers and everything else on that machine. A rule of thumb for the choice of
# weights where no machine was looked at; every start of an image chooses with the machine's own figures.
WEIGHTS_SHARE = 0.75
MIB = 2**20
HINT = "see images/models/demo.yaml"
_TIERS: tuple[Tier, ...] = ("compact", "balanced", "quality")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.(?:gguf|safetensors)$")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Repo = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._][A-Za-z0-9._-]*$")]
# No step upwards and nothing hidden: it becomes a place on a volume.
FilePath = Annotated[str, Field(pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*[A-Za-z0-9][A-Za-z0-9._-]*$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(?:[._-][a-z0-9]+)*$")]
Positive = Annotated[float, Field(gt=0)]


class Wheel(Row):
    """A wheel of a package registry that carries the file; the lock has its hash."""

    lock: str
    member: str


class Citation(Row):
    """A public file in which facts were read."""

    repo: Repo
    path: Text
    commit: Commit
    read: date

    def __str__(self) -> str:
        return f"{self.repo} {self.path} at {self.commit}, read {self.read}"


class FileRow(Row):
    path: FilePath
    bytes: Annotated[int, Field(gt=0)]
    sha256: Sha256


class ShapeRow(Row):
    """Shape of the text model, by llama.cpp's GGUF keys without the architecture's prefix."""

    architecture: Name
    vocabulary: Annotated[int, Field(gt=0)]
    is_tied: bool  # the output matrix is the token embedding
    metadata: dict[str, Any]
    source: Names


class ModelRow(Row):
    """Facts that all quantizations of a model share."""

    parameters_b: Positive  # 10⁹
    active_b: Positive  # for one token
    shape: ShapeRow | None = None


class LossRow(Row):
    """Published loss of a quantization."""

    said: Text
    source: Names


class RungRow(Row):
    """A quantization of a model. `source` cites sizes and hashes; a wheel's file was measured here instead."""

    name: Name
    model: Name
    tier: Tier
    format: WeightsFormat
    quantization: Text
    repo: Repo | None = None
    revision: Commit | None = None
    url: Annotated[str, Field(pattern=r"^https://[^\s/]+/\S+$")] | None = None
    wheel: Wheel | None = None
    made_of: Name | None = None  # the rung of one GGUF file from which `convert` makes these safetensors
    files: Annotated[tuple[FileRow, ...], Field(min_length=1)]
    loss: LossRow | None = None
    source: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        message = ""
        if sum(each is not None for each in (self.repo, self.url, self.wheel, self.made_of)) != 1:
            message = f"{self.name} comes from a repo, from a url, from a wheel, or is made of another rung"
        elif (self.repo is None) != (self.revision is None):
            message = f"{self.name}: a repo has a revision, so that its files are the same for ever, and nothing else"
        elif self.made_of and not self._is_one_folder:
            message = f"{self.name}: what is made of another rung is one folder of safetensors"
        elif (self.url or self.wheel) and len(self.files) != 1:
            message = f"{self.name}: a url or a wheel gives one file and not {len(self.files)}"
        elif (self.repo or self.url) and not self.source:
            message = f"{self.name} has sizes and hashes without a source"
        if message:
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _has_files_in_order(self) -> Self:
        paths = [file.path for file in self.files]
        projectors = [path for path in paths if is_projector(path)]
        weights = [path for path in paths if path not in projectors]
        parts = [(int(part[1]), int(part[2])) for path in weights if (part := _PART.search(path))]
        count = len(weights) if self.format == "gguf" else len(parts)  # beside shards lie tokenizer and config
        is_split = bool(parts) or count > 1
        message = ""
        if len(projectors) > 1 or projectors not in ([], paths[-1:]) or not weights:
            message = f"{self.name}: one projector at most, behind the weights: {', '.join(paths)}"
        elif is_split and parts != [(at + 1, count) for at in range(count)]:
            message = f"{self.name}: its parts are not 1 to {count}, in order: {', '.join(weights)}"
        if message:
            raise ValueError(message)
        return self

    @property
    def _is_one_folder(self) -> bool:
        return self.format == "safetensors" and len({Path(file.path).parent for file in self.files}) == 1

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class RecipeRow(Row):
    """One file of images/models."""

    name: Name
    license: Text
    vendors: Names  # publishers of these models, allowed before a model's name
    default: Text  # the rung that is served if nothing else decides
    chat: dict[str, Any] = Field(default_factory=dict)
    reasoning: Text | None = None
    tools: Text | None = None
    speculation: Text | None = None
    projector: Text | None = None
    models: Annotated[dict[Name, ModelRow], Field(min_length=1)]
    rungs: Annotated[tuple[RungRow, ...], Field(min_length=1)]
    sources: dict[Name, Citation] = Field(default_factory=dict)

    @property
    def default_rung(self) -> RungRow:
        return self.rung(self.default)

    def rung(self, name: str) -> RungRow:
        return next(rung for rung in self.rungs if rung.name == name)


def names(root: Path) -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in (root / MODELS).glob("*.yaml")))


def load(root: Path, name: str) -> RecipeRow:
    """Reads a recipe. Raises MatrixError for an unknown name and for a file that is no recipe."""
    known = names(root)
    if name not in known:
        message = f"no such recipe: {name}"
        raise MatrixError(message, hint=near_miss(name, known) or f"there are {', '.join(known)}")
    path = MODELS / f"{name}.yaml"
    row = rows.check(rows.load(path, root=root, hint=HINT), RecipeRow, name=path, hint=HINT)
    _refuse_untrue_name(row, name)
    rows.refuse_twice("rung", (rung.name for rung in row.rungs), name=path)
    _refuse_unknown(path, "default", row.default, [rung.name for rung in row.rungs])
    convertible = [rung.name for rung in row.rungs if rung.format == "gguf" and len(rung.files) == 1]
    for at, rung in enumerate(row.rungs):
        _refuse_unknown(path, f"rungs.{at}.model", rung.model, row.models)
        if rung.made_of:
            _refuse_unknown(path, f"rungs.{at}.made_of", rung.made_of, convertible)
    _refuse_idle_models(path, row)
    _refuse_upside_down(path, row)
    rows.refuse_uncited(_cited(row), row.sources, name=path)
    return row


def as_recipe(row: RecipeRow) -> Recipe:
    """Returns the recipe as a model image carries it."""
    return Recipe(
        name=row.name,
        license=row.license,
        rungs=tuple(_as_rung(row, rung) for rung in row.rungs),
        default=row.default,
        chat=row.chat,
        reasoning=row.reasoning,
        tools=row.tools,
        speculation=row.speculation,
        projector=row.projector,
    )


def carried(row: RecipeRow, rung: RungRow, *, is_baked: bool) -> Recipe:
    """Returns the recipe with this rung as its default.

    With baked weights it is the only rung, since a machine without a network has no choice.
    """
    whole = replace(as_recipe(row), default=rung.name)
    return replace(whole, rungs=(whole.default_rung,)) if is_baked else whole


def find_rung(row: RecipeRow, name: str, serves: WeightsFormat | None = None) -> RungRow:
    """Finds a rung by its name or an unambiguous beginning, first in the default's format.

    Raises UsageError with the names that may be meant.
    """
    named = as_recipe(row).find(name)
    found = tuple(rung for rung in named if rung.format == (serves or row.default_rung.format))
    found = found if serves else found or named
    if len(found) == 1:
        return row.rung(found[0].name)
    if serves and named and not found:
        message = f"{named[0].name} of {row.name} is {named[0].format}, and this engine serves {serves}"
        raise UsageError(message, hint=f"there are {', '.join(rung.name for rung in _ladder(row, serves))}")
    known = [rung.name for rung in found or as_recipe(row).rungs]
    message = f"{row.name} has {len(found) or 'no'} {'rungs' if found else 'rung'} of that name: {name}"
    near = None if found else near_miss(name, known)
    raise UsageError(message, hint=near or f"there are {', '.join(known)}")


def choose(row: RecipeRow, memory_mib: int | None, serves: WeightsFormat | None = None) -> RungRow:
    """Returns the largest rung of the format that leaves a quarter of the memory free.

    Without a budget it is the default, or the first of another format. Raises UsageError if even the least is too
    large.
    """
    ladder = _ladder(row, serves or row.default_rung.format)
    if memory_mib is None:
        return row.default_rung if row.default_rung in ladder else ladder[0]
    fitting = [rung for rung in ladder if rung.bytes <= WEIGHTS_SHARE * memory_mib * MIB]
    if not fitting:
        least = min(ladder, key=lambda each: each.bytes)
        message = f"no weights of {row.name} fit into {memory_mib} MiB"
        needed_mib = int(least.bytes / WEIGHTS_SHARE / MIB) + 1
        raise UsageError(
            message, hint=f"the smallest, {least.name}, takes {needed_mib} MiB with what it needs beside it"
        )
    return max(fitting, key=lambda each: each.bytes)


def _ladder(row: RecipeRow, serves: WeightsFormat) -> list[RungRow]:
    found = [rung for rung in row.rungs if rung.format == serves]
    if not found:
        message = f"{row.name} has no weights as {serves}, which is what this engine serves"
        raise UsageError(message, hint=f"choose a cell of another engine for {row.default_rung.format}")
    return found


def _as_rung(row: RecipeRow, rung: RungRow) -> Rung:
    model = row.models[rung.model]
    shape = model.shape
    return Rung(
        name=rung.name,
        tier=rung.tier,
        format=rung.format,
        repo=rung.repo,
        revision=rung.revision,
        url=rung.url,
        files=tuple(RecipeFile(path=file.path, bytes=file.bytes, sha256=file.sha256) for file in rung.files),
        parameters_b=model.parameters_b,
        active_b=model.active_b,
        loss=rung.loss.said if rung.loss else None,
        loss_source=_in_words(row, rung.loss.source) if rung.loss else None,
        shape={**shape.model_dump(exclude={"source"}), "quantization": rung.quantization} if shape else None,
        source=_in_words(row, rung.source) or _made_where(rung),
    )


def _made_where(rung: RungRow) -> str:
    return f"made of {rung.made_of}" if rung.wheel is None else f"wheel of images/locks/{rung.wheel.lock}.txt"


def _in_words(row: RecipeRow, sources: Sequence[str]) -> str:
    return "; ".join(str(row.sources[source]) for source in sources)


def _cited(row: RecipeRow) -> list[str]:
    cited = [source for rung in row.rungs for source in (*rung.source, *(rung.loss.source if rung.loss else ()))]
    return cited + [source for model in row.models.values() if model.shape for source in model.shape.source]


def _refuse_untrue_name(row: RecipeRow, name: str) -> None:
    if row.name != name:
        message = f"{MODELS / name}.yaml: name: it is not the file's: {row.name}"
        raise MatrixError(message, hint=f"name: {name}")


def _refuse_unknown(path: Path, field: str, value: str, known: Sequence[str] | dict[str, ModelRow]) -> None:
    if value not in known:
        message = f"{path}: {field}: none of {', '.join(known)}: {value}"
        raise MatrixError(message, hint=near_miss(value, known) or HINT)


def _refuse_idle_models(path: Path, row: RecipeRow) -> None:
    for name in row.models.keys() - {rung.model for rung in row.rungs}:
        message = f"{path}: models: no rung is of the model: {name}"
        raise MatrixError(message, hint="take it out, or add its rungs")


def _refuse_upside_down(path: Path, row: RecipeRow) -> None:
    """Refuses a better tier that is smaller than a lesser one of the same model and format."""
    for rung in row.rungs:
        for other in row.rungs:
            same = (rung.model, rung.format) == (other.model, other.format)
            if same and _TIERS.index(rung.tier) > _TIERS.index(other.tier) and rung.bytes < other.bytes:
                message = f"{path}: {rung.name} is of tier {rung.tier} and smaller than {other.name}: {other.tier}"
                raise MatrixError(message, hint="compact is the smallest, quality the largest of one model")
