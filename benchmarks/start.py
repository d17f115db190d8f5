"""Time from `docker run` to the first token: the appliance with a profile against a bare llama-server.

Both run from the same image with the same engine flags, in turn, the order changing from pair to pair. The bare engine
is what a careful user would start by hand: the profile's own command line on a TCP port. The clock starts before
`docker run` and stops at the first streamed token; the client asks again every 10 ms until it is answered.

    python benchmarks/start.py [--pairs 9] [--json]
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMAGE = "appliance:llama-cpu"
MODEL = Path(__file__).parents[1] / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PORT = 18435
HARDENED = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "12345:0",
)  # fmt: skip
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True})
LIMIT_S = 60.0


def main() -> int:
    options = _parse()
    with _volume() as volume:
        _put_model(volume)
        _measure_once(volume)
        flags = _engine_flags(volume)
        pairs = [_pair(volume, flags, turn) for turn in range(options.pairs + 1)][1:]  # the first fills the page cache
    appliance, bare = ([pair[side] for pair in pairs] for side in ("appliance", "bare"))
    result = {
        "pairs": options.pairs,
        "appliance_s": _spread(appliance),
        "bare_s": _spread(bare),
        "difference_s": round(statistics.median(a - b for a, b in zip(appliance, bare, strict=True)), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(appliance, bare, strict=True)), 3),
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs that count, after one that does not [9]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    return options


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
    }


def _in_words(result: dict[str, object]) -> str:
    rows = [f"docker run -> first token, {result['pairs']} pairs, seconds       median     min     max"]
    for name in ("appliance_s", "bare_s"):
        row = result[name]
        assert isinstance(row, dict)
        label = {"appliance_s": "appliance, from its profile", "bare_s": "bare llama-server, same flags"}[name]
        rows.append(f"{label:<55} {row['median']:>6.3f}  {row['min']:>6.3f}  {row['max']:>6.3f}")
    rows.append(f"difference (median of pairs): {result['difference_s']} s; ratio: {result['ratio']}")
    return "\n".join(rows)


def _pair(volume: str, flags: list[str], turn: int) -> dict[str, float]:
    bare = ("--entrypoint", "/opt/llama/llama-server", IMAGE, *flags, "--host", "0.0.0.0", "--port", str(11435))
    sides = {"appliance": ("-e", "APPLIANCE_AUTH=off", IMAGE), "bare": bare}
    order = ("appliance", "bare") if turn % 2 else ("bare", "appliance")
    seconds = {side: _first_token(volume, sides[side]) for side in order}
    print(
        f"pair {turn}: " + ", ".join(f"{side} {value:.3f} s" for side, value in sorted(seconds.items())),
        file=sys.stderr,
    )
    return seconds


def _first_token(volume: str, arguments: tuple[str, ...]) -> float:
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    publish = ("--publish", f"127.0.0.1:{PORT}:11435", "--volume", f"{volume}:/data", "--name", name)
    began = time.monotonic()
    _run("docker", "run", "--detach", *HARDENED, *publish, *arguments)
    try:
        while not _has_answered():
            if time.monotonic() - began > LIMIT_S:
                sys.exit(f"error: no token within {LIMIT_S:g} s\n\n{_run('docker', 'logs', name)}")
            time.sleep(0.01)
        return time.monotonic() - began
    finally:
        _run("docker", "rm", "--force", name)


def _has_answered() -> bool:
    """True at the first token: the connection is closed without reading the rest."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", BODY, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            return False
        while line := reply.readline():
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    return True
        return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def _volume() -> Iterator[str]:
    name = f"appliance-bench-{uuid.uuid4().hex[:8]}"
    _run("docker", "volume", "create", name)
    try:
        yield name
    finally:
        _run("docker", "volume", "rm", "--force", name)


def _put_model(volume: str) -> None:
    if not MODEL.exists():
        sys.exit("error: the demo model is not here\n\nhint: make model")
    with MODEL.open("rb") as file:
        _run(
            "docker",
            "run",
            "--rm",
            "-i",
            *HARDENED,
            "-v",
            f"{volume}:/data",
            IMAGE,
            "models",
            "add",
            MODEL.name,
            stdin=file,
        )


def _measure_once(volume: str) -> None:
    _run("docker", "run", "--rm", *HARDENED, "-v", f"{volume}:/data", IMAGE, "tune", "--budget-s", "20")


def _engine_flags(volume: str) -> list[str]:
    """The profile's command line without its socket."""
    argv = shlex.split(_run("docker", "run", "--rm", *HARDENED, "-v", f"{volume}:/data", IMAGE, "plan", "--dry-run"))[
        1:
    ]
    at = argv.index("--host")
    return argv[:at] + argv[at + 2 :]


def _run(*argv: str, stdin: object = subprocess.DEVNULL) -> str:
    done = subprocess.run(argv, stdin=stdin, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"error: {shlex.join(argv)} ended with {done.returncode}\n{done.stderr}")
    return str(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
