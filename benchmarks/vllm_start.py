"""Time from `docker run` to vLLM's first token, and what it is spent on: cold, warm, and for each variant.

The bare engine of an image, hardened as the appliance is run: a read-only root, no network but the port, another user.
Each variant has a cache of its own, empty at its first start (cold), kept for the next ones (warm). The clock starts
before `docker run` and stops at the first token; the stages end where a line of vLLM's log says so.

    python3 -m benchmarks.vllm_start --model FOLDER [--image IMAGE] [--variants eager,fork] [--warm 2] [--json]

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
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

IMAGE = "appliance:vllm-cpu"
HARDENED = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "12345:0",
    "--shm-size", "256m",
)  # fmt: skip
FLAGS = (
    "serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--served-model-name", "m", "--dtype", "bfloat16",
    "--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048",
    "--kv-cache-memory-bytes", "1073741824", "--disable-uvicorn-access-log", "--disable-fastapi-docs",
)  # fmt: skip
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
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


EAGER = ("--enforce-eager",)
VARIANTS = (
    Variant(name="default"),
    Variant(name="no-aot", environment={"VLLM_USE_AOT_COMPILE": "0"}),
    Variant(name="eager", flags=EAGER),
    Variant(name="fork", flags=EAGER, environment={"VLLM_WORKER_MULTIPROC_METHOD": "fork"}),
    Variant(name="no-byte-code", flags=EAGER, environment={"PYTHONPYCACHEPREFIX": "/tmp/none"}),
)


def main() -> int:
    options = _parse()
    chosen = [variant for variant in VARIANTS if variant.name in options.variants]
    rows = [_measured(options.image, options.model, variant, options.warm) for variant in chosen]
    found = {"image": options.image, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "variants": rows}
    print(json.dumps(found, indent=1) if options.json else "\n".join(_in_words(rows)))
    return 0


def _parse() -> argparse.Namespace:
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="safetensors, config and tokenizer")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--variants", default=",".join(names), help="which ones, by commas [all]")
    parser.add_argument("--warm", type=int, default=2, help="starts after the cold one [2]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    options.variants = options.variants.split(",")
    if unknown := sorted(set(options.variants) - set(names)):
        parser.error(f"no such variant: {', '.join(unknown)}; there are {', '.join(names)}")
    if options.warm < 1:
        parser.error(f"--warm must be at least 1: {options.warm}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model is no folder with a config.json: {options.model}")
    return options


def _measured(image: str, model: Path, variant: Variant, warm: int) -> dict[str, object]:
    with _volume() as volume:
        starts = [_start(image, model, variant, volume) for _ in range(warm + 1)]
    cold, *later = starts
    best = min(later, key=lambda start: start[FIRST_TOKEN])
    return {
        "variant": variant.name,
        "cold_s": cold[FIRST_TOKEN],
        "warm_s": [start[FIRST_TOKEN] for start in later],
        "stages_of_the_best_warm_s": _lengths(best),
    }


def _start(image: str, model: Path, variant: Variant, volume: str) -> dict[str, float]:
    """Seconds since `docker run` at which each stage ended."""
    name = f"vllm-start-{uuid.uuid4().hex[:8]}"
    began = time.monotonic()
    with _container(name, image, model, variant, volume) as log:
        ends = Ends(began)
        reader = threading.Thread(target=ends.read, args=(log,), daemon=True)
        reader.start()
        address = _address(name)
        while not _answers(address):
            if ends.is_over or time.monotonic() - began > LIMIT_S:
                message = f"{variant.name}: no answer after {time.monotonic() - began:.0f} s:\n{ends.tail()}"
                raise SystemExit(message)
            time.sleep(0.1)
        ends.found[FIRST_TOKEN] = time.monotonic() - began
    print(f"{variant.name}: {ends.found[FIRST_TOKEN]:.1f} s", file=sys.stderr)
    return {stage: round(at, 1) for stage, at in ends.found.items()}


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


@contextmanager
def _container(name: str, image: str, model: Path, variant: Variant, volume: str) -> Iterator[Iterator[str]]:
    environment = {
        "HF_HUB_OFFLINE": "1", "HOME": "/data/home", "TORCHINDUCTOR_CACHE_DIR": "/data/inductor",
        "VLLM_CACHE_ROOT": "/data/vllm", "VLLM_LOGGING_COLOR": "0", "VLLM_NO_USAGE_STATS": "1", **variant.environment,
    }  # fmt: skip
    argv = [
        *("docker", "run", "--rm", "--init", "--name", name, *HARDENED, "--publish", "127.0.0.1::8000"),
        *("--volume", f"{volume}:/data", "--volume", f"{model.resolve()}:/model:ro"),
        *(word for key, value in environment.items() for word in ("--env", f"{key}={value}")),
        *("--entrypoint", "/opt/vllm/bin/vllm", image, *FLAGS, *variant.flags),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        yield iter(process.stdout or ())
    finally:
        subprocess.run(("docker", "rm", "--force", name), check=False, capture_output=True)
        process.wait()


def _address(name: str) -> int:
    """The port that Docker chose, as soon as the container runs."""
    for _ in range(600):
        done = subprocess.run(("docker", "port", name, "8000"), check=False, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            return int(done.stdout.split()[0].rpartition(":")[2])
        time.sleep(0.1)
    message = f"the container did not start within a minute: {name}"
    raise SystemExit(message)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/completions", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False  # it does not listen yet, and Docker's proxy hangs up
    finally:
        connection.close()
    if response.status != 200:
        message = f"the first request was refused: {response.status}"
        raise SystemExit(message)
    return True


@contextmanager
def _volume() -> Iterator[str]:
    name = f"vllm-start-{uuid.uuid4().hex[:8]}"
    subprocess.run(("docker", "volume", "create", name), check=True, capture_output=True)
    try:
        yield name
    finally:
        subprocess.run(("docker", "volume", "rm", "--force", name), check=False, capture_output=True)


def _in_words(rows: list[dict[str, object]]) -> Iterator[str]:
    for row in rows:
        stages = row["stages_of_the_best_warm_s"]
        longest = max(stages, key=lambda stage: stages[stage]) if isinstance(stages, dict) and stages else "unknown"
        yield f"{row['variant']}: cold {row['cold_s']} s, warm {row['warm_s']} s; longest when warm: {longest}"
        yield f"    {stages}"


if __name__ == "__main__":
    sys.exit(main())
