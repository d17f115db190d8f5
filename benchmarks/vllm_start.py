"""Time from `docker run` to vLLM's first token, and what it is spent on: cold, warm, for each variant; and of the
appliance against the bare engine.

Each container is hardened as the appliance is run: a read-only root, no network but the port, another user. The bare
engine has the command line of the plan that the appliance makes of the same model and settings, on a TCP port, and the
variables of each variant. Each variant has a cache of its own, empty at its first start (cold), kept for the next ones
(warm). The clock starts before `docker run` and stops at the first token; the stages end where a line of vLLM's log
says so.

    python3 -m benchmarks.vllm_start --model FOLDER [--image IMAGE] [--variants eager,fork] [--warm 2] [--json]
    python3 -m benchmarks.vllm_start --model FOLDER --pairs 3 [--image IMAGE] [--json]

With --pairs the appliance and the bare engine start in turn, the order changing from pair to pair, each on a volume of
its own that a pair before has filled; the ratio is the median of the pairs'.

Variants: `default` compiles with torch.compile; `no-aot` does without its whole-graph cache, which the CPU build writes
and cannot load; `eager` compiles nothing; `fork` is eager with worker processes that import nothing again;
`no-byte-code` is eager as if the image had no .pyc files.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGE = "appliance:vllm-cpu"
HARDENED = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "12345:0",
    "--shm-size", "256m",
)  # fmt: skip
# What the plan is made with: both sides of a pair have it.
SETTINGS = {
    "APPLIANCE_MODEL": "/model", "APPLIANCE_ALIAS": "m", "APPLIANCE_CTX_SIZE": "2048", "APPLIANCE_TUNE": "off",
    "APPLIANCE_AUTH": "off",
}  # fmt: skip
PORT, APPLIANCE_PORT = 8000, 11435
EAGER = "--enforce-eager"
BODY = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 1})
LIMIT_S = 900.0
# In the order of a start; each stage ends with the first line that has this.
STAGES: Mapping[str, re.Pattern[str]] = {
    "imports of the API server": re.compile(r"non-default args"),
    "imports of EngineCore": re.compile(r"Initializing a V1 LLM engine"),
    "imports of the worker": re.compile(r"Starting to load model"),
    "weights": re.compile(r"Loading weights took"),
    "compile, KV cache, warm-up": re.compile(r"init engine \("),
    "routes": re.compile(r"Application startup complete"),
}
FIRST_TOKEN = "first token"


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    is_eager: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = (
    Variant(name="default", is_eager=False),
    Variant(name="no-aot", is_eager=False, environment={"VLLM_USE_AOT_COMPILE": "0"}),
    Variant(name="eager"),
    Variant(name="fork", environment={"VLLM_WORKER_MULTIPROC_METHOD": "fork"}),
    Variant(name="no-byte-code", environment={"PYTHONPYCACHEPREFIX": "/tmp/none"}),
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A container that is started: words of `docker run` before the image and after it, and its port inside."""

    name: str
    port: int
    options: tuple[str, ...]
    words: tuple[str, ...] = ()


def main() -> int:
    options = _parse()
    found = {"image": options.image, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    argv = _planned(options.image, options.model)
    if options.pairs:
        found |= {"argv": argv, **_pairs(options.image, options.model, argv, options.pairs)}
    else:
        chosen = [variant for variant in VARIANTS if variant.name in options.variants]
        rows = [_measured(options.image, options.model, bare(variant, argv), options.warm) for variant in chosen]
        found |= {"argv": argv, "variants": rows}
    print(json.dumps(found, indent=1) if options.json else "\n".join(_in_words(found)))
    return 0


def _planned(image: str, model: Path) -> list[str]:
    """The engine's command line of the plan, as the appliance would start it."""
    with volume() as data:
        words = _docker_run(model, data, variables(SETTINGS))
        argv = (*words, image, "plan", "--dry-run")
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        message = f"error: {shlex.join(argv)} ended with {done.returncode}\n{done.stderr}"
        raise SystemExit(message)
    return shlex.split(done.stdout)


def bare(variant: Variant, argv: Sequence[str]) -> Side:
    """The engine alone, with this command line on a port instead of the socket; compiled or not as the variant wants
    it, whatever the plan does."""
    program, *flags = argv
    at = flags.index("--uds")
    flags[at : at + 2] = ["--host", "0.0.0.0", "--port", str(PORT)]
    flags = [word for word in flags if word != EAGER] + [EAGER] * variant.is_eager
    environment = {
        "HF_HUB_OFFLINE": "1", "HOME": "/data/home", "TORCHINDUCTOR_CACHE_DIR": "/data/inductor",
        "VLLM_CACHE_ROOT": "/data/vllm", "VLLM_LOGGING_COLOR": "0", "VLLM_NO_USAGE_STATS": "1", **variant.environment,
    }  # fmt: skip
    options = (*variables(environment), "--entrypoint", program)
    return Side(name=variant.name, port=PORT, options=options, words=tuple(flags))


def appliance() -> Side:
    return Side(name="appliance", port=APPLIANCE_PORT, options=variables(SETTINGS))


def variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(word for key, value in environment.items() for word in ("--env", f"{key}={value}"))


def _pairs(image: str, model: Path, argv: Sequence[str], pairs: int) -> dict[str, object]:
    """The bare engine is eager where the plan is."""
    like_the_plan = next(variant for variant in VARIANTS if variant.is_eager == (EAGER in argv))
    with volume() as own, volume() as other:
        sides = {"appliance": (appliance(), own), "bare": (bare(like_the_plan, argv), other)}
        return in_pairs(lambda side: _start(image, model, *sides[side])[FIRST_TOKEN], pairs)


def in_pairs(first_token_s: Callable[[str], float], pairs: int) -> dict[str, object]:
    """In turn, the order changing. The first pair fills the caches and does not count."""
    found = []
    for turn in range(pairs + 1):
        order = ("appliance", "bare") if turn % 2 else ("bare", "appliance")
        found.append({side: first_token_s(side) for side in order})
    counted = found[1:]
    return {
        "pairs": pairs,
        "appliance_s": [pair["appliance"] for pair in counted],
        "bare_s": [pair["bare"] for pair in counted],
        "difference_s": round(statistics.median(pair["appliance"] - pair["bare"] for pair in counted), 3),
        "ratio": round(statistics.median(pair["appliance"] / pair["bare"] for pair in counted), 3),
    }


def _parse() -> argparse.Namespace:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="safetensors, config and tokenizer")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--variants", default=",".join(names), help="which ones, by commas [all]")
    parser.add_argument("--warm", type=int, default=2, help="starts after the cold one [2]")
    parser.add_argument(
        "--pairs", type=int, metavar="N", help="the appliance against the bare engine, so many pairs that count"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    options.variants = options.variants.split(",")
    if unknown := sorted(set(options.variants) - set(names)):
        parser.error(f"no such variant: {', '.join(unknown)}; there are {', '.join(names)}")
    if options.warm < 1:
        parser.error(f"--warm must be at least 1: {options.warm}")
    if options.pairs is not None and options.pairs < 1:
        parser.error(f"--pairs must be at least 1: {options.pairs}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model is no folder with a config.json: {options.model}")
    return options


def _measured(image: str, model: Path, side: Side, warm: int) -> dict[str, object]:
    with volume() as data:
        starts = [_start(image, model, side, data) for _ in range(warm + 1)]
    cold, *later = starts
    best = min(later, key=lambda start: start[FIRST_TOKEN])
    return {
        "variant": side.name,
        "cold_s": cold[FIRST_TOKEN],
        "warm_s": [start[FIRST_TOKEN] for start in later],
        "stages_of_the_best_warm_s": _lengths(best),
    }


def _start(image: str, model: Path, side: Side, volume: str) -> dict[str, float]:
    """Seconds since `docker run` at which each stage ended."""
    name = f"vllm-start-{uuid.uuid4().hex[:8]}"
    began = time.monotonic()
    with _container(name, image, model, side, volume) as log:
        ends = Ends(began)
        reader = threading.Thread(target=ends.read, args=(log,), daemon=True)
        reader.start()
        port = published(name, side.port)
        while not answers(port):
            if ends.is_over or time.monotonic() - began > LIMIT_S:
                message = f"{side.name}: no answer after {time.monotonic() - began:.0f} s:\n{ends.tail()}"
                raise SystemExit(message)
            time.sleep(0.1)
        ends.found[FIRST_TOKEN] = time.monotonic() - began
    print(f"{side.name}: {ends.found[FIRST_TOKEN]:.1f} s", file=sys.stderr)
    return {stage: round(at, 3) for stage, at in ends.found.items()}


class Ends:
    """When the lines came that end a stage."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.found: dict[str, float] = {}
        self.is_over = False
        self._lines: list[str] = []

    def read(self, log: Iterator[str]) -> None:
        for line in log:
            self._lines.append(line)
            for stage, pattern in STAGES.items():
                if stage not in self.found and pattern.search(line):
                    self.found[stage] = time.monotonic() - self.began
        self.is_over = True

    def tail(self) -> str:
        return "".join(self._lines[-20:])


def _lengths(ends: Mapping[str, float]) -> dict[str, float]:
    """A stage whose line was not seen is part of the next one that was."""
    lengths, before = {}, 0.0
    for stage, at in sorted(ends.items(), key=lambda item: item[1]):
        lengths[stage], before = round(at - before, 1), at
    return lengths


def _docker_run(model: Path, volume: str, options: Sequence[str]) -> tuple[str, ...]:
    volumes = ("--volume", f"{volume}:/data", "--volume", f"{model.resolve()}:/model:ro")
    return ("docker", "run", "--rm", *HARDENED, *volumes, *options)


@contextmanager
def _container(name: str, image: str, model: Path, side: Side, volume: str) -> Iterator[Iterator[str]]:
    options = ("--init", "--name", name, "--publish", f"127.0.0.1::{side.port}", *side.options)
    argv = (*_docker_run(model, volume, options), image, *side.words)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        yield iter(process.stdout or ())
    finally:
        subprocess.run(("docker", "rm", "--force", name), check=False, capture_output=True)
        process.wait()


def published(name: str, inside: int) -> int:
    """The port that Docker chose, as soon as the container runs."""
    for _ in range(600):
        done = subprocess.run(("docker", "port", name, str(inside)), check=False, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return int(done.stdout.split()[0].rpartition(":")[2])
        time.sleep(0.1)
    message = f"the container did not start within a minute: {name}"
    raise SystemExit(message)


def answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False  # it does not listen yet, and Docker's proxy hangs up
    finally:
        connection.close()
    if response.status == 503:
        return False  # the appliance says so until the engine is ready
    if response.status != 200:
        message = f"the first request was refused: {response.status}"
        raise SystemExit(message)
    return True


@contextmanager
def volume() -> Iterator[str]:
    name = f"vllm-start-{uuid.uuid4().hex[:8]}"
    subprocess.run(("docker", "volume", "create", name), check=True, capture_output=True)
    try:
        yield name
    finally:
        subprocess.run(("docker", "volume", "rm", "--force", name), check=False, capture_output=True)


def _in_words(found: Mapping[str, Any]) -> Iterator[str]:
    if "ratio" in found:
        yield f"docker run -> first token, {found['pairs']} pairs, seconds; vLLM with the plan's own command line"
        yield f"appliance: {found['appliance_s']}"
        yield f"bare:      {found['bare_s']}"
        yield f"difference (median of pairs): {found['difference_s']} s; ratio: {found['ratio']}"
    for row in found.get("variants", ()):
        stages = row["stages_of_the_best_warm_s"]
        longest = max(stages, key=lambda stage: stages[stage]) if stages else "unknown"
        yield f"{row['variant']}: cold {row['cold_s']} s, warm {row['warm_s']} s; longest when warm: {longest}"
        yield f"    {stages}"


if __name__ == "__main__":
    sys.exit(main())
