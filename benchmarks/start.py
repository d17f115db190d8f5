"""Time from `docker run` to the first token: the appliance with a profile against a bare llama-server.

Both run from the same image with the same engine flags, in turn, the order changing from pair to pair. The bare engine
is what a careful user would start by hand: the profile's own command line on a TCP port. The clock starts before
`docker run` and stops at the first streamed token; the client asks again every 10 ms until it is answered.

    python3 -m benchmarks.start [--pairs 9] [--image IMAGE] [--json]
    python3 -m benchmarks.start --beside-load [--runs 20]    starts in a row while a process keeps one CPU busy
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.host.docker.http import Gateway, NoAnswerError

IMAGE = "appliance:llama-cpu"
NEVER_SLOWER_THAN = 3.0  # times the median, beside load
MODEL = Path(__file__).parents[1] / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
HARDENED = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "12345:0",
)  # fmt: skip
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True})
LIMIT_S = 60.0


def main() -> int:
    options = _parse()
    bench = Bench(options.image)
    with volume() as bench.volume:
        _put_model(bench)
        _measure_once(bench)
        result = _beside_load(bench, options.runs) if options.beside_load else _in_pairs(bench, options.pairs)
    result = {"image": options.image, "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0)), **result}
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs that count, after one that does not [9]")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--beside-load", action="store_true", help="the appliance alone, beside a busy process")
    parser.add_argument("--runs", type=int, default=20, help="with --beside-load: how many starts [20]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    for name in ("pairs", "runs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1: {getattr(options, name)}")
    return options


@dataclass
class Bench:
    image: str
    volume: str = ""


def _in_pairs(bench: Bench, pairs: int) -> dict[str, object]:
    flags = _engine_flags(bench)
    found = [_pair(bench, flags, turn) for turn in range(pairs + 1)][1:]  # the first fills the page cache
    appliance, bare = ([pair[side] for pair in found] for side in ("appliance", "bare"))
    return {
        "pairs": pairs,
        "appliance_s": spread(appliance),
        "bare_s": spread(bare),
        "difference_s": round(statistics.median(a - b for a, b in zip(appliance, bare, strict=True)), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(appliance, bare, strict=True)), 3),
    }


def _beside_load(bench: Bench, runs: int) -> dict[str, object]:
    """One CPU of those that the containers may use is kept busy from before the first start to after the last."""
    _first_token(bench, APPLIANCE)
    with _busy_cpu():
        seconds = [_first_token(bench, APPLIANCE) for _ in range(runs)]
    print(f"starts beside load: {', '.join(f'{value:.3f}' for value in seconds)}", file=sys.stderr)
    worst = max(seconds) / statistics.median(seconds)
    return {"runs": runs, "appliance_s": spread(seconds), "worst_over_median": round(worst, 2)}


@contextmanager
def _busy_cpu() -> Iterator[None]:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    busy = subprocess.Popen((sys.executable, "-I", "-S", "-c", code))
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
    }


def _in_words(result: dict[str, object]) -> str:
    labels = {"appliance_s": "appliance, from its profile", "bare_s": "bare llama-server, same flags"}
    what = f"{result['pairs']} pairs" if "pairs" in result else f"{result['runs']} starts beside one busy CPU"
    rows = [f"{result['cpus']} CPUs: {result['cpu']}; {result['image']}"]
    rows.append(f"{f'docker run -> first token, {what}, seconds':<55} median     min     max")
    for name, label in labels.items():
        if isinstance(row := result.get(name), dict):
            rows.append(f"{label:<55} {row['median']:>6.3f}  {row['min']:>6.3f}  {row['max']:>6.3f}")
    if "ratio" in result:
        rows.append(f"difference (median of pairs): {result['difference_s']} s; ratio: {result['ratio']}")
    else:
        rows.append(f"slowest over median: {result['worst_over_median']} (aim: at most {NEVER_SLOWER_THAN:g})")
    return "\n".join(rows)


def _pair(bench: Bench, flags: list[str], turn: int) -> dict[str, float]:
    bare = (("--entrypoint", "/opt/llama/llama-server"), (*flags, "--host", "0.0.0.0", "--port", str(11435)))
    sides = {"appliance": APPLIANCE, "bare": bare}
    order = ("appliance", "bare") if turn % 2 else ("bare", "appliance")
    seconds = {side: _first_token(bench, sides[side]) for side in order}
    print(
        f"pair {turn}: " + ", ".join(f"{side} {value:.3f} s" for side, value in sorted(seconds.items())),
        file=sys.stderr,
    )
    return seconds


Side = tuple[tuple[str, ...], tuple[str, ...]]
"""Words of `docker run` before the image, and after it."""
APPLIANCE: Side = (("-e", "APPLIANCE_AUTH=off"), ())


def _first_token(bench: Bench, side: Side) -> float:
    port = free_port()
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    publish = ("--publish", f"127.0.0.1:{port}:11435", "--volume", f"{bench.volume}:/data", "--name", name)
    began = time.monotonic()
    run("docker", "run", "--detach", *HARDENED, *publish, *side[0], bench.image, *side[1])
    try:
        while not _has_answered(port):
            if time.monotonic() - began > LIMIT_S:
                sys.exit(f"error: no token within {LIMIT_S:g} s\n\n{run('docker', 'logs', name)}")
            time.sleep(0.01)
        return time.monotonic() - began
    finally:
        run("docker", "rm", "--force", name)


def _has_answered(port: int) -> bool:
    """True at the first token: the connection is closed without reading the rest."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            return False
        while line := reply.readline():
            if has_token(line):
                return True
        return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def has_token(line: bytes) -> bool:
    """True for a line of a stream with a piece of the answer's text."""
    choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
    return bool(choices and choices[0]["delta"].get("content"))


def until_ready(gateway: Gateway, container: str, limit_s: float) -> None:
    """Wait until the appliance of a container is ready. Ends the benchmark with its log after `limit_s`."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        with suppress(NoAnswerError):  # it does not listen yet
            if gateway.get("/health/ready").status == 200:
                return
        time.sleep(0.02)
    sys.exit(f"error: not ready within {limit_s:g} s\n\n{run('docker', 'logs', container)}")


@contextmanager
def volume() -> Iterator[str]:
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    run("docker", "volume", "create", name)
    try:
        yield name
    finally:
        run("docker", "volume", "rm", "--force", name)


def _put_model(bench: Bench) -> None:
    if not MODEL.exists():
        sys.exit("error: the demo model is not here\n\nhint: make model")
    with MODEL.open("rb") as file:
        _appliance(bench, "models", "add", MODEL.name, stdin=file)


def _measure_once(bench: Bench) -> None:
    _appliance(bench, "tune", "--budget-s", "20")


def _engine_flags(bench: Bench) -> list[str]:
    """The profile's command line without its socket."""
    argv = shlex.split(_appliance(bench, "plan", "--dry-run"))[1:]
    at = argv.index("--host")
    return argv[:at] + argv[at + 2 :]


def _appliance(bench: Bench, *words: str, stdin: object = subprocess.DEVNULL) -> str:
    return run(
        "docker", "run", "--rm", "-i", *HARDENED, "-v", f"{bench.volume}:/data", bench.image, *words, stdin=stdin
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(*argv: str, stdin: object = subprocess.DEVNULL) -> str:
    done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"error: {shlex.join(argv)} ended with {done.returncode}\n{done.stderr}")
    return str(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
