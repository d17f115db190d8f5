"""python -m appliance.host.up: follows a container until it serves, asks it one question, and says what was chosen.

With `--wait tuned` measuring begins at once, and the question is asked when the best plan serves.

Progress goes to stderr, the result to stdout. Ends with the container's own exit code when it ends first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors
import requests.exceptions
from docker.models.containers import Container
from rich.console import Console
from rich.status import Status

from appliance.errors import ConfigError, EngineNotReadyError, FatalError
from appliance.host.containers import ALL_ADDRESSES
from appliance.host.follow import display_on
from appliance.host.gateway import ANSWER_S, READY, Gateway, NoAnswerError

QUESTION = "In one sentence: what is a lighthouse for?"
INNER_PORT = "11435/tcp"
POLL_S = 0.25
TIMED_S = 0.02  # of an answer that took less no speed is said
TUNING = "/appliance/v1/tuning"
_STATUS = frozenset({"model", "context", "chosen", "speed", "predicted_speed", "from_profile", "tuning"})


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    err = Console(stderr=True, highlight=False)
    try:
        return _tell(options, err)
    except FatalError as error:
        err.print(f"error: {error.message}", markup=False, soft_wrap=True)
        if error.hint:
            err.print(f"\nhint: {error.hint}", markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _tell(options: argparse.Namespace, err: Console) -> int:
    """ConfigError when there is no such container, or no longer, or when Docker itself fails."""
    name = options.container
    try:
        container = docker.from_env().containers.get(name)
        code = _follow(container, err)
        if code is None and options.wait == "tuned":
            code = _follow_tuning(container, err)
        if code is None:
            print(_report(container, options.question))
        return code or 0
    except docker.errors.NotFound as error:
        message = f"no such container: {name}"
        raise ConfigError(message, hint="`docker ps -a` shows what there is") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        message = f"Docker does not answer as it should: {error}"
        raise ConfigError(message, hint="start it, or check DOCKER_HOST and that you may use it") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m appliance.host.up", description=__doc__)
    parser.add_argument("container", metavar="CONTAINER", help="name or id")
    parser.add_argument("--question", metavar="TEXT", default=QUESTION, help="what to ask it once it serves")
    parser.add_argument("--wait", choices=("tuned",), help="measure at once, and wait until the best plan serves")
    return parser


def _follow(container: Container, err: Console) -> int | None:
    """None once it serves; its exit code when it ended, after its last words."""
    with display_on(err) as shown:
        while True:
            container.reload()
            if container.status in ("exited", "dead", "restarting"):
                return _ended(container, err)
            # Before it runs nothing is published yet.
            ready = _document(_gateway(container), READY) if container.status == "running" else {}
            if ready.get("status") == "ready":
                return None
            shown.show(ready)
            time.sleep(POLL_S)


def _follow_tuning(container: Container, err: Console) -> int | None:
    """None once the best plan serves; its exit code when it ended. Raises ConfigError where nothing is measured, and
    EngineNotReadyError where measuring came to no plan."""
    gateway = _gateway(container, _key(container))
    with Status("measuring", console=err) as status:
        said = ""
        while True:
            container.reload()
            if container.status in ("exited", "dead", "restarting"):
                return _ended(container, err)
            # Asked again each time: a container that was restarted meanwhile has forgotten it. 200 is measured.
            answer = _document(gateway, TUNING, posts=True)
            if answer.get("state") == "measured":
                return None
            _raise_if_refused(answer, container)
            measured = len(_document(gateway, TUNING).get("measurements", ()))
            words = f"measuring: {measured} measurements so far"
            status.update(words)
            if not err.is_terminal and words != said:
                err.print(words, markup=False)
            said = words
            time.sleep(POLL_S)


def _raise_if_refused(answer: Mapping[str, Any], container: Container) -> None:
    error = answer.get("error")
    if not isinstance(error, dict):
        return
    message = f"waiting for measuring has no end: {error.get('message')}"
    if error.get("code") == "tuning_off":
        raise ConfigError(message, hint="make up WAIT=tuned APPLIANCE_TUNE=idle, or make up without WAIT")
    raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")


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
    tokens_per_s: float | None  # None: too short to tell


def _report(container: Container, question: str) -> str:
    gateway = _gateway(container, _key(container))
    status = _status(gateway, container)
    answer = _ask(gateway, question, container)
    rows = {
        "question": question,
        "answer": f"{answer.text.strip()}  ({answer.tokens} tokens{_at(answer.tokens_per_s)})",
        "endpoint": gateway.url,
        "model": f"{status['model']}, context {status['context']:,}",
        "key": f"docker exec {container.name} appliance key",
        "chosen": status["chosen"],
        "speed": _speed(status),
        "found": _found(status),
    }
    return "\n".join(f"{name:<9} {value}" for name, value in rows.items())


def _at(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f" at {tokens_per_s:.1f} tok/s"


def _speed(status: Mapping[str, Any]) -> str:
    if status["speed"]:
        return str(status["speed"])
    return f"predicted: {status['predicted_speed']}" if status["predicted_speed"] else "not measured"


def _found(status: Mapping[str, Any]) -> str:
    goes_on = status["tuning"] in ("waiting", "measuring")
    if not status["speed"]:
        later = "measuring goes on while nobody asks, and the best plan takes over; `make up WAIT=tuned` waits for it"
        ends = "no plan that was measured fits now" if status["tuning"] == "measured" else "nothing is measured"
        return f"by prediction; {later if goes_on else ends}"
    where = "in the profile on the volume" if status["from_profile"] else "by measuring, just now"
    return f"{where}; measured again while nobody asks" if goes_on else where


def _key(container: Container) -> str:
    code, output = container.exec_run(["appliance", "key"], stderr=False)
    if code != 0 or not isinstance(output, bytes):
        message = f"the container does not tell its key: `appliance key` ended with code {code}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")
    return output.decode().strip()


def _status(gateway: Gateway, container: Container) -> dict[str, Any]:
    status = _document(gateway, "/appliance/v1/status")
    if missing := _STATUS - status.keys():
        message = (
            f"the container does not tell its state: no {', '.join(sorted(missing))} in {json.dumps(status)[:500]}"
        )
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")
    return status


def _ask(gateway: Gateway, question: str, container: Container) -> _Answer:
    """As a stream, timed by our own clock: what a user sees, of any engine."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0.2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    words: list[str] = []
    tokens = None
    first = last = 0.0
    try:
        with gateway.stream("/v1/chat/completions", body) as events:
            for event in events:
                usage, choices = event.get("usage"), event["choices"]
                tokens = int(usage["completion_tokens"]) if usage else tokens
                if choices:
                    last = time.monotonic()
                    first = first or last  # of whatever kind: a model may begin with tokens that are no text
                for delta in (choice.get("delta") or {} for choice in choices):
                    # A model that thinks may come to no answer within so few tokens.
                    words.append(delta.get("content") or delta.get("reasoning_content") or "")
    except NoAnswerError as error:
        message = f"the answer broke off after {len(words)} pieces: {error}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`") from error
    except (ValueError, KeyError, TypeError, AttributeError):  # something else in place of an answer
        tokens = None
    if tokens is None:
        message = f"the answer is not what was expected, after {len(words)} pieces"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")
    seconds = last - first
    # The first token comes of the prompt's reading: n tokens are n - 1 steps. Of pieces that came at once a clock tells
    # nothing.
    tokens_per_s = (tokens - 1) / seconds if seconds >= TIMED_S else None
    return _Answer(text="".join(words), tokens=tokens, tokens_per_s=tokens_per_s)


def _document(gateway: Gateway, path: str, *, posts: bool = False) -> dict[str, Any]:
    """Empty while the port does not answer yet."""
    try:
        return gateway.ask("POST" if posts else "GET", path, {} if posts else None, timeout_s=ANSWER_S).document
    except NoAnswerError:
        return {}


def _gateway(container: Container, key: str = "") -> Gateway:
    """Where the container's port is published on this machine. ConfigError when it is not."""
    published = (container.attrs["NetworkSettings"].get("Ports") or {}).get(INNER_PORT)
    if not published:
        message = f"the container publishes no port {INNER_PORT}: {container.name}"
        raise ConfigError(
            message, hint="start it with -p 127.0.0.1:11435:11435, on a network that lets ports be published"
        )
    host = str(published[0]["HostIp"])
    return Gateway(host="127.0.0.1" if host in ALL_ADDRESSES else host, port=int(published[0]["HostPort"]), key=key)


if __name__ == "__main__":
    sys.exit(main())
