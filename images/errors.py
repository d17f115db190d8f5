"""Every way in which the build half ends badly, with its exit code (DESIGN.md section 6).

FatalError                 1
├─ UsageError              2  the command line itself
├─ MatrixError            10  build_matrix.yaml, a lock or a template says something that cannot be
├─ BuildError             60  the image could not be built
│  └─ ArchiveError            because an archive did not give Debian's packages: another one may
└─ VerificationError      61  something is not what it must be: a check of an image, a drifted render

A tree of its own: of `appliance`, this half may import `image_facts` and nothing else. Caught once, in `__main__`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FatalError(Exception):
    """Ends the program with `exit_code`; the message has no final period and the value stands after the colon."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(FatalError):
    exit_code = 2


class MatrixError(FatalError):
    exit_code = 10


class BuildError(FatalError):
    exit_code = 60


class ArchiveError(BuildError):
    """An archive that did not deliver. Wrong bytes from an archive are another error."""


class VerificationError(FatalError):
    exit_code = 61


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """Returns a hint with the known spelling closest to `name`, or None if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"perhaps you meant {near[0]}" if near else None
