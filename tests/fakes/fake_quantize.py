"""A program that behaves like llama-quantize: it writes a file that was prepared, and ends as it is told.

fake_quantize.py --source FILE [knobs] [flags of the real one] ORIGIN TARGET TYPE THREADS

The target grows to half of its size at once. With --hold FILE it stays so until that file is there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--asked", type=Path, required=True, help="a file that gets a line for every run")
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--say", help="an error line, then exit with 1")
    parser.add_argument("--cut", action="store_true", help="leave half of the file and exit with 0")
    parser.add_argument("--fill", action="store_true", help="write until the disk is full, then exit with 1")
    parser.add_argument("--max-buffer-size", type=int)
    parser.add_argument("words", nargs=4)
    knobs = parser.parse_args(argv)
    target = Path(knobs.words[1])
    with knobs.asked.open("a") as file:
        file.write(f"{' '.join(knobs.words)} {os.getpid()}\n")
    if knobs.fill:
        try:
            with target.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
        except OSError as error:
            print(f"main: failed to quantize model: {error}", file=sys.stderr, flush=True)
            return 1
    target.touch()
    os.truncate(target, knobs.source.stat().st_size // 2)
    while knobs.hold and not knobs.hold.exists():
        time.sleep(0.02)
    if knobs.say:
        print(knobs.say, file=sys.stderr, flush=True)
        return 1
    data = knobs.source.read_bytes()
    target.write_bytes(data[: len(data) // 2] if knobs.cut else data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
