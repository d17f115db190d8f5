"""What `make soak` kept, in one line for each kind of kill: rounds, and the seconds of each step.

python3 -m benchmarks.soaked .make/soak-vllm-cpu.jsonl

Rounds of the image that was soaked last, of any day. Ends with 1 where a step took longer than is promised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS = ("told_s", "gone_s", "stopped_s", "ready_s")
# Promised: of a process that was killed nothing of its tree lives on; of SIGTERM, that everything is gone before
# `docker stop` kills it.
MOST_S: Mapping[str, float] = {"gone_s": 3.0, "stopped_s": 9.0}


def of_last_image(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("image") == rows[-1].get("image")]


def too_long(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each step that took longer than `MOST_S`, in words."""
    return [
        f"{_name(row)}, round of {row.get('when', 'an unknown day')}: {step.removesuffix('_s')} after "
        f"{row[step]:.1f} s, {most:g} are promised"
        for row in rows
        for step, most in MOST_S.items()
        if float(row.get(step, 0.0)) > most
    ]


def summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Medians, with the longest in brackets."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(_name(row), []).append(row)
    return [f"{name}: {len(found)} rounds{_steps(found)}{_left(found)}" for name, found in sorted(kinds.items())]


def _name(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("what", "member", "kind") if key in row)


def _steps(rows: list[Mapping[str, Any]]) -> str:
    found = {step: [float(row[step]) for row in rows if step in row] for step in STEPS}
    return "".join(
        f", {step.removesuffix('_s')} {statistics.median(seconds):.1f} s (at most {max(seconds):.1f})"
        for step, seconds in found.items()
        if seconds
    )


def _left(rows: list[Mapping[str, Any]]) -> str:
    left = sum(len(row.get("left", ())) for row in rows)
    return f", {left} left in /dev/shm" if left else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args(arguments).file
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        print(f"error: no rounds are kept: {path}: {error.strerror}", file=sys.stderr)
        return 2
    kept = [json.loads(line) for line in lines]
    rows = of_last_image(kept) if kept else []
    print("\n".join(summary(rows) or ["no round is kept"]))
    if len(kept) > len(rows):
        print(f"{len(kept) - len(rows)} rounds of other images are not counted")
    failed = too_long(rows)
    for words in failed:
        print(f"error: {words}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
