"""Faults by the operators of mutmut, drawn by a seed: one a file, files by their size."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import Mutation, MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

from tests.mutants.reach import sources


@dataclass(frozen=True, kw_only=True)
class Fault:
    file: str
    line: int
    code: str  # the whole file with the fault in it
    diff: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def drawn(root: Path, seed: int) -> Iterator[Fault]:
    """Faults in an order that the seed decides. A file is taken once, so that all can be type-checked in one run."""
    choose = random.Random(seed)
    texts = {path: (root / path).read_text(encoding="utf-8") for path in sources(root)}
    left = {path: sum(1 for line in text.splitlines() if line.strip()) for path, text in texts.items() if text}
    while left:
        path = choose.choices(list(left), weights=list(left.values()))[0]
        del left[path]
        if fault := _of_file(path, texts[path], choose):
            yield fault


def _of_file(path: Path, text: str, choose: random.Random) -> Fault | None:
    visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), set()))
    module = MetadataWrapper(cst.parse_module(text)).visit(visitor)
    candidates = [mutation for mutation in visitor.mutations if not _is_prose(mutation)]
    # A node is drawn before one of its mutants: a call with ten arguments has twenty.
    by_node: dict[int, list[Mutation]] = {}
    for mutation in candidates:
        by_node.setdefault(id(mutation.original_node), []).append(mutation)
    if not by_node:
        return None
    mutation = choose.choice(choose.choice(list(by_node.values())))
    changed = module.deep_replace(mutation.original_node, mutation.mutated_node)
    assert isinstance(changed, cst.Module)
    code = changed.code
    before, after = text.splitlines(), code.splitlines()
    diff = "\n".join(line.rstrip() for line in difflib.unified_diff(before, after, lineterm="", n=1))
    line = next((at for at, (old, new) in enumerate(zip(before, after, strict=False), 1) if old != new), len(before))
    return Fault(file=path.as_posix(), line=line, code=code, diff=diff)


def _is_prose(mutation: Mutation) -> bool:
    """True for words of a message: another letter in them is no fault of behaviour."""
    node = mutation.original_node
    return isinstance(node, cst.SimpleString) and (" " in node.value or isinstance(mutation.mutated_node, cst.Name))
