"""A program that behaves like test-backend-ops in its mode `test`, with a knob for what fails.

fake_backend_ops.py [--failing COUNT] [--asked FILE] test -b CUDA0 -o OPS -p PATTERN
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

CASES = 40


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("--failing", type=int, default=0)
    add("--asked", type=Path)
    add("mode")
    add("-b", dest="backend")
    add("-o", dest="ops")
    add("-p", dest="pattern")
    options = parser.parse_args(arguments)
    if options.asked:
        words = (options.backend, options.ops, options.pattern, os.environ.get("GGML_CPU_VARIANT", "-"))
        options.asked.write_text(" ".join(words) + "\n")
    print(f"Testing 2 devices\n\nBackend 1/2: {options.backend}\n  Device description: a card\n")
    for number in range(CASES):
        is_wrong = number < options.failing
        told = "[MUL_MAT] NMSE = 0.900000000 > 0.000500000 \033[1;31mFAIL\033[0m" if is_wrong else "\033[1;32mOK\033[0m"
        print(f"  MUL_MAT(type_a=f32,type_b=f32,n={number}): {told}")
    print(f"  {CASES - options.failing}/{CASES} tests passed")
    print(f"{1 if options.failing else 2}/2 backends passed")
    return 1 if options.failing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
