"""The way out of all text that people read: control sequences in it are shown as words, wherever they came from.

Names of files, GPUs and programs, logs and answers are others' text. `main` of each command line writes through
`shown_streams`; rich finds the stream beneath by itself and is used as `terminal.Terminal`, which does the same.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

# C0 but for tab and newline, C1, what turns the direction of text, and halves of names that are no UTF-8. DEL does
# nothing to a terminal, and JSON has it raw.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x80-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """ESC as \\x1b. Lines stay lines, and every letter stays."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def beneath(stream: TextIO) -> TextIO:
    """For what moves the cursor itself: it takes care of others' text in what it writes."""
    inner = getattr(stream, "rich_proxied_file", None)
    return stream if inner is None else beneath(cast("TextIO", inner))


def quoted(word: str) -> str:
    """A word of a command line: bash takes it as it was meant, with control sequences as words."""
    if not _CONTROLS.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    by_bytes = _CONTROLS.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0])), plain)
    return f"$'{by_bytes}'"


@contextmanager
def shown_streams() -> Iterator[None]:
    out, err = cast("TextIO", _Shown(sys.stdout)), cast("TextIO", _Shown(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Shown:
    """A stream as it is, but for what is written."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = beneath(stream)

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(shown(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self.rich_proxied_file, name)
