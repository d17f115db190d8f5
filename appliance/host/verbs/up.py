"""Follow a container until it serves, ask it one question, and print the chosen plan (`-m appliance.host.verbs.up`).

With `--wait tuned` measuring starts at once, and the question is asked when the best plan serves. Progress goes to
stderr, the result to stdout. If the container ends first, its own error and exit code are passed on. Docker does not
restart it then: the restart policy is set once it serves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from docker.api import APIClient
from rich.console import Console

from appliance.console.terminal import Terminal
from appliance.errors import ConfigError, EngineNotReadyError, FatalError
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import ANSWER_S, Gateway, NoAnswerError, said
from appliance.host.start.follow import ContainerEndedError, display_on, refuse_ended, until_ready
from appliance.settings import process_environment
from appliance.values import dataclass

QUESTION = "In one sentence: what is a lighthouse for?"
POLL_S = 0.25
TIMED_S = 0.02  # no speed is shown for an answer that took less
TUNING = "/appliance/v1/tuning"
_STATUS = frozenset({"model", "context", "chosen", "speed", "predicted_speed", "tuning"})


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    err = Terminal(stderr=True, highlight=False)
    try:
        with connected(process_environment()) as client:
            print(_follow(client, options, err))
        return 0
    except FatalError as error:
        for line in error.log:
            err.print(f"  | {line}", markup=False, soft_wrap=True)
        err.print(f"error: {error.message}", markup=False, soft_wrap=True)
        if error.hint:
            err.print(f"\nhint: {error.hint}", markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m appliance.host.verbs.up", description=__doc__)
    parser.add_argument("container", metavar="CONTAINER", help="name or id")
    parser.add_argument("--question", metavar="TEXT", default=QUESTION, help="question to ask once it serves")
    parser.add_argument("--wait", choices=("tuned",), help="measure at once and wait until the best plan serves")
    return parser


def _follow(client: APIClient, options: argparse.Namespace, err: Console) -> str:
    """Return the report. Raises ContainerEndedError if the container ends first."""
    found = containers.choose(containers.all_of_ours(client), options.container)
    with display_on(err) as display, _without_restarts(client, found):
        if found.address is None:  # it ended at once, or publishes no port
            refuse_ended(client, found.id)
            found = containers.choose(containers.all_of_ours(client), found.id)
        until_ready(client, found.id, containers.unlocked(found), display)
    gateway = containers.gateway(client, found)
    if options.wait == "tuned":
        _until_tuned(client, found, gateway, err)
    return _report(gateway, options.question, found)


@contextmanager
def _without_restarts(client: APIClient, found: Found) -> Iterator[None]:
    containers.set_restarts(client, found.id, restarts=False)
    try:
        yield
    except ContainerEndedError:
        raise
    except BaseException:  # the container keeps running, as after Ctrl-C
        containers.set_restarts(client, found.id, restarts=True)
        raise
    containers.set_restarts(client, found.id, restarts=True)


def _until_tuned(client: APIClient, found: Found, gateway: Gateway, err: Console) -> None:
    """Wait until the best plan serves. Raises ConfigError if measuring is off, EngineNotReadyError if measuring found
    no plan, ContainerEndedError if the container ended."""
    with display_on(err) as display:
        while True:
            refuse_ended(client, found.id)
            # The request is repeated each time, because a restarted container has forgotten it. Status 200 means
            # measured.
            answer = _document(gateway, TUNING, posts=True)
            if answer.get("state") == "measured":
                return
            _raise_if_refused(answer, found)
            measured = len(_document(gateway, TUNING).get("measurements", ()))
            display.show({"message": f"measuring: {measured} measurements so far"})
            time.sleep(POLL_S)


def _raise_if_refused(answer: Mapping[str, Any], found: Found) -> None:
    error = answer.get("error")
    if not isinstance(error, dict):
        return
    message = f"measuring will not finish: {error.get('message')}"
    if error.get("code") == "tuning_off":
        raise ConfigError(message, hint="make up WAIT=tuned APPLIANCE_TUNE=idle, or make up without WAIT")
    raise EngineNotReadyError(message, hint=f"see `docker logs {found.name}`")


@dataclass(frozen=True, kw_only=True)
class _Answer:
    text: str
    tokens: int
    tokens_per_s: float | None  # None: the answer was too short


def _report(gateway: Gateway, question: str, found: Found) -> str:
    status = _status(gateway, found)
    answer = _ask(gateway, question, found)
    rows = {
        "question": question,
        "answer": f"{answer.text.strip()}  ({answer.tokens} tokens{_at(answer.tokens_per_s)})",
        "endpoint": gateway.url,
        "model": f"{status['model']}, context {status['context']:,}",
        "key": f"docker exec {found.name} appliance key",
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
        later = "measuring continues while idle, then the best plan takes over; `make up WAIT=tuned` waits for it"
        ends = "no measured plan fits now" if status["tuning"] == "measured" else "nothing is measured"
        return f"by prediction; {later if goes_on else ends}"
    where = "by measuring, just now" if status.get("measured_since_start") else "in the profile on the volume"
    return f"{where}; measured again while idle" if goes_on else where


def _status(gateway: Gateway, found: Found) -> dict[str, Any]:
    try:
        status = gateway.document("status")
    except NoAnswerError as error:
        message = f"the container does not report its state: {error}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {found.name}`") from error
    if missing := _STATUS - status.keys():
        why = said(status) or f"it lacks {', '.join(sorted(missing))}"
        message = f"the container does not report its state: {why}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {found.name}`")
    return status


def _ask(gateway: Gateway, question: str, found: Found) -> _Answer:
    """Ask as a stream and time it with our own clock: the speed that a user sees, for any engine."""
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
                    first = first or last  # any event counts: a model may begin with tokens that are no text
                for delta in (choice.get("delta") or {} for choice in choices):
                    # A reasoning model may not reach its answer within so few tokens.
                    words.append(delta.get("content") or delta.get("reasoning_content") or "")
    except NoAnswerError as error:
        message = f"the answer broke off after {len(words)} pieces: {error}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {found.name}`") from error
    except (ValueError, KeyError, TypeError, AttributeError):  # not an answer
        tokens = None
    if tokens is None:
        message = f"the answer has an unexpected form, after {len(words)} pieces"
        raise EngineNotReadyError(message, hint=f"see `docker logs {found.name}`")
    seconds = last - first
    # The first token belongs to the prefill: n tokens are n - 1 decode steps. If all pieces came at once, there is no
    # time to measure.
    tokens_per_s = (tokens - 1) / seconds if seconds >= TIMED_S else None
    return _Answer(text="".join(words), tokens=tokens, tokens_per_s=tokens_per_s)


def _document(gateway: Gateway, path: str, *, posts: bool = False) -> dict[str, Any]:
    """Return the document; empty while the port does not answer yet."""
    try:
        return gateway.ask("POST" if posts else "GET", path, {} if posts else None, timeout_s=ANSWER_S).document
    except NoAnswerError:
        return {}


if __name__ == "__main__":
    sys.exit(main())
