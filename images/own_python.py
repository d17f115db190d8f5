"""Importing this hands over to the Python of the project's .venv if this one lacks a package.

So `python3 -m images …` works on a machine with only Docker, make and Python 3.11: `make venv` makes the .venv or
updates it. It is imported before anything outside the standard library.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
FOR_IMAGES = (
    "debian",
    "docker",
    "elftools",
    "jinja2",
    "msgspec",
    "packageurl",
    "packaging",
    "pydantic",
    "requests",
    "spdx_tools",
    "yaml",
)
FOR_BENCHMARKS = (*FOR_IMAGES, "gguf", "numpy")
# What make says goes to stderr: stdout is data. The words after "$@" are Python's own, and what it was asked to run.
SCRIPT = """
make --silent --directory="$0" venv PYTHON="$1" >&2 || {
  echo "error: the Python environment cannot be made: make venv ended with an error" >&2
  echo "hint: its own words are above; behind a proxy that intercepts TLS: CA_BUNDLE=/path/to/bundle.pem" >&2
  exit 60
}
shift
exec "$0/.venv/bin/python" "$@"
"""


def lacking(words: Sequence[str]) -> list[str]:
    """Returns the packages that the command line `words`, with its interpreter, needs and this Python lacks."""
    is_benchmark = any(word.startswith(("benchmarks.", "benchmarks/")) for word in words[1:3])
    return [name for name in (FOR_BENCHMARKS if is_benchmark else FOR_IMAGES) if find_spec(name) is None]


def hand_over(words: Sequence[str]) -> None:
    """Returns if nothing is missing. Otherwise this process becomes the other Python, with the same words."""
    missing = lacking(words)
    if not missing:
        return
    if Path(sys.prefix).resolve() == VENV.resolve():
        _fail(f"the Python environment is damaged: {VENV} lacks {', '.join(missing)}", "rm -r .venv, then make venv")
    if shutil.which("make") is None:
        _fail(f"{sys.executable} lacks {', '.join(missing)}, and there is no make to install it with", "install make")
    os.execv("/bin/sh", ["sh", "-c", SCRIPT, str(ROOT), sys.executable, *words[1:]])  # noqa: S606


def _fail(what: str, hint: str) -> NoReturn:
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    raise SystemExit(60)


hand_over(sys.orig_argv)
