"""`appliance usage`: prints what was used with each key."""

from __future__ import annotations

import argparse
import json
from typing import Any

GROUPS = ("key", "model", "day")
MOST_DAYS = 400
OWN_KEY = "(own key)"
_COLUMNS = {
    "requests": "requests",
    "errors": "errors",
    "tokens_in": "tokens in",
    "tokens_cached": "cached",
    "tokens_out": "out",
    "seconds": "seconds",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = f"days to show, today included, at most {MOST_DAYS} (default: 30)"
    parser.add_argument("--days", metavar="N", type=_days, default=30, help=words)
    parser.add_argument("--by", choices=GROUPS, help="sum by key, model or day (default: a row for each of all three)")


def _days(text: str) -> int:
    days = int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
    if not 1 <= days <= MOST_DAYS:
        message = f"not a number from 1 to {MOST_DAYS}: {text[:40]}"
        raise argparse.ArgumentTypeError(message)
    return days


def show_usage(document: dict[str, Any], *, as_json: bool) -> None:
    print(json.dumps(document, indent=1) if as_json else as_text(document))


def as_text(document: dict[str, Any]) -> str:
    """Return a table with its total, and a note on what the counts lack."""
    groups = [document["by"]] if document["by"] else ["day", "key", "model"]
    rows = [[_group(row[name], name) for name in groups] + _numbers(row) for row in document["rows"]]
    lines = [[*groups, *_COLUMNS.values()], *rows]
    if len(rows) > 1:
        lines.append(["total", *[""] * (len(groups) - 1), *_numbers(document["total"])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(_padded(line, widths, len(groups))).rstrip() for line in lines] if rows else []
    notes = [] if rows else [f"nothing was used since {document['since']}"]
    if lacking := document["total"]["uncounted"]:
        notes.append(f"{lacking:,} requests without tokens: the client left, or the engine did not tell them")
    if document["problem"]:
        notes.append(f"not all is known: {document['problem']}")
    return "\n".join([*table, *notes])


def _group(value: str, name: str) -> str:
    return OWN_KEY if name == "key" and not value else value


def _numbers(row: dict[str, Any]) -> list[str]:
    return [f"{row[name]:,.1f}" if name == "seconds" else f"{row[name]:,}" for name in _COLUMNS]


def _padded(line: list[str], widths: list[int], left: int) -> list[str]:
    """Return the cells of a line: the first `left` ones aligned on the left, numbers on the right."""
    pairs = enumerate(zip(line, widths, strict=True))
    return [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in pairs]
