"""Questions to the user."""

from __future__ import annotations

import sys


def agrees(question: str, *, default: bool = False) -> bool:
    """`default` for an empty answer. Where nobody can be asked the answer is no: a script says --yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{question} [{'Y/n' if default else 'y/N'}] ", end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip().lower()
    return default if not said else said in ("y", "yes")
