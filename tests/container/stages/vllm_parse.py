"""Feeds command lines to the real argument parser of vLLM: run with vLLM's own Python, mounted into its image.

    docker run --rm -i -v $PWD/tests/container/stages/vllm_parse.py:/parse.py:ro --entrypoint /opt/vllm/bin/python \\
        appliance:vllm-cpu /parse.py < lines.json

In: a JSON list of argument lists, each without the program: ["serve", "/models/x", "--dtype", "bfloat16"]. Out, on the
last line: a JSON list of the same length, null for what the parser takes, else what it says. No engine is started and
no model is read: the arguments are parsed, checked as `vllm serve` checks them, and made into its engine arguments.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

FOLDER = "/"  # any that is there: nothing in it is read


INTROSPECT = "/opt/appliance/lib/appliance/engines/vllm/process/introspect.py"  # of the image


def main() -> None:
    lines = json.load(sys.stdin)
    runpy.run_path(INTROSPECT)["settle_platform"]()
    parser, command = parser_and_command()
    print(json.dumps([complaint(parser, command, line) for line in lines]))


def parser_and_command() -> tuple[Any, Any]:
    """Make the parser and the `serve` command in the way that vLLM's command line makes them."""
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(prog="vllm")
    (command,) = import_module("vllm.entrypoints.cli.serve").cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    return parser, command


def complaint(parser: Any, command: Any, line: Sequence[str]) -> str | None:
    engine_args = import_module("vllm.engine.arg_utils").AsyncEngineArgs
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            arguments = parser.parse_args(line)
            command.validate(arguments)
            arguments.model = FOLDER  # a folder that is not there is looked for in the hub's cache
            engine_args.from_cli_args(arguments)
        except SystemExit:
            return said.getvalue().strip().rpartition("\n")[2]
        except Exception as error:
            return repr(error)
    return None


if __name__ == "__main__":
    main()
