"""Decode and prefill beside other work: what a served engine keeps of the share of the CPUs that is left to it.

The appliance serves its prediction, as it ships, in a container. Other work runs in a container beside it: processes
that never sleep, processes that work a fixed share of the time, or a second appliance that decodes. A load that begins
with `--cpus` has no other work: the container itself gets a quota. In each round every load is measured once for every
image, in random order, each beside a quiet measurement of the same image.

The share that is left is measured, not computed: as many processes that only count, and that never wait for each
other, run beside the same work in a container with the same limits, and report their CPU time. An engine that wastes
nothing decodes at its quiet speed times that share. The aim is 0.8 of it.

    python3 -m benchmarks.beside_load [--rounds 10] [--image appliance/demo ...] [--load NAME ...] [--json]

Several images are compared in the same rounds, such as one with a patch of the engine and one without.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.start import cpu_name, free_port

IMAGE = "appliance/demo"
AIM = 0.8  # of the quiet speed times the share that is left
DECODE_TOKENS, PROMPT_WORDS = 48, 160
COUNTED_S = 2.0
SETTLE_S = 0.5  # until other work that was just started runs on every CPU
LIMIT_S = 180.0  # for one answer; a run that takes longer counts with the speed that it had at least not reached

# Works `share` of the time, in turns of 10 to 30 ms, in `count` processes.
BUSY = """
import os, random, sys, time
count, share = int(sys.argv[1]), float(sys.argv[2])
for _ in range(count - 1):
    if os.fork() == 0:
        break
while True:
    turn = random.uniform(0.01, 0.03)
    until = time.monotonic() + turn * share
    while share >= 1 or time.monotonic() < until:
        pass
    time.sleep(turn * (1 - share))
"""
# The CPU time that `count` processes get which never wait, as a share of what they could get.
COUNT = """
import os, sys, time
count, seconds = int(sys.argv[1]), float(sys.argv[2])
ends = []
for _ in range(count):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        began = time.process_time()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
        os.write(write_end, repr(time.process_time() - began).encode())
        os._exit(0)
    ends.append(read_end)
print(sum(float(os.read(end, 100)) for end in ends) / (count * seconds))
"""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Other work, or a limit of the engine's own container."""

    name: str
    processes: int = 0
    share: float = 1.0
    has_engine: bool = False
    cpus: float | None = None

    @property
    def limits(self) -> tuple[str, ...]:
        return () if self.cpus is None else ("--cpus", str(self.cpus))


LOADS = (
    Load(name="1 busy process", processes=1),
    Load(name="2 busy processes", processes=2),
    Load(name="4 busy processes", processes=4),
    Load(name="2 processes, 25 %", processes=2, share=0.25),
    Load(name="2 processes, 50 %", processes=2, share=0.5),
    Load(name="2 processes, 75 %", processes=2, share=0.75),
    Load(name="a second engine", has_engine=True),
    Load(name="--cpus 1", cpus=1.0),
    Load(name="--cpus 1.5", cpus=1.5),
)
QUIET = "quiet"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """In tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One measurement beside a load, and one without it right before."""

    share: float
    speeds: Speeds
    quiet: Speeds

    def kept(self, what: str) -> float:
        """Speed as a share of the quiet speed times the CPU share that is left."""
        return float(getattr(self.speeds, what) / (getattr(self.quiet, what) * self.share))


def main() -> int:
    options = _parse()
    loads = [load for load in LOADS if not options.load or load.name in options.load]
    seen: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    with ExitStack() as stack:
        engines = {
            (image, limits): stack.enter_context(_served(image, limits))
            for image in options.image
            for limits in {(), *(load.limits for load in loads)}
        }
        for engine in engines.values():
            engine.ask()  # the first answer of an engine takes longer
        for number in range(options.rounds):
            for load in random.sample(loads, len(loads)):
                for image, found in _round(load, options.image, engines).items():
                    seen[load.name, image].append(found)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    result = {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "rounds": options.rounds,
        "rows": [_row(load.name, image, seen[load.name, image]) for load in loads for image in options.image],
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each load is measured [10]")
    parser.add_argument("--image", nargs="+", default=[IMAGE], help=f"images with a baked model [{IMAGE}]")
    names = [load.name for load in LOADS]
    shown = ", ".join(names).replace("%", "%%")
    parser.add_argument("--load", nargs="+", choices=names, metavar="NAME", help=f"only these of: {shown}")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1: {options.rounds}")
    return options


def _round(load: Load, images: list[str], engines: dict[tuple[str, tuple[str, ...]], Engine]) -> dict[str, Seen]:
    order = random.sample(images, len(images))
    quiet = {image: engines[image, ()].ask() for image in order}
    with _work(load, images[0]):
        share = _share_left(images[0], load.limits)
        return {
            image: Seen(share=share, speeds=engines[image, load.limits].ask(), quiet=quiet[image]) for image in order
        }


def _row(load: str, image: str, seen: list[Seen]) -> dict[str, object]:
    row: dict[str, object] = {"load": load, "image": image, "share_left": _median(one.share for one in seen)}
    for what in ("decode", "prefill"):
        row[f"{what}_quiet"] = _median(getattr(one.quiet, what) for one in seen)
        row[what] = _median(getattr(one.speeds, what) for one in seen)
        row[f"{what}_kept"] = _median(one.kept(what) for one in seen)
    return row


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 2)


def _in_words(result: dict[str, object]) -> str:
    lines = [
        f"{result['cpus']} CPUs: {result['cpu']}; medians of {result['rounds']} rounds, tok/s; "
        f"kept: of quiet speed times the share left (aim: {AIM:g})",
        f"{'load':<20}{'image':<28}{'share':>6}{'decode quiet':>14}{'beside':>8}{'kept':>6}"
        f"{'prefill quiet':>15}{'beside':>8}{'kept':>6}",
    ]
    rows = result["rows"]
    assert isinstance(rows, list)
    lines += [
        f"{row['load']:<20}{row['image']:<28}{row['share_left']:>6.2f}"
        f"{row['decode_quiet']:>14.1f}{row['decode']:>8.1f}{row['decode_kept']:>6.2f}"
        f"{row['prefill_quiet']:>15.0f}{row['prefill']:>8.0f}{row['prefill_kept']:>6.2f}"
        for row in rows
    ]
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An appliance that serves."""

    port: int

    def ask(self) -> Speeds:
        """One answer: a prompt that no cache holds, and a fixed number of tokens."""
        words = " ".join(random.choices(("river", "stone", "seven", "garden", "light"), k=PROMPT_WORDS))
        began = time.monotonic()
        try:
            return self._timed(words, began)
        except TimeoutError:
            seconds = time.monotonic() - began
            return Speeds(prefill=PROMPT_WORDS / seconds, decode=DECODE_TOKENS / seconds)

    def _timed(self, prompt: str, began: float) -> Speeds:
        """Time a stream from outside, which every engine can be asked for. Every token is an event."""
        request = {"prompt": prompt, "max_tokens": DECODE_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            body = json.dumps({**request, "cache_prompt": False, "stream_options": {"include_usage": True}})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                sys.exit(f"error: the engine answered {reply.status}: {reply.read(500)!r}")
            times: list[float] = []
            usage: dict[str, int] | None = None
            for line in reply:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    times += [time.monotonic()] if event["choices"] else []
        finally:
            connection.close()
        if usage is None or len(times) < DECODE_TOKENS // 2:
            sys.exit(f"error: the answer ended after {len(times)} of {DECODE_TOKENS} tokens, usage: {usage}")
        decoded = (usage["completion_tokens"] - 1) / (times[-1] - times[0])
        return Speeds(prefill=usage["prompt_tokens"] / (times[0] - began), decode=decoded)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def _served(image: str, limits: tuple[str, ...]) -> Iterator[Engine]:
    """It measures nothing by itself, so that only what is asked for runs."""
    engine = Engine(port=free_port())
    published = ("--publish", f"127.0.0.1:{engine.port}:11435", "--shm-size", "1g")  # the last for vLLM
    words = (*published, "--env", "APPLIANCE_AUTH=off", *limits)
    with _container(*words, image, "serve", "--tune", "off") as name:
        until = time.monotonic() + LIMIT_S
        while not engine.is_ready():
            if time.monotonic() > until:
                sys.exit(f"error: {image} is not ready after {LIMIT_S:g} s\n\n{_run('docker', 'logs', name)}")
            time.sleep(0.1)
        yield engine


@contextmanager
def _work(load: Load, image: str) -> Iterator[None]:
    if load.has_engine:
        with _served(image, ()) as other, _decoding(other):
            yield
    elif load.processes:
        words = ("--entrypoint", "python3", image, "-I", "-S", "-c", BUSY, str(load.processes), str(load.share))
        with _container(*words):
            time.sleep(SETTLE_S)
            yield
    else:
        yield


@contextmanager
def _decoding(other: Engine) -> Iterator[None]:
    """Streams that never end are asked for one after the other; the last one ends with its container."""
    connection = http.client.HTTPConnection("127.0.0.1", other.port, timeout=LIMIT_S)
    body = json.dumps({"prompt": "Once", "max_tokens": 100_000, "ignore_eos": True, "stream": True})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().readline()
        time.sleep(SETTLE_S)
        yield
    finally:
        connection.close()


def _share_left(image: str, limits: tuple[str, ...]) -> float:
    cpus = len(os.sched_getaffinity(0))
    program = ("--entrypoint", "python3", image, "-I", "-S", "-c", COUNT, str(cpus), str(COUNTED_S))
    return float(_run("docker", "run", "--rm", *limits, *program))


@contextmanager
def _container(*words: str) -> Iterator[str]:
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    _run("docker", "run", "--detach", "--name", name, *words)
    try:
        yield name
    finally:
        _run("docker", "rm", "--force", "--volumes", name)


def _run(*argv: str) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(argv)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
