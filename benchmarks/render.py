"""Time to render every cell of the matrix, from reading build_matrix.yaml to the last text; nothing is written.

Each round reads matrix, locks and templates again, as one call of `python -m images render` does. The start of Python
and its imports are not in it.

    python3 -m benchmarks.render [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from images.matrix import compat, matrix, render  # noqa: E402 - found through the line above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often; the median counts [5]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rounds = [_round_s() for _ in range(options.rounds)]
    cells, files = rounds[0][1:]
    median_s = statistics.median(seconds for seconds, *_ in rounds)
    result = {
        "cells": cells,
        "files": files,
        "rounds": options.rounds,
        "median_s": round(median_s, 3),
        "min_s": round(min(seconds for seconds, *_ in rounds), 3),
        "max_s": round(max(seconds for seconds, *_ in rounds), 3),
        "cell_ms": round(1000 * median_s / cells, 1),
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _round_s() -> tuple[float, int, int]:
    """Seconds, cells, files."""
    compat.facts.cache_clear()
    began = time.monotonic()
    cells = matrix.load(ROOT).cells
    compat.check(cells)
    files = [path for cell in cells for path in render.render(cell, render.load_template(ROOT, cell))]
    return time.monotonic() - began, len(cells), len(files)


def _in_words(result: dict[str, object]) -> str:
    spread = f"{result['min_s']} to {result['max_s']} s in {result['rounds']} rounds, {result['cell_ms']} ms a cell"
    return f"{result['cells']} cells, {result['files']} files: {result['median_s']} s ({spread})"


if __name__ == "__main__":
    sys.exit(main())
