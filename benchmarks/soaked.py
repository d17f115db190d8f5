"""What `make soak` kept, in one line for each kind of kill: rounds, and the seconds of each step.

python3 -m benchmarks.soaked .make/soak-vllm-cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STEPS = ("told_s", "gone_s", "stopped_s", "ready_s")


def summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Medians, with the longest in brackets."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = " ".join(str(row[key]) for key in ("what", "member", "kind") if key in row)
        kinds.setdefault(name, []).append(row)
    return [f"{name}: {len(found)} rounds{_steps(found)}{_left(found)}" for name, found in sorted(kinds.items())]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        print(f"error: no rounds are kept: {path}: {error.strerror}", file=sys.stderr)
        return 2
    print("\n".join(summary(map(json.loads, lines))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
