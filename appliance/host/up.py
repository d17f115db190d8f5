"""python -m appliance.host.up: follows a container until it serves, asks it one question, and says what was chosen.

Progress goes to stderr, the result to stdout. Ends with the container's own exit code when it ends first.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
from docker.models.containers import Container
from rich.console import Console
from rich.status import Status

from appliance.errors import ConfigError, EngineNotReadyError, FatalError

QUESTION = "In one sentence: what is a lighthouse for?"
INNER_PORT = "11435/tcp"
POLL_S = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    err = Console(stderr=True, highlight=False)
    try:
        container = _find(options.container)
        code = _follow(container, err)
        if code is not None:
            return code
        print(_report(container, options.question))
    except FatalError as error:
        err.print(f"error: {error.message}", markup=False)
        if error.hint:
            err.print(f"\nhint: {error.hint}", markup=False)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m appliance.host.up", description=__doc__)
    parser.add_argument("container", metavar="CONTAINER", help="name or id")
    parser.add_argument("--question", metavar="TEXT", default=QUESTION, help="what to ask it once it serves")
    return parser


def _find(name: str) -> Container:
    try:
        return docker.from_env().containers.get(name)
    except docker.errors.NotFound as error:
        message = f"no such container: {name}"
        raise ConfigError(message, hint="`docker ps -a` shows what there is") from error
    except docker.errors.DockerException as error:
        message = f"Docker does not answer: {error}"
        raise ConfigError(message, hint="start it, or check DOCKER_HOST and that you may use it") from error


def _follow(container: Container, err: Console) -> int | None:
    """None once it serves; its exit code when it ended, after its last words."""
    with Status("starting", console=err) as status:
        said = ""
        while True:
            container.reload()
            if container.status in ("exited", "dead", "restarting"):
                return _ended(container, err)
            ready = _get(container, "/health/ready", {})
            if ready.get("status") == "ready":
                return None
            words = str(ready.get("message") or "starting")
            status.update(words)
            if not err.is_terminal and words != said:  # a terminal sees the line change; a log needs each one
                err.print(words, markup=False, soft_wrap=True)
            said = words
            time.sleep(POLL_S)


def _ended(container: Container, err: Console) -> int:
    for line in container.logs(tail=30).decode(errors="replace").splitlines():
        err.print(f"  | {line}", markup=False, soft_wrap=True)
    code = int(container.attrs["State"]["ExitCode"])
    err.print(f"error: the container ended with code {code}; README.md says what each code means", markup=False)
    return code or EngineNotReadyError.exit_code


@dataclass(frozen=True, kw_only=True)
class _Answer:
    text: str
    tokens: int
    tokens_per_s: float


def _report(container: Container, question: str) -> str:
    headers = {"Authorization": f"Bearer {_key(container)}"}
    status = _get(container, "/appliance/v1/status", headers)
    answer = _ask(container, headers, question)
    endpoint = "http://{}:{}/v1".format(*_address(container))
    rows = {
        "question": question,
        "answer": f"{answer.text.strip()}  ({answer.tokens} tokens at {answer.tokens_per_s:.1f} tok/s)",
        "endpoint": endpoint,
        "model": f"{status['model']}, context {status['context']:,}",
        "key": f"docker exec {container.name} appliance key",
        "chosen": status["chosen"],
        "speed": status["speed"] or "not measured",
        "found": "in the profile on the volume" if status["from_profile"] else "by measuring, just now",
    }
    return "\n".join(f"{name:<9} {value}" for name, value in rows.items())


def _key(container: Container) -> str:
    code, output = container.exec_run(["appliance", "key"], stderr=False)
    if code != 0 or not isinstance(output, bytes):
        message = f"the container does not tell its key: `appliance key` ended with code {code}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")
    return output.decode().strip()


def _ask(container: Container, headers: Mapping[str, str], question: str) -> _Answer:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0.2}
    reply = _request(container, "POST", "/v1/chat/completions", headers, json.dumps(body))
    try:
        timings = reply["timings"]
        return _Answer(
            text=reply["choices"][0]["message"]["content"],
            tokens=reply["usage"]["completion_tokens"],
            tokens_per_s=timings["predicted_per_second"],
        )
    except (KeyError, IndexError, TypeError) as error:
        message = f"the answer is not what was expected: {json.dumps(reply)[:500]}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`") from error


def _get(container: Container, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return _request(container, "GET", path, headers, None)


def _request(
    container: Container, method: str, path: str, headers: Mapping[str, str], body: str | None
) -> dict[str, Any]:
    """JSON, or nothing while the port does not answer yet."""
    try:
        host, port = _address(container)
        connection = http.client.HTTPConnection(host, port, timeout=300)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return dict(json.loads(connection.getresponse().read()))
    except (OSError, http.client.HTTPException, ValueError, LookupError):
        return {}


def _address(container: Container) -> tuple[str, int]:
    """Where the container's port is published on this machine. LookupError while it is not."""
    published = container.attrs["NetworkSettings"]["Ports"][INNER_PORT][0]
    host = published["HostIp"]
    return ("127.0.0.1" if host in ("0.0.0.0", "::") else host), int(published["HostPort"])  # noqa: S104


if __name__ == "__main__":
    sys.exit(main())
