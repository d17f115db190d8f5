"""A program that behaves like `llama-bench --output jsonl --verbose --progress`, with knobs for what can go wrong.

    fake_bench.py [knobs] [llama-bench's flags]

It runs nothing: a token of a prompt takes 0.01 ms times threads, a decoded one 1 ms. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from itertools import product


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=10**6, help="end well after so many")
    parser.add_argument("--fail-after", type=int, default=10**6, help="end with 1 and --words after so many rows")
    parser.add_argument("--words", default="error: something else")
    parser.add_argument("--hang-after", type=int, default=10**6)
    parser.add_argument("--lie", default="{}", help="JSON: what rows say instead")
    parser.add_argument("--dots", action="store_true", help="rows stand behind what has no end of line")
    for name in ("n-prompt", "n-gen", "n-depth", "threads", "ubatch-size"):
        parser.add_argument(f"--{name}", type=lambda text: [int(word) for word in text.split(",")], required=True)
    for name in ("cache-type-k", "cache-type-v", "flash-attn", "load-mode"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    return parser.parse_known_args()[0]


def main() -> int:
    given = options()
    say("load_backend: loaded CPU backend")
    runs = product(given.ubatch_size, given.threads, given.n_depth, (given.n_prompt[0], -given.n_gen[0]))
    for number, (ubatch, threads, depth, work) in enumerate(runs):
        say(f"llama-bench: benchmark {number + 1}/?: starting")
        if number == given.rows:
            return 0
        if number == given.fail_after:
            say(given.words)
            return 1
        if number == given.hang_after:
            signal.pause()
        say(f"llama-bench: benchmark {number + 1}/?: warmup {'prompt' if work > 0 else 'generation'} run")
        row = {
            "build_commit": "fake",
            "n_batch": given.batch_size,
            "n_ubatch": ubatch,
            "n_threads": threads,
            "type_k": given.cache_type_k,
            "type_v": given.cache_type_v,
            "n_gpu_layers": -1,
            "n_cpu_moe": 0,
            "flash_attn": int(given.flash_attn == "on"),
            "devices": "auto",
            "load_mode": given.load_mode,
            "n_prompt": max(0, work),
            "n_gen": max(0, -work),
            "n_depth": depth,
            "samples_ns": [threads * (work * 10_000 if work > 0 else -work * 1_000_000)],
        }
        if given.dots:
            sys.stderr.write("....")
            sys.stderr.flush()
        print(json.dumps({**row, **json.loads(given.lie)}), flush=True)
    return 0


def say(words: str) -> None:
    sys.stderr.write(words + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
