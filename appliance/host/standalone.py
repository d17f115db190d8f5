"""Runs one verb as a separate program: `python -m appliance.host.bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from appliance.console.shown import command_line
from appliance.errors import FatalError, UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


@command_line
def main(
    prog: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None = None,
) -> int:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except FatalError as error:
        for line in error.log:
            print(f"  | {line}", file=sys.stderr)
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
