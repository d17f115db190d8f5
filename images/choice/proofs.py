"""images/proven.yaml: images that were built and verified, with place, day and commit. No input of a build id.

`verify --record` writes a row. `list`, `explain` and `select` tell of each cell if it is proven, built with a
substitute toolkit, built here, or only rendered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, model_validator

from images import rows
from images.errors import MatrixError, VerificationError, near_miss
from images.matrix.matrix import Cell, Platform
from images.matrix.timing import Took
from images.rows import Row, Text

PROOFS_FILE = Path("images/proven.yaml")
REPOSITORY = "appliance"
HEADER = """\
# Images that were built and passed `verify`, written by: python -m images verify --only CELL --record
# commit: what the image was built of; digest: of the image, shortened where it was written down so; null: not known.
# digest_reproducible: true where every stage was built for this image; false where the builder had kept stages of
# earlier builds, with their times: a build of that commit then gives another digest.
# build_seconds: of a build by this project's command, without the stages `kept`, which the builder had done before.
# size_mib: of its files; compressed_bytes: what a registry sends, left out where an older build did not keep it.
# base, toolkit: what stood for the matrix's, with its digest; a row with a toolkit proves no cell.
"""
NOT_KNOWN = "not known"
REVISION_LABEL = "org.opencontainers.image.revision"
TELLING = (
    "engine is the pinned one",
    "kernels run natively",
    "CPU kernels compute",
)  # checks whose words are worth keeping
LONGEST_DETAIL = 200
DIRTY = "+dirty"
SUBSTITUTED = "substituted toolkit: "

State = Literal["proven", "substitute toolkit", "built", "built of another tree", "rendered"]


class Proof(Row):
    """An image that was built. None means unknown; for `base` and `toolkit` it means the pinned ones."""

    cell: Text
    platform: Platform
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")] | None
    digest: Annotated[str, Field(pattern=r"^sha256:(?:[0-9a-f]{64}|[0-9a-f]{6,}…[0-9a-f]*)$")] | None
    date: date
    machine: Text | None
    size_mib: Annotated[int, Field(gt=0, strict=True)] | None
    compressed_bytes: Annotated[int, Field(gt=0, strict=True)] | None = None
    ran: Annotated[tuple[Text, ...], Field(min_length=1)]
    digest_reproducible: bool | None
    build_seconds: Annotated[int, Field(ge=0, strict=True)] | None = None
    kept: tuple[Text, ...] = ()
    base: Text | None = None
    toolkit: Text | None = None

    @model_validator(mode="after")
    def _is_reproducible_by_what_is_known(self) -> Self:
        if self.digest_reproducible and (self.kept or self.build_seconds is None):
            why = f"kept: {', '.join(self.kept)}" if self.kept else "how it was built is not known"
            message = f"{self.cell}: digest_reproducible is true, and {why}"
            raise ValueError(message)
        return self

    @property
    def substitute(self) -> str | None:
        """Name of the replacement of the toolkit. Rows from before the field existed have it under what was run."""
        told = (each.removeprefix(SUBSTITUTED) for each in self.ran if each.startswith(SUBSTITUTED))
        return self.toolkit or next(told, None)

    @property
    def state(self) -> State:
        """Returns the state. A build with another compiler proves the Dockerfile, not the cell's kernels."""
        return "substitute toolkit" if self.substitute else "proven"

    def __str__(self) -> str:
        commit = self.commit or f"a commit that is {NOT_KNOWN}"
        base = f" on {self.base} in place of the pinned base" if self.base else ""
        toolkit = f" with {self.substitute} in place of the cell's own toolkit" if self.substitute else ""
        took = f"{self._took()}{', so its digest comes of no other build' if self.digest_reproducible is False else ''}"
        return f"{self.state} on {self.date}, built of {commit}{base}{toolkit}{took}: {'; '.join(self.ran)}"

    def _took(self) -> str:
        if self.build_seconds is None:
            return ""
        kept = f" ({', '.join(self.kept)} done before)" if self.kept else ""
        return f" in {self.build_seconds / 60:.0f} min{kept}"


class _File(Row):
    proofs: tuple[Proof, ...] = ()


Proofs = Mapping[tuple[str, str], Proof]


def load(root: Path, cells: Iterable[Cell]) -> Proofs:
    """Reads the proofs by cell and platform. Raises MatrixError for a row about no cell of the matrix."""
    data = rows.load(PROOFS_FILE, root=root, hint=f"git checkout {PROOFS_FILE}")
    return parse(data, {cell.id: cell.platforms for cell in cells})


def parse(data: object, platforms: Mapping[str, tuple[Platform, ...]]) -> Proofs:
    found = rows.check(data, _File, name=PROOFS_FILE).proofs
    for proof in found:
        if proof.platform not in platforms.get(proof.cell, ()):
            message = f"{PROOFS_FILE}: no cell of the matrix is {proof.cell} on {proof.platform}"
            raise MatrixError(message, hint=near_miss(proof.cell, platforms) or "take the row out")
    names = (f"{proof.cell} on {proof.platform}" for proof in found)
    rows.refuse_twice("a cell", names, name=PROOFS_FILE, hint="the newest is enough; git has the others")
    return {_key(proof): proof for proof in found}


def dump(proofs: Iterable[Proof]) -> str:
    """Returns the file's text, sorted by cell; parse(dump(x)) is x."""
    data = [_row(proof) for proof in sorted(proofs, key=_key)]
    return HEADER + yaml.safe_dump({"proofs": data}, sort_keys=False, width=120, allow_unicode=True)


def record(root: Path, cells: Iterable[Cell], proof: Proof) -> None:
    """Writes a proof in place of an earlier row about the same cell and platform.

    Raises VerificationError if a build with a substitute toolkit would replace a proof.
    """
    known = dict(load(root, cells))
    if proof.substitute and is_proven(known, cell=proof.cell, platform=proof.platform):
        message = (
            f"{PROOFS_FILE} has a proof of {proof.cell} with its own toolkit, and this image is of {proof.substitute}"
        )
        raise VerificationError(message, hint="take that row out first, if it is no longer true")
    known[proof.cell, proof.platform] = proof
    (root / PROOFS_FILE).write_text(dump(known.values()), "utf-8", newline="\n")


def of_checks(
    cell: Cell,
    platform: Platform,
    said: Mapping[str, str],
    *,
    digest: str,
    commit: str | None,
    today: date,
    machine: str,
    took: Took | None = None,
    base: str | None = None,
    toolkit: str | None = None,
    is_locked: bool = True,
) -> Proof:
    """Makes a proof of the checks of `verify`, all of which passed.

    `base` and `toolkit` name replacements of the matrix's. `is_locked`: True if the packages are those of the project's
    lock.
    """
    size = re.match(r"(\d+) MiB", said.get("size", ""))
    others = [f"{name}: {_short(said[name])}" for name in TELLING if name in said]
    return Proof(
        cell=cell.id,
        platform=platform,
        commit=commit,
        digest=digest,
        date=today,
        machine=machine,
        size_mib=int(size[1]) if size else None,
        compressed_bytes=took.compressed_bytes if took else None,
        ran=(f"verify, {len(said)} checks", *others),
        digest_reproducible=_is_reproducible(took, is_locked=is_locked),
        build_seconds=took.seconds if took else None,
        kept=took.kept if took else (),
        base=base,
        toolkit=toolkit,
    )


def _is_reproducible(took: Took | None, *, is_locked: bool) -> bool | None:
    """True if no layer was reused. Reused layers have the times of their own build, which no other build repeats."""
    if not is_locked:
        return False
    return None if took is None else not took.kept


def is_proven(proofs: Proofs, *, cell: str, platform: str) -> bool:
    """True if the image was verified and its own toolkit built it."""
    proof = proofs.get((cell, platform))
    return proof is not None and proof.state == "proven"


def refuse_dirty(cell: Cell, commit: str | None) -> None:
    """Raises VerificationError for an image of a tree that differed from its commit: nobody could build it again."""
    if commit and commit.endswith(DIRTY):
        message = (
            f"cell {cell.id} cannot be recorded: its image was built of a tree that differed from the commit: {commit}"
        )
        raise VerificationError(message, hint=f"commit, and: python -m images build --only {cell.id}")


def platform_of(cell: Cell, name: str) -> Platform:
    """Returns the cell's platform of that name. Raises MatrixError for another kind of machine."""
    for platform in cell.platforms:
        if platform == name:
            return platform
    message = f"cell {cell.id} is not for {name}"
    raise MatrixError(message, hint=f"it is for {', '.join(cell.platforms)}")


@dataclass(frozen=True, kw_only=True)
class Here:
    """An image in this machine's engine. `is_current`: True if it has this tree's build id, on its own base."""

    digest: str
    is_current: bool


@dataclass(frozen=True, kw_only=True)
class Record:
    """Known states of images. `here` has those of this machine's engine by tag, all of its own platform."""

    proofs: Proofs = field(default_factory=dict)
    here: Mapping[str, Here] = field(default_factory=dict)
    own: str = ""

    def state(self, cell: Cell, platform: Platform) -> State:
        if proof := self.proofs.get((cell.id, platform)):
            return proof.state
        here = self._here(cell, platform)
        if here is None:
            return "rendered"
        return "built" if here.is_current else "built of another tree"

    def has(self, cell: Cell, platform: Platform) -> bool:
        """True if its tag is in this machine's engine and `build` would reuse that image."""
        here = self._here(cell, platform)
        return here is not None and here.is_current

    def _here(self, cell: Cell, platform: Platform) -> Here | None:
        return self.here.get(cell.tag) if platform == self.own else None

    def describe(self, cell: Cell, platform: Platform) -> str:
        """Returns a sentence that begins with the state."""
        proof, here = self.proofs.get((cell.id, platform)), self._here(cell, platform)
        if here is None:
            return str(proof) if proof else "rendered, never built"
        if proof is None:
            why = ", and no record says that it was verified" if here.is_current else ", and `build` makes a new one"
            return f"{self.state(cell, platform)}{why}: {cell.tag} is here"
        which = "the image of that record" if _is_same(proof.digest, here.digest) else f"another image, {here.digest}"
        tree = "of this tree" if here.is_current else "of another tree, and `build` makes a new one"
        return f"{proof}; {cell.tag} is here: {which}, {tree}"


def _row(proof: Proof) -> dict[str, object]:
    """Returns the row as the file has it, without fields at their default."""
    row = proof.model_dump(mode="python", exclude_defaults=True)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in row.items()}


def _is_same(written: str | None, digest: str) -> bool:
    """Compares digests. One of them may be shortened: `sha256:cc37f25f…76c1`."""
    head, _, tail = (written or "?").partition("…")
    return digest.startswith(head) and digest.endswith(tail)


def _short(detail: str) -> str:
    return detail if len(detail) <= LONGEST_DETAIL else f"{detail[: LONGEST_DETAIL - 1]}…"


def _key(proof: Proof) -> tuple[str, str]:
    return (proof.cell, proof.platform)
