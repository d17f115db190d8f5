"""python -m appliance.host VERB: the appliance's containers on this machine. `appliance VERB` where it is installed."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import NoReturn

from appliance.console.shown import shown_streams
from appliance.errors import ConfigError, FatalError, UsageError
from appliance.host.start.together import SeveralErrors
from appliance.settings import load_settings, process_environment

# Each names its module, which is imported when the verb is called: `list` must not pay for `bench`.
VERBS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "run": ("appliance.host.verbs.run", "start a model in a container of this machine"),
    "status": ("appliance.host.verbs.status", "what it does now: phase, tok/s, memory, uptime"),
    "list": ("appliance.host.verbs.list_services", "every appliance on this machine"),
    "chat": ("appliance.host.verbs.chat", "talk to it in the terminal"),
    "logs": ("appliance.host.verbs.logs", "what it said; -f follows"),
    "stop": ("appliance.host.verbs.stop", "end it; its volume stays"),
    "bench": ("appliance.host.bench", "measure prefill, decode and latency of it, or of any OpenAI endpoint"),
    "inject": ("appliance.host.inject", "put it into the settings of an editor or another tool; --undo takes it out"),
    "upgrade": ("appliance.host.verbs.upgrade", "take a newer image and compare its speed; --back takes the one before"),
    "version": ("appliance.host.verbs.version", "versions of this command, of Docker and of what runs"),
})  # fmt: skip
# What serves the same purpose inside of a container, which has no Docker to ask.
INSIDE: Mapping[str, str] = MappingProxyType({
    "run": "in here a model is served with `appliance serve`",
    "status": "in here `appliance health` says whether it serves, and GET /appliance/v1/status the rest, "
    "with the key of `appliance key`",
    "list": "in here `appliance models` lists the models; outside, `docker ps` the containers",
    "chat": "in here it is asked at /v1/chat/completions, with the key of `appliance key`",
    "logs": "outside, `docker logs NAME` shows them",
    "stop": "outside, `docker stop NAME` ends it",
    "bench": "in here with its URL: appliance bench http://127.0.0.1:11435/v1, and the key in OPENAI_API_KEY",
    "inject": "it changes settings of programs of that machine",
    "upgrade": "outside, a newer image is started on the same volume",
    "version": "in here `appliance version` tells of the image",
})  # fmt: skip
EPILOG = (
    "Exit codes: 2 usage, 10 Docker or a choice, 20 to 23 GPU, 30 to 32 model, 43 no readiness, 50 volume, 60 build; "
    "a container that ends at its start gives its own."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


@shown_streams()
def main(argv: Sequence[str] | None = None, *, prog: str = "appliance") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words, prog)
    except FatalError as error:
        _show(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `appliance logs | head`
        sys.stderr.close()
        return 141


def _run(words: list[str], prog: str) -> int:
    if not words or words[0] in ("-h", "--help") or words[0] not in VERBS:
        return _without_verb(words, prog)
    verb, options = parse(words, prog)
    code: int = verb.run(options)
    return code


def parse(words: Sequence[str], prog: str = "appliance") -> tuple[ModuleType, argparse.Namespace]:
    """The verb's module and its options; the first word is one of VERBS. Raises UsageError."""
    name, about = VERBS[words[0]]
    try:
        verb = importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "appliance":
            raise
        command = f"{prog} {words[0]}"
        raise without_package(command, package) from error
    parser = _Parser(prog=f"{prog} {words[0]}", description=about, epilog=EPILOG, allow_abbrev=False)
    verb.add_arguments(parser)
    return verb, _parsed(parser, words[1:])


def without_package(command: str, package: str) -> ConfigError:
    """Return the error for a verb of the host that lacks a package. An image has none of them on purpose."""
    if (load_settings({}, process_environment()).facts_dir / "image_facts.json").exists():
        message = f"`{command}` is for the machine that runs this container, and cannot be used inside of it"
        return ConfigError(message, hint=f"{INSIDE[command.split()[-1]]}; or on that machine: {command}")
    message = f"`{command}` needs a Python package that is not installed: {package}"
    return ConfigError(message, hint="pipx install '.[host]'; in a clone make venv, then .venv/bin/python")


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    options, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, list(parser._option_string_actions), 1)
        message = f"unknown argument: {unknown[0]}"
        raise UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else f"see `{parser.prog} --help`")
    return options


def _without_verb(words: Sequence[str], prog: str) -> int:
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {prog} VERB …\n\n{table()}\n\n`{prog} VERB --help` says more. {EPILOG}")
        return 0
    given = words[0] if words else ""
    near = difflib.get_close_matches(given, list(VERBS), 1)
    message = f"no such verb: {given}" if given else "a verb is missing"
    raise UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else f"known are {', '.join(VERBS)}")


def table() -> str:
    return "\n".join(f"  {name:<10} {about}" for name, (_, about) in VERBS.items())


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
