"""Makes control sequences visible in all text that people read, whatever its source.

Names of files, GPUs and programs, logs and answers come from others. `main` of each command line is a
`command_line`. rich finds the stream underneath by itself, so it is used as `terminal.Terminal`, which does the same.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TextIO, cast

from appliance.errors import VolumeError

P = ParamSpec("P")

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


def command_line(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate the `main` of a command line: it writes through `shown_streams`, and its exit code tells if that cannot
    be done.

    - Nobody reads stdout any more, as in `appliance plan | head -1`: 141, as of a program that SIGPIPE ended.
    - The disk under stdout is full: 50, and stderr says so.
    - An output is closed, as in `appliance plan >&-`: what is written goes nowhere.
    - Where stderr cannot be written, the command goes on, and its exit code alone tells how it ended.
    """

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        with shown_streams():
            try:
                try:
                    return main(*args, **kwargs)
                finally:
                    sys.stdout.flush()  # what cannot be written shows here, and not while Python exits
            except BrokenPipeError:
                if not _has_no_reader(1):
                    raise  # another pipe, which nobody handled
                _stdout_to_nowhere()
                return 141
            except _NotWrittenError as error:
                _stdout_to_nowhere()
                hint = "free space where the output goes, or write it elsewhere"
                print(f"error: the output cannot be written: {error.reason}\n\nhint: {hint}", file=sys.stderr)
                return VolumeError.exit_code

    return run


def _stdout_to_nowhere() -> None:
    """Let nothing more come of what is still to be written: Python would write it at its end, and fail again."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _has_no_reader(number: int) -> bool:
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _NotWrittenError(Exception):
    """stdout has no room, or its device fails."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.reason = error.strerror or str(error)


@contextmanager
def shown_streams() -> Iterator[None]:
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        out = cast("TextIO", _Shown(sys.stdout or nowhere))
        err = cast("TextIO", _Shown(sys.stderr or nowhere, must_be_written=False))
        with redirect_stdout(out), redirect_stderr(err):
            yield


class _Shown:
    """A stream that makes control characters visible in everything written to it."""

    def __init__(self, stream: TextIO, *, must_be_written: bool = True) -> None:
        self.rich_proxied_file = beneath(stream)
        self._must_be_written = must_be_written

    def write(self, text: str) -> int:
        with self._writing():
            self.rich_proxied_file.write(shown(text))
        return len(text)

    def flush(self) -> None:
        with self._writing():
            self.rich_proxied_file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._must_be_written:
                return
            if isinstance(error, BrokenPipeError):
                raise
            raise _NotWrittenError(error) from error

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self.rich_proxied_file, name)
