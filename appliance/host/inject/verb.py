"""The verb `inject`: its flags, the endpoint to enter, and the question before anything is written."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from appliance.errors import ConfigError, UsageError
from appliance.host.docker.endpoint import (
    Endpoint,
    ServedModel,
    choose_model,
    given_endpoint,
    local_endpoint,
    query_models,
)
from appliance.host.inject.injection import (
    KEY_FILE,
    Injection,
    apply,
    differences,
    plan_injection,
    plan_undo,
    state_of,
)
from appliance.host.inject.record import forget_record
from appliance.host.inject.target import Places, Target
from appliance.host.inject.tools import TOOLS, Tool
from appliance.settings import process_environment

DESCRIPTION = "Enter the appliance in the settings of an editor or another tool, or remove it again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(tool.name for tool in TOOLS)
    parser.add_argument("tool", nargs="?", metavar="TOOL", help=names)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="remove it from the tool's settings")
    what.add_argument("--forget", action="store_true", help="delete our record of it and change no file")
    what.add_argument("--list", action="store_true", help="list the tools, their files and their state")
    parser.add_argument("--url", metavar="URL", help="URL of the endpoint [the appliance on this machine]")
    parser.add_argument("--name", metavar="NAME", help="name of the container, if several run here")
    parser.add_argument("--model", metavar="NAME", help="the endpoint's name of the model [the only one in its list]")
    parser.add_argument("--key-file", metavar="FILE", help="file with the key; tools refer to it [a file of our own]")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the tool's settings file [its usual place]")
    parser.add_argument("--create", action="store_true", help="create the tool's folder if it is missing")
    parser.add_argument("--yes", action="store_true", help="write without asking")
    parser.add_argument("--dry-run", action="store_true", help="show what would be written and exit")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    environment = process_environment()
    places = _places(environment)
    if options.list:
        return _list(places, as_json=options.json)
    tool = _tool(options.tool)
    if options.forget:
        forget_record(places, tool.name)
        print(f"{tool.title}: record deleted; its files and their backups are unchanged")
        return 0
    if options.undo:
        return _undo(tool, places, options)
    return _inject(tool, places, options, environment)


def _places(environment: Mapping[str, str]) -> Places:
    home = Path(environment.get("HOME") or Path.home())
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    return Places(
        home=home,
        config=config,
        claude=Path(environment.get("CLAUDE_CONFIG_DIR") or home / ".claude"),
        continue_=Path(environment.get("CONTINUE_GLOBAL_DIR") or home / ".continue"),
    )


def _tool(name: str | None) -> Tool:
    names = [tool.name for tool in TOOLS]
    if name is None:
        message = "no tool was named"
        raise UsageError(message, hint=f"one of {', '.join(names)}; `appliance inject --list` shows them")
    found = next((tool for tool in TOOLS if tool.name == name.lower()), None)
    if found is None:
        near = difflib.get_close_matches(name.lower(), names, 1)
        message = f"no such tool: {name}"
        raise UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else f"one of {', '.join(names)}")
    return found


def _list(places: Places, *, as_json: bool) -> int:
    rows = [_row(tool, places) for tool in TOOLS]
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(f"{row['tool']:<12} {row['state']:<28} {row['file'] or '-'}")
    return 0


def _row(tool: Tool, places: Places) -> dict[str, str | None]:
    """Return a tool's row of the list. An unreadable file is reported in its row, so that the others are still
    listed."""
    try:
        file = str(tool.file(places)) if tool.file else None
        return {"tool": tool.name, "title": tool.title, "state": state_of(tool, places), "file": file}
    except (ConfigError, ValueError) as error:
        return {"tool": tool.name, "title": tool.title, "state": "unreadable", "file": str(error)}


def _inject(tool: Tool, places: Places, options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    endpoint, model = _endpoint(options, environment)
    target = Target(
        endpoint=endpoint, model=model.id, context=model.context, key_file=_key_file(endpoint, places, options.key_file)
    )
    if tool.edits is None or (tool.needs_file and options.file is None):
        print(f"{tool.title}:")
        _print_steps(tool, target)
        if tool.needs_file:
            print("  with --file FILE the environment file is written for you")
        return 0
    injection = plan_injection(tool, places, target, options.file, may_create=options.create)
    if not injection.is_needed:
        if injection.is_known:
            apply(injection, places)  # the key may have changed, in a file that stays the same
        print(f"{tool.title} is already set up: {injection.changes[-1].before.named}")
        return 0
    if _shown_and_agreed(injection, options):
        apply(injection, places)
        _print_done(injection)
        _print_steps(tool, target)
    return 0


def _undo(tool: Tool, places: Places, options: argparse.Namespace) -> int:
    injection = plan_undo(tool, places)
    if not injection.is_needed:
        apply(injection, places)
        print(f"{tool.title}: nothing is left to remove")
        return 0
    if _shown_and_agreed(injection, options):
        apply(injection, places)
        print(f"{tool.title}: removed")
    return 0


def _endpoint(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Endpoint, ServedModel]:
    """Return endpoint and model. If URL and model are given, nothing has to run."""
    if options.url:
        endpoint = given_endpoint(options.url, options.key_file, environment)
        if options.model:
            return endpoint, _known_model(endpoint, options.model)
    else:
        endpoint = local_endpoint(options.name)
    return endpoint, choose_model(endpoint, options.model, query_models(endpoint))


def _known_model(endpoint: Endpoint, name: str) -> ServedModel:
    try:
        return choose_model(endpoint, name, query_models(endpoint))
    except ConfigError as error:
        print(f"context length unknown: {error.message}", file=sys.stderr)
        return ServedModel(id=name, context=None)


def _key_file(endpoint: Endpoint, places: Places, given: str | None) -> Path | None:
    if not endpoint.key:
        return None
    return Path(given).absolute() if given else places.own / KEY_FILE


def _shown_and_agreed(injection: Injection, options: argparse.Namespace) -> bool:
    print(differences(injection))
    for change in injection.changes:
        if change.before.mode is not None and change.mode != change.before.mode:
            print(f"mode of {change.before.named}: {change.before.mode:o} becomes {change.mode:o}")
    if options.dry_run:
        return False
    if options.yes:
        return True
    if not sys.stdin.isatty():
        message = "nothing was written: there is no terminal to ask on"
        raise UsageError(message, hint="--yes writes without asking, --dry-run only shows")
    return input("\nWrite this? [y/N] ").strip().lower() in ("y", "yes")


def _print_done(injection: Injection) -> None:
    record = injection.record
    for file in record.files if record else ():
        backup = f", backup: {file.backup}" if file.backup else ""
        print(f"written: {file.path}{backup}")
    if record and record.key_file:
        print(f"the key is in {record.key_file} (mode 600)")


def _print_steps(tool: Tool, target: Target) -> None:
    for step in tool.steps(target):
        print(f"  {step}")
