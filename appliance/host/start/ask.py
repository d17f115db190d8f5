"""Questions to the user."""

from __future__ import annotations

import sys


def agrees(question: str, *, default: bool = False) -> bool:
    """Ask a yes/no question; `default` is the result of an empty answer. False if there is no terminal: scripts use
    --yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{question} [{'Y/n' if default else 'y/N'}] ", end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip().lower()
    return default if not said else said in ("y", "yes")
