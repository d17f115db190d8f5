"""`appliance keys …`: each verb changes or shows the file of named keys, which a running gateway notices by itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.errors import UsageError, VolumeError
from appliance.gateway.accounts.named_keys import (
    LIMIT_MAX,
    LIMITS,
    NamedKey,
    add_key,
    is_day,
    read_keys,
    remove_key,
    rotate_key,
)
from appliance.system.saved_prompts import owner_of, remove_of_owners

ACTIONS = ("list", "add", "rotate", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list", help="default: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the key, as in `ci` or `anna`")
    for name in LIMITS:
        flag = "--" + name.replace("_", "-")
        words = "requests at the same time" if name == "streams" else name.replace("_", " ")
        parser.add_argument(flag, metavar="N", type=_count, help=f"with add: most {words} (default: no limit)")
    parser.add_argument("--until", metavar="DAY", help="with add: last day on which it is valid, in UTC: 2026-12-31")
    words = "with add: it may also read and change what is below /appliance/v1, and read /metrics"
    parser.add_argument("--admin", action="store_true", help=words)


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < number <= LIMIT_MAX["tokens_per_minute"]:
        message = f"not a whole number above 0: {text[:40]}"
        raise argparse.ArgumentTypeError(message)
    return number


def run(options: argparse.Namespace, path: Path, prompts_dir: Path) -> int:
    """Run one verb on the file at `path`. Returns 0. A key is printed once, and is nowhere kept.

    Prompts in `prompts_dir` that were saved for a key go with it.

    Raises UsageError for words that do not go together, ConfigError for names, VolumeError if the volume refuses.
    """
    limits = {name: getattr(options, name) for name in LIMITS if getattr(options, name) is not None}
    _check(options, limits)
    if options.action == "list":
        _list(read_keys(path), as_json=options.json)
        return 0
    old = {owner_of(key.sha256) for key in read_keys(path) if key.name == options.name}
    change: dict[str, Callable[[], str | None]] = {
        "add": lambda: add_key(path, options.name, limits, is_admin=options.admin, until=options.until),
        "rotate": lambda: rotate_key(path, options.name),
        "remove": lambda: remove_key(path, options.name),
    }
    key = change[options.action]()
    _remove_prompts(prompts_dir, old)
    if key is None:
        _tell(options, {"name": options.name}, f"removed: {options.name}")
        return 0
    _tell(options, {"name": options.name, "key": key}, key)
    print(f"the key of {options.name}, shown this once; it works within a second", file=sys.stderr)
    return 0


def _remove_prompts(folder: Path, owners: Collection[str]) -> None:
    try:
        remove_of_owners(folder, owners)
    except OSError as error:
        message = f"the key is gone, but prompts that were saved for it are still on the volume: {folder}"
        raise VolumeError(message, hint=f"remove them: {(error.strerror or str(error)).lower()}") from error


def _tell(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document) if options.json else text)


def _check(options: argparse.Namespace, limits: dict[str, int]) -> None:
    """Raise UsageError for words that do not go together, or that no key can have."""
    hint = "see `appliance keys --help`"
    if options.action == "list" and options.name:
        message = f"keys list takes no name: {options.name}"
        raise UsageError(message, hint=hint)
    if options.action != "list" and not options.name:
        message = f"keys {options.action} needs a name"
        raise UsageError(message, hint=hint)
    if options.action != "add" and (limits or options.until or options.admin):
        message = f"limits, --until and --admin go with keys add, not with {options.action}"
        raise UsageError(message, hint="remove the key and add it anew to change its limits")
    if options.until is not None and not is_day(options.until):
        message = f"not a day: {options.until[:40]}"
        raise UsageError(message, hint="write it as in 2026-12-31")
    for name, number in limits.items():
        if number > LIMIT_MAX[name]:
            flag = "--" + name.replace("_", "-")
            message = f"{flag} is over {LIMIT_MAX[name]:,}: {number}"
            raise UsageError(message, hint="leave it out: without it there is no limit")


def _list(keys: tuple[NamedKey, ...], *, as_json: bool) -> None:
    today = datetime.now(UTC).date()
    if as_json:
        rows = [{**asdict(key), "has_ended": key.has_ended(today)} for key in keys]
        print(json.dumps([{name: value for name, value in row.items() if name != "sha256"} for row in rows], indent=1))
        return
    for key in keys:
        words = [f"{getattr(key, name):,} {name.replace('_', ' ')}" for name in LIMITS if getattr(key, name)]
        words += ["admin"] if key.is_admin else []
        words += [f"{'ended' if key.has_ended(today) else 'until'} {key.until}"] if key.until else []
        print(f"{key.name}  made {key.created}  {', '.join(words) or 'no limits'}")
    if not keys:
        print("no named keys; `appliance keys add NAME` makes one", file=sys.stderr)
