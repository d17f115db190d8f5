"""The command line of the build half: its parser, what it prints, and how it tells of a failure."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from images.errors import FatalError, UsageError, near_miss

ROOT = Path(__file__).resolve().parent.parent
EVERYTHING = "*"
EXIT_CODES = "exit codes: 0 done, 2 usage, 10 the matrix cannot be, 60 not built, 61 not what it must be"
# Name and password in an address. ROOT@TIMESTAMP of a snapshot archive has none.
USERINFO = re.compile(r"(?<=://)[^/\s@]+@(?!\d{4})")


def open_streams() -> None:
    """Replaces closed streams, as in `images list >&-`: prints for a missing stderr would go to stdout."""
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def _nowhere() -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def fail(error: FatalError, *, is_json: bool) -> int:
    """Prints the error on stderr and returns its exit code. With --json it is data; stdout may hold a partial answer.

    Passwords in addresses are removed.
    """
    message, hint = (USERINFO.sub("…@", text) if text else None for text in (error.message, error.hint))
    said = json.dumps({"error": message, "hint": hint, "exit_code": error.exit_code})
    lines = [said] if is_json else [f"error: {message}", *([f"hint: {hint}"] if hint else [])]
    try:
        print("\n".join(lines), file=sys.stderr, flush=True)
    except OSError:  # a full disk under stderr: the exit code says it alone
        sys.stderr = _nowhere()
    return error.exit_code


def say(options: argparse.Namespace, data: object, lines: Sequence[str]) -> None:
    print(json.dumps(data, indent=1) if options.json else "\n".join(lines))


def progress(cell_id: str, line: str) -> None:
    print(f"{cell_id}: {line}", file=sys.stderr)


class Once(argparse.Action):
    """Stores a flag's one value; of two, argparse would drop the first without a word."""

    is_given = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if option_string and self.is_given:
            # The address of an index may hold a password.
            said = "" if option_string == "--index-url" else f": {getattr(namespace, self.dest)} and {values}"
            message = f"{option_string} is given twice{said}"
            raise UsageError(message, hint=f"it takes one value; {parser.prog} --help")
        self.is_given = True
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Says what was probably meant, and raises where argparse would end the program."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, Once)

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        wrong = (found[1] or found[2]).partition("=")[0] if found else ""
        near = near_miss(wrong, self._words())
        message = message.partition(" (choose from")[0].removeprefix("argument VERB: ")
        raise UsageError(message, hint=f"{near}; {self.prog} --help lists all" if near else f"{self.prog} --help")

    def _words(self) -> list[str]:
        """Returns verbs, flags and choices, those of the verbs too: the outer parser reports a verb's unknown flag."""
        words = [*self._option_string_actions]
        for action in self._actions:
            for name in action.choices or ():
                below = action.choices[name] if isinstance(action.choices, Mapping) else None
                words += [str(name), *(below._words() if isinstance(below, Parser) else ())]
        return words


class VerbParser(Parser):
    """The parser of one verb. It imports the verb's module when its flags are first needed: all of them cost 0.5 s."""

    def __init__(self, *args: Any, module: str, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **kwargs)
        self._module: str | None = module

    def fill(self) -> None:
        """Adds the verb's flags, the first time."""
        if self._module is not None:
            verb = import_module(self._module)
            self._module = None
            verb.add_arguments(self)
            self.set_defaults(run=verb.run)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401 - argparse's own
        self.fill()
        return super().parse_known_args(args, namespace)

    def _words(self) -> list[str]:
        self.fill()
        return super()._words()
