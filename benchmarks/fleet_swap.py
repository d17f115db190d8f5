"""Time of a swap between two tuned models whose memory holds one, against the bare engine's start.

A container of the image has two models, each with a profile, and so little memory that only one of them is loaded. A
request for the other one unloads the first, loads the second and is answered: the clock runs from that request to its
first token. The bare engine is started in a second container of the same image and the same memory, with the model's
own command line, by a script that spawns it and asks until the first token comes, so that `docker run` is not counted.
Both in turn, in one run.

    python3 -m benchmarks.fleet_swap [--rounds 10] [--image IMAGE] [--memory 620m] [--json]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
import uuid
from typing import Any

from appliance.host.docker.http import Gateway
from benchmarks.start import (
    HARDENED,
    IMAGE,
    LIMIT_S,
    MODEL,
    cpu_name,
    free_port,
    has_token,
    run,
    spread,
    until_ready,
    volume,
)

NAMES = ("alpha", "beta")
FILE = "models:\n" + "".join(f"  {name}: {{model: {name}.gguf, ctx_size: 2048}}\n" for name in NAMES)
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
# Runs in the image's Python: spawns the engine of its arguments and prints the seconds to the first token.
SCRIPT = """
import http.client, json, subprocess, sys, time
began = time.monotonic()
engine = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
body = sys.argv[1]
while time.monotonic() - began < 60:
    connection = http.client.HTTPConnection("127.0.0.1", 11435, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status == 200:
            while line := reply.readline():
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    print(time.monotonic() - began)
                    engine.kill()
                    engine.wait()
                    sys.exit(0)
    except OSError:
        time.sleep(0.005)
    finally:
        connection.close()
sys.exit("no token within 60 s")
"""


def main() -> int:
    options = _parse()
    with volume() as name:
        _fill(options.image, name, options.memory)
        swaps, bares = _rounds(options, name)
    # The first of each fills the page cache.
    swaps, bares = swaps[1:], bares[1:]
    result = {
        "image": options.image,
        "cpu": cpu_name(),
        "memory": options.memory,
        "rounds": options.rounds,
        "swap_s": spread(swaps),
        "bare_s": spread(bares),
        "difference_s": round(statistics.median(a - b for a, b in zip(swaps, bares, strict=True)), 3),
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count, after one that does not [10]")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--memory", default="620m", help="memory of both containers; holds one model [620m]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1: {options.rounds}")
    return options


def _fill(image: str, name: str, memory: str) -> None:
    """Put two files of the demo model on the volume, and measure each with this memory."""
    if not MODEL.exists():
        sys.exit("error: the demo model is not here\n\nhint: make model")
    for model in NAMES:
        with MODEL.open("rb") as file:
            _appliance(image, name, "models", "add", f"{model}.gguf", stdin=file)
        limited = ("--memory", memory, "--memory-swap", memory)
        _appliance(image, name, "tune", f"{model}.gguf", "--ctx-size", "2048", "--budget-s", "20", limited=limited)
        print(f"measured {model}", file=sys.stderr)
    words = f"cat > /data/appliance.yaml <<'E'\n{FILE}E\n"
    run("docker", "run", "--rm", *HARDENED, "-v", f"{name}:/data", "--entrypoint", "sh", image, "-c", words)


def _rounds(options: argparse.Namespace, name: str) -> tuple[list[float], list[float]]:
    port, container = free_port(), f"appliance-bench-{uuid.uuid4().hex[:8]}"
    limited = ("--memory", options.memory, "--memory-swap", options.memory)
    publish = ("--publish", f"127.0.0.1:{port}:11435", "--volume", f"{name}:/data", "--name", container)
    settings = ("-e", "APPLIANCE_AUTH=off", "-e", "APPLIANCE_TUNE=off")
    run("docker", "run", "--detach", *HARDENED, *limited, *publish, *settings, options.image, "serve")
    swaps, bares = [], []
    try:
        until_ready(Gateway(host="127.0.0.1", port=port), container, LIMIT_S)
        for turn in range(options.rounds + 1):
            wanted = NAMES[(turn + 1) % 2]
            swaps.append(_swap(port, wanted))
            _check(port, wanted, turn + 1)
            bares.append(_bare(options.image, name, port, wanted, limited))
            print(f"round {turn}: swap {swaps[-1]:.3f} s, bare {bares[-1]:.3f} s", file=sys.stderr)
    finally:
        run("docker", "rm", "--force", container)
    return swaps, bares


def _swap(port: int, model: str) -> float:
    """Return the seconds from the request to its first token."""
    body = json.dumps({**ASKED, "model": model}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    request.add_header("Content-Type", "application/json")
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        for line in reply:
            if has_token(line):
                seconds = time.monotonic() - began
                reply.read()
                return seconds
    sys.exit(f"error: the answer of {model} has no token")


def _check(port: int, model: str, evictions: int) -> None:
    """End the benchmark if the memory held both, or if the plan was not measured: that would be no such swap."""
    fleet = _get(port, "/appliance/v1/fleet")
    loaded = [row["name"] for row in fleet["models"] if row["is_loaded"]]
    if loaded != [model] or sum(row["evictions"] for row in fleet["models"]) != evictions:
        sys.exit(f"error: loaded are {', '.join(loaded)}: give less --memory, or more")
    if not _get(port, f"/appliance/v1/status?model={model}")["from_profile"]:
        sys.exit(f"error: the plan of {model} is not from its profile: give more --memory")


def _bare(image: str, name: str, port: int, model: str, limited: tuple[str, ...]) -> float:
    """Return the seconds from the spawn of the bare engine to its first token."""
    argv = shlex.split(_get(port, f"/appliance/v1/plan?model={model}")["head"]["command"])
    at = argv.index("--host")
    argv = [*argv[:at], *argv[at + 2 :], "--host", "127.0.0.1", "--port", "11435"]
    words = ("--entrypoint", "python3", image, "-c", SCRIPT, json.dumps(ASKED), *argv)
    return float(run("docker", "run", "--rm", *HARDENED, *limited, "-v", f"{name}:/data", *words))


def _get(port: int, path: str) -> Any:  # noqa: ANN401 - a JSON document
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
        return json.load(reply)


def _appliance(
    image: str, name: str, *words: str, stdin: object = subprocess.DEVNULL, limited: tuple[str, ...] = ()
) -> str:
    return run("docker", "run", "--rm", "-i", *HARDENED, *limited, "-v", f"{name}:/data", image, *words, stdin=stdin)


def _in_words(result: dict[str, object]) -> str:
    rows = [f"{result['cpu']}; {result['image']}, {result['memory']}"]
    what = f"{result['rounds']} rounds, seconds to the first token"
    rows.append(f"{what:<50} median     min     max")
    for name, label in (("swap_s", "swap: unload one, load the other"), ("bare_s", "bare engine, same flags")):
        row = result[name]
        if isinstance(row, dict):
            rows.append(f"{label:<50} {row['median']:>6.3f}  {row['min']:>6.3f}  {row['max']:>6.3f}")
    rows.append(f"difference (median of rounds): {result['difference_s']} s (aim: at most 0.3)")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
