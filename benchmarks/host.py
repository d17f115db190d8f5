"""How long the host command takes to answer, and how soon after it is ready an appliance is shown as ready.

Programs as a user starts them, of this Python, against real containers. The lag of readiness is the time at which the
line "ready after" arrives, minus that of the appliance's own event `ready` in its log: one clock, one machine.

    python3 -m benchmarks.host [--runs 9] [--starts 5] [--image IMAGE] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

IMAGE = "appliance:llama-cpu"
ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
HOST = (sys.executable, "-m", "appliance.host")
ANSWERS_WITHIN_S = 0.5  # what is wanted of them
SHOWN_WITHIN_S = 0.2


def main() -> int:
    options = _parse()
    with _volume() as volume:
        lags = [_lag(options.image, volume) for _ in range(options.starts)]
        answers = _answers(options.image, volume, options.runs)
    machine = {"cpus": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    result = {"image": options.image, **machine, "answers_s": answers, "ready_shown_s": _spread(lags)}
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="of each verb, the first status among them [9]")
    parser.add_argument("--starts", type=int, default=5, help="of a container [5]")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    for name in ("runs", "starts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(options, name)}")
    return options


@contextmanager
def _volume() -> Iterator[str]:
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    subprocess.run(["docker", "volume", "create", name], check=True, capture_output=True)
    try:
        yield name
    finally:
        subprocess.run(["docker", "volume", "rm", name], check=True, capture_output=True)


@contextmanager
def _started(image: str, volume: str) -> Iterator[tuple[str, float]]:
    """Name and the moment at which it was shown as ready."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    argv = [*HOST, "run", str(MODEL), "-d", "--fast", "--name", name, "--volume", volume, "--image", image]
    shown, said = 0.0, []
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr
        for line in program.stderr:
            said.append(line)
            if line.startswith("ready after"):
                shown = time.time()
    if program.returncode != 0:
        sys.exit(f"`{' '.join(argv)}` ended with {program.returncode}:\n{''.join(said)}")
    try:
        yield name, shown
    finally:
        subprocess.run([*HOST, "stop", name], cwd=ROOT, check=True, capture_output=True)


def _lag(image: str, volume: str) -> float:
    with _started(image, volume) as (name, shown):
        log = subprocess.run(
            [*HOST, "logs", name, "--json"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        ready = next(event["time"] for event in events if event["event"] == "ready")
        return shown - datetime.fromisoformat(ready).timestamp()


def _answers(image: str, volume: str, runs: int) -> dict[str, dict[str, float]]:
    """`status, first` is the first after a restart by Docker: the appliance then imports what makes its documents."""
    with _started(image, volume) as (name, _):
        verbs = {"--help": ("--help",), "list": ("list",), "status": ("status", name), "run --help": ("run", "--help")}
        found = {verb: _spread([_timed((*HOST, *words)) for _ in range(runs)]) for verb, words in verbs.items()}
        return {**found, "status, first": _spread([_first_status(name) for _ in range(runs)])}


def _first_status(name: str) -> float:
    subprocess.run(["docker", "restart", f"appliance-{name}"], check=True, capture_output=True)
    while " ready " not in subprocess.run([*HOST, "list"], cwd=ROOT, check=True, capture_output=True, text=True).stdout:
        time.sleep(0.1)
    return _timed((*HOST, "status", name))


def _timed(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    named = {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)}
    return {name: round(value, 3) for name, value in named.items()}


def _in_words(result: dict[str, object]) -> str:
    answers, ready = result["answers_s"], result["ready_shown_s"]
    assert isinstance(answers, dict)
    assert isinstance(ready, dict)
    lines = [f"{result['image']} on {result['cpus']} CPUs, load {result['load']}"]
    lines += [f"{verb:<13} {_in_row(spread)}, wanted {ANSWERS_WITHIN_S} s" for verb, spread in answers.items()]
    lines.append(f"{'ready shown':<13} {_in_row(ready)} after it is, wanted {SHOWN_WITHIN_S} s")
    return "\n".join(lines)


def _in_row(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} s (median; {spread['min']:.3f} to {spread['max']:.3f})"


if __name__ == "__main__":
    sys.exit(main())
