"""Makes control sequences visible in all text that people read, whatever its source.

Names of files, GPUs and programs, logs and answers come from others. `main` of each command line writes through
`shown_streams`. rich finds the stream underneath by itself, so it is used as `terminal.Terminal`, which does the same.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

# C0 without tab and newline, C1, characters that change the direction of text, and surrogates of names that are not
# UTF-8. DEL has no effect on a terminal, and JSON contains it raw.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x80-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """Return the text with control characters in words, as in \\x1b for ESC. Line breaks and all letters stay."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def beneath(stream: TextIO) -> TextIO:
    """Return the stream underneath. For code that moves the cursor itself and therefore must treat foreign text in its
    output itself."""
    inner = getattr(stream, "rich_proxied_file", None)
    return stream if inner is None else beneath(cast("TextIO", inner))


def quoted(word: str) -> str:
    """Return a word of a command line so that bash takes it literally, with control characters in words."""
    if not _CONTROLS.search(word):
        return shlex.quote(word)
    plain = word.replace("\\", "\\\\").replace("'", "\\'")
    by_bytes = _CONTROLS.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0])), plain)
    return f"$'{by_bytes}'"


def without_reader(error: BrokenPipeError) -> int:
    """Return the exit code of a command whose output nobody reads any more, as in `appliance plan | head -1`: that of a
    program which SIGPIPE ended. What is still to be written goes nowhere.

    Raises the error again if both outputs have a reader: then another pipe is broken, and nobody handled it.
    """
    streams = [stream for stream in (sys.__stdout__, sys.__stderr__) if stream and not stream.closed]
    closed = [stream.fileno() for stream in streams if _has_no_reader(stream.fileno())]
    if not closed:
        raise error
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in closed:
        os.dup2(nowhere, number)
    os.close(nowhere)
    return 141


def _has_no_reader(number: int) -> bool:
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def shown_streams() -> Iterator[None]:
    out, err = cast("TextIO", _Shown(sys.stdout)), cast("TextIO", _Shown(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Shown:
    """A stream that makes control characters visible in everything written to it."""

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
