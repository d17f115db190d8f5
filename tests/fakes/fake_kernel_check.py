"""A program that behaves like kernel-check, with knobs for what it can find and how it can fail.

fake_kernel_check.py [--say VARIANT=STATUS[:SIGNAL]] [--exit CODE] [--garbage] [--hang] [--asked FILE] FLAGS
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.fakes.quick.knobs import Knobs


def main(arguments: list[str]) -> int:
    knobs = Knobs()
    add = knobs.add_argument
    add("--dir")
    add("--variant")
    add("--reference", default="x64")
    add("--types", default="all")
    add("--kv", default="all")
    add("--threads", type=int, default=2)
    add("--say", action="append", default=[], help="wrong, died, refused or unloadable instead of ok")
    add("--exit", type=int, help="with this code, and without a word on standard output")
    add("--garbage", action="store_true", help="print what is no report")
    add("--hang", action="store_true")
    add("--asked", type=Path, help="a file that gets a line for every run: variant, types, KV types")
    options = knobs.parse(arguments)
    if options.asked:
        with options.asked.open("a") as file:
            print(options.variant, options.types, options.kv, file=file)
    while options.hang:
        signal.pause()
    if options.exit is not None:
        print("fake_kernel_check: asked to fail", file=sys.stderr)
        return int(options.exit)
    said = dict(each.split("=", 1) for each in options.say)
    is_ok = True
    for variant in options.variant.split(","):
        status, _, name = said.get(variant, "ok").partition(":")
        is_ok &= status == "ok"
        row = {
            "variant": variant,
            "status": status,
            "cases": 0 if status in ("refused", "unloadable") else 24,
            "worst_nmse": 0.25 if status == "wrong" else 9.5e-10,
            "limit": 5e-4,
            "at": "MUL_MAT q4_0 n=8 CPU_REPACK",
            "signal": name or None,
            "compared": True,
            "seconds": 0.4,
        }
        print("{" if options.garbage else json.dumps(row))
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
