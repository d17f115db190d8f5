"""One line on a machine that has nothing but Docker: seconds from the image's download to an answer.

    python3 -m benchmarks.pulled IMAGE                     docker pull, then docker run as README has it
    python3 -m benchmarks.pulled IMAGE --archive FILE      docker load of a `docker save`, and no network

The engine must not have the image, since the download would then be nothing. DOCKER_HOST chooses the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.host.docker.http import Gateway
from benchmarks.start import cpu_name, free_port, run, until_ready, volume

LIMIT_S = 300.0
BODY = {
    "messages": [{"role": "user", "content": "In one sentence: what is a lighthouse for?"}],
    "max_tokens": 32,
    "stream": True,
}


@dataclass
class Clock:
    """Seconds of each step, in order."""

    began: float = field(default_factory=time.monotonic)
    steps: dict[str, float] = field(default_factory=dict)

    def note(self, step: str) -> None:
        now = time.monotonic()
        self.steps[step] = round(now - self.began, 2)
        self.began = now
        print(f"{step}: {self.steps[step]:.2f} s", file=sys.stderr)


def main() -> int:
    options = _parse()
    if subprocess.run(("docker", "image", "inspect", options.image), capture_output=True, check=False).returncode == 0:
        hint = f"docker image rm {options.image}, or another engine by DOCKER_HOST"
        sys.exit(f"error: the engine has this image: {options.image}\n\nhint: {hint}")
    clock = Clock()
    if options.archive:
        run("docker", "load", "--input", str(options.archive))
        clock.note("load")
    else:
        run("docker", "pull", "--quiet", options.image)
        clock.note("pull")
    answer = _asked(options.image, clock, is_offline=options.archive is not None)
    after = sum(seconds for step, seconds in clock.steps.items() if step not in ("load", "pull"))
    result = {
        "image": options.image,
        "cpu": cpu_name(),
        "steps_s": clock.steps,
        "from_download_to_answer_s": round(after, 2),
        "answer": answer,
    }
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", metavar="IMAGE", help="such as localhost:5000/appliance/demo:llama-cpu")
    parser.add_argument("--archive", type=Path, help="of `docker save IMAGE`: nothing is pulled, and nothing can be")
    parser.add_argument("--json", action="store_true", help="for scripts")
    return parser.parse_args()


def _asked(image: str, clock: Clock, *, is_offline: bool) -> str:
    """Runs the line, waits until it is ready and returns the whole answer."""
    name, port = f"appliance-pulled-{uuid.uuid4().hex[:8]}", free_port()
    with volume() as data, _network(is_offline) as network:
        published = ("--network", network) if network else ("--publish", f"127.0.0.1:{port}:11435")
        run("docker", "run", "--detach", "--name", name, "--volume", f"{data}:/data", *published, image)
        clock.note("docker run")
        try:
            gateway = Gateway(host="127.0.0.1", port=port)
            if network:
                place = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
                gateway = Gateway(host=run("docker", "inspect", "--format", place, name).strip(), port=11435)
            until_ready(gateway, name, LIMIT_S)
            clock.note("ready")
            gateway = replace(gateway, key=run("docker", "exec", name, "appliance", "key").strip())
            clock.note("its key")
            return _answer(gateway, clock)
        finally:
            run("docker", "rm", "--force", name)


@contextmanager
def _network(is_offline: bool) -> Iterator[str | None]:
    """Yield a network without a way out, or None for Docker's own. The host reaches containers in either."""
    if not is_offline:
        yield None
        return
    name = f"appliance-pulled-{uuid.uuid4().hex[:8]}"
    run("docker", "network", "create", "--internal", name)
    try:
        yield name
    finally:
        run("docker", "network", "rm", name)


def _answer(gateway: Gateway, clock: Clock) -> str:
    text = ""
    with gateway.stream("/v1/chat/completions", BODY) as events:
        for event in events:
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece and not text:
                clock.note("first token")
            text += piece or ""
    clock.note("the rest of the answer")
    return text


def _in_words(result: dict[str, object]) -> str:
    steps = result["steps_s"]
    assert isinstance(steps, dict)
    rows = [f"{result['image']} on {result['cpu']}"]
    rows += [f"  {step:<24} {seconds:>7.2f} s" for step, seconds in steps.items()]
    rows.append(
        f"from the end of the download to the answer: {result['from_download_to_answer_s']} s (aim: at most 60)"
    )
    return "\n".join([*rows, f"answer: {result['answer']}"])


if __name__ == "__main__":
    sys.exit(main())
