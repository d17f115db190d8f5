"""A llama-perplexity of known differences: it prints the table that the real one prints, and ends as it is told.

    fake_perplexity.py --chunks N --ctx-size T [flags of the real one] [knobs]

Each piece costs 3 nats a token and what is usual for that piece, the same in every run; `--shift` adds to all pieces,
`--noise` to every other one and takes it from the rest. Only the standard library is used.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tests.fakes.quick.knobs import Knobs


def parse(argv: list[str]) -> SimpleNamespace:
    parser = Knobs()
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--ctx-size", type=int)
    parser.add_argument("--shift", type=float, default=0.0)
    parser.add_argument("--override-kv", default="")
    parser.add_argument("--by-fewer", type=float, default=0.0, help="nats that fewer experts cost")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--text-has", type=int, default=10**6, help="pieces; announced are no more")
    parser.add_argument("--stop-after", type=int, help="pieces, then exit with 0, as after a failed decode")
    parser.add_argument("--hang-after", type=int, help="pieces")
    parser.add_argument("--mark", type=Path, help="a file that is made when it hangs")
    parser.add_argument("--lose-last-row", action="store_true", help="as the real one does on a busy machine")
    parser.add_argument("--kill-after", type=int, help="pieces, then SIGKILL")
    parser.add_argument("--say", help="an error line, then exit with 1")
    parser.add_argument("--silent", type=Path, help="a file that counts runs; the first --silent-runs say nothing")
    parser.add_argument("--silent-runs", type=int, default=0)
    parser.add_argument("--nan", action="store_true")
    return parser.parse(argv)


def main(argv: list[str]) -> int:
    knobs = parse(argv)
    if knobs.silent:
        with knobs.silent.open("a") as file:
            file.write("run\n")
        if len(knobs.silent.read_text().splitlines()) <= knobs.silent_runs:
            return 1
    if knobs.say:
        print(knobs.say, file=sys.stderr, flush=True)
        return 1
    chunks = min(knobs.chunks, knobs.text_has)
    head = f"0.00.161.771 I perplexity: calculating perplexity over {chunks} chunks, n_ctx={knobs.ctx_size}"
    print(f"{head}, batch_size={knobs.ctx_size}, n_seq=1", file=sys.stderr, flush=True)
    total, shift = 0.0, knobs.shift + (knobs.by_fewer if ".expert_used_count=" in knobs.override_kv else 0.0)
    for at in range(chunks):
        if at == knobs.stop_after:
            return 0
        if at == knobs.hang_after:
            if knobs.mark:
                knobs.mark.touch()
            time.sleep(600)
        if at == knobs.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        total += 3.0 + math.sin(at) + shift + (knobs.noise if at % 2 else -knobs.noise)
        if knobs.lose_last_row and at == chunks - 1:
            return 0
        mean = math.nan if knobs.nan else total / (at + 1)
        print(f"{at * knobs.ctx_size:8d}  {math.exp(mean):.4f}  {mean:4f}  {0.1:4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
