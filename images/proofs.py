"""images/proven.yaml: which images were built and verified, where, when, of which commit. No input of a build id.

`verify --record` writes a row; `list`, `explain` and `select` say of each cell whether it was proven, is built here, or
is only rendered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field

from images import rows
from images.errors import MatrixError, near_miss
from images.matrix import Cell, Platform
from images.rows import Row, Text

PROOFS_FILE = Path("images/proven.yaml")
REPOSITORY = "appliance"
HEADER = """\
# Images that were built and passed `verify`, written by: python -m images verify --only CELL --record
# commit: what the image was built of; digest: of the image, shortened where it was written down so; null: not known.
"""
NOT_KNOWN = "not known"
REVISION_LABEL = "org.opencontainers.image.revision"
TELLING = (
    "engine is the pinned one",
    "kernels run natively",
    "CPU kernels compute",
)  # checks whose words are worth keeping
LONGEST_DETAIL = 200

State = Literal["proven", "built", "rendered"]


class Proof(Row):
    """One image that was built. None: nobody wrote it down."""

    cell: Text
    platform: Platform
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}(?:\+dirty)?$")] | None
    digest: Annotated[str, Field(pattern=r"^sha256:(?:[0-9a-f]{64}|[0-9a-f]{6,}…[0-9a-f]*)$")] | None
    date: date
    machine: Text | None
    size_mib: Annotated[int, Field(gt=0, strict=True)] | None
    ran: Annotated[tuple[Text, ...], Field(min_length=1)]

    def __str__(self) -> str:
        commit = self.commit or f"a commit that is {NOT_KNOWN}"
        return f"proven on {self.date}, built of {commit}: {'; '.join(self.ran)}"


class _File(Row):
    proofs: tuple[Proof, ...] = ()


Proofs = Mapping[tuple[str, str], Proof]


def load(root: Path, cells: Iterable[Cell]) -> Proofs:
    """By cell and platform. MatrixError for a row that is about no cell of the matrix."""
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
    """In the order of the cells' names; parse(dump(x)) is x."""
    data = [proof.model_dump(mode="python") | {"ran": list(proof.ran)} for proof in sorted(proofs, key=_key)]
    return HEADER + yaml.safe_dump({"proofs": data}, sort_keys=False, width=120, allow_unicode=True)


def record(root: Path, cells: Iterable[Cell], proof: Proof) -> None:
    """In the place of an earlier row about the same cell and platform."""
    known = dict(load(root, cells))
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
    toolkit: str | None = None,
) -> Proof:
    """What `verify` saw of an image, check by check, all of which passed. `toolkit`: that stood for the matrix's."""
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
        ran=(f"verify, {len(said)} checks", *others, *((f"substituted toolkit: {toolkit}",) if toolkit else ())),
    )


def platform_of(cell: Cell, name: str) -> Platform:
    """The cell's platform of that name. MatrixError when it is for another kind of machine."""
    for platform in cell.platforms:
        if platform == name:
            return platform
    message = f"cell {cell.id} is not for {name}"
    raise MatrixError(message, hint=f"it is for {', '.join(cell.platforms)}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of images. `here`: tags of this machine's engine, which are of its own platform."""

    proofs: Proofs = field(default_factory=dict)
    here: frozenset[str] = frozenset()
    own: str = ""

    def state(self, cell: Cell, platform: Platform) -> State:
        if (cell.id, platform) in self.proofs:
            return "proven"
        return "built" if self.has(cell, platform) else "rendered"

    def has(self, cell: Cell, platform: Platform) -> bool:
        """Whether its tag is in this machine's engine."""
        return platform == self.own and cell.tag in self.here

    def describe(self, cell: Cell, platform: Platform) -> str:
        """The state in a sentence, which begins with it."""
        proof, tag = self.proofs.get((cell.id, platform)), f"{cell.tag} is here"
        is_here = self.has(cell, platform)
        if proof:
            return f"{proof}; {tag}" if is_here else str(proof)
        return f"built, and no record says that it was verified: {tag}" if is_here else "rendered, never built"


def _short(detail: str) -> str:
    return detail if len(detail) <= LONGEST_DETAIL else f"{detail[: LONGEST_DETAIL - 1]}…"


def _key(proof: Proof) -> tuple[str, str]:
    return (proof.cell, proof.platform)
