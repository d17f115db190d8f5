"""python -m appliance.host VERB: manages the appliance's containers on this machine. Installed, it is `appliance
VERB`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from appliance.console.shown import command_line
from appliance.errors import ConfigError, FatalError, UsageError
from appliance.host import SHIPPED
from appliance.host.start.together import SeveralErrors
from appliance.host.verb_table import VERBS
from appliance.settings import load_settings, process_environment

EPILOG = (
    "Exit codes: 2 usage, 10 Docker or a setting, 20 to 23 GPU, 30 to 32 model, 43 not ready, 50 volume, 60 build, "
    "61 another image than the published one. "
    "If a container ends during its start, the code is that of the container."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


@command_line
def main(argv: Sequence[str] | None = None, *, prog: str = "appliance") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words, prog)
    except FatalError as error:
        _show(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(words: list[str], prog: str) -> int:
    if not words or words[0] in ("-h", "--help") or words[0] not in VERBS:
        return _without_verb(words, prog)
    verb, options = parse(words, prog)
    code: int = verb.run(options)
    return code


def parse(words: Sequence[str], prog: str = "appliance") -> tuple[ModuleType, argparse.Namespace]:
    """Return the verb's module and its options. The first word must be one of VERBS. Raises UsageError."""
    row = VERBS[words[0]]
    try:
        verb = importlib.import_module(row.module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "appliance":
            raise
        command = f"{prog} {words[0]}"
        raise without_package(command, package) from error
    parser = _Parser(prog=f"{prog} {words[0]}", description=row.about, epilog=EPILOG, allow_abbrev=False)
    verb.add_arguments(parser)
    return verb, _parsed(parser, words[1:])


def without_package(command: str, package: str) -> ConfigError:
    """Return the error for a host verb that lacks a package. Images contain none of these packages on purpose."""
    if (load_settings({}, process_environment()).facts_dir / "image_facts.json").exists():
        message = f"`{command}` is for the machine that runs this container, and cannot be used inside of it"
        return ConfigError(message, hint=f"{VERBS[command.split()[-1]].inside}; or on that machine: {command}")
    message = f"`{command}` needs a Python package that is not installed: {package}"
    if SHIPPED.exists():
        verb = command.split()[-1]  # the extra with its packages has its name
        name = f"{json.loads(SHIPPED.read_bytes())['distribution']}[{verb}]"
        hint = f"pipx install --force '{name}', or uvx --from '{name}' appliance {verb}"
        return ConfigError(message, hint=hint)
    return ConfigError(message, hint="pipx install '.[host]'; in a clone make venv, then .venv/bin/python")


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    try:
        options, unknown = parser.parse_known_args(words)
    except UsageError as error:
        # argparse takes the value of an unknown flag for an argument, and complains about that one.
        strange = [word for word in words if word.startswith("--") and not _is_flag_of(parser, word)]
        raise (_unknown(parser, strange[0]) if strange and "--" not in words else error) from None
    if unknown:
        raise _unknown(parser, unknown[0])
    return options


def _is_flag_of(parser: argparse.ArgumentParser, word: str) -> bool:
    return word.partition("=")[0] in parser._option_string_actions


def _unknown(parser: argparse.ArgumentParser, word: str) -> UsageError:
    near = difflib.get_close_matches(word.partition("=")[0], list(parser._option_string_actions), 1)
    message = f"unknown argument: {word}"
    return UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else f"see `{parser.prog} --help`")


def _without_verb(words: Sequence[str], prog: str) -> int:
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {prog} VERB …\n\n{table()}\n\n`{prog} VERB --help` says more. {EPILOG}")
        return 0
    given = words[0] if words else ""
    near = difflib.get_close_matches(given, list(VERBS), 1)
    message = f"no such verb: {given}" if given else "a verb is missing"
    raise UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else f"known are {', '.join(VERBS)}")


def table() -> str:
    return "\n".join(f"  {name:<10} {verb.about}" for name, verb in VERBS.items())


def _show(error: FatalError) -> None:
    if isinstance(error, SeveralErrors):
        for number, each in enumerate(error.errors):
            print(end="\n" if number else "", file=sys.stderr)
            _show(each)
        return
    for line in error.log:
        print(f"  | {line}", file=sys.stderr)
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"\nhint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(prog="python -m appliance.host"))
