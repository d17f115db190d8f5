"""`appliance compose`: the provider of a `docker compose` service, which Compose starts as a program.

Compose (2.36 or newer) calls `appliance compose --project-name=NAME up --OPTION=VALUE… SERVICE` and reads JSON lines:
docs/extension.md of docker/compose. It shows `info`, ends with the text of `error`, and gives the variables of `setenv`
to the services that depend on this one, each with the service's name before its own.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from docker.api import APIClient
from rich.console import Console

from appliance.console.terminal import Terminal
from appliance.errors import FatalError, UsageError
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import Gateway
from appliance.host.docker.launch import Launch, container_name
from appliance.host.docker.ports import PORT
from appliance.host.start.follow import display_on, until_ready
from appliance.host.start.prepare import prepare
from appliance.host.start.start import start
from appliance.host.start.together import SeveralErrors
from appliance.host.verbs import run as run_verb
from appliance.host.verbs.status import query_status
from appliance.host.verbs.stop import stop
from appliance.settings import process_environment

ACTIONS = ("up", "down", "stop", "metadata")
PROJECT = "com.docker.compose.project"  # label of the networks that Compose made before it calls a provider
# Options of the provider, each with what it is for `appliance run`.
VALUES = ("model", "mode", "ctx-size", "set", "gpus", "image", "volume", "port")
SWITCHES = ("cpu", "fast")
WIDTH = 1000  # of a message, which is one line

# Without descriptions of parameters, Compose passes on every option, and a misspelt one is refused here. With them it
# would drop those that it does not know without a word. `stop` lets `docker compose stop` call us.
METADATA: Mapping[str, Any] = {"stop": {}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--project-name", metavar="NAME", help="name of the Compose project")
    parser.add_argument("action", choices=ACTIONS, help="what Compose wants; `down` and `stop` keep the volume")
    about = "options of the service's provider, such as --model=qwen, then the name of the service"
    parser.add_argument("words", metavar="WORDS", nargs=argparse.REMAINDER, help=about)


def run(options: argparse.Namespace) -> int:
    if options.action == "metadata":
        print(json.dumps(METADATA))
        return 0
    try:
        service, words = parse(options.words)
        if not options.project_name:
            message = "no project: --project-name is missing"
            raise UsageError(message, hint="`docker compose` calls this verb; a person uses `appliance run`")
        name = f"{options.project_name}-{service}"
        with connected(process_environment()) as client:
            if options.action == "up":
                _up(client, options.project_name, service, name, words)
            else:
                _down(client, name)
    except FatalError as error:
        for line in error.log:
            say("debug", line)
        say("error", in_one_line(error))
        return error.exit_code
    return 0


def parse(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the service and the words for `appliance run`, of the options that Compose passes as --NAME=VALUE. Raises
    UsageError."""
    *flags, service = words or [""]
    if not service or service.startswith("-"):
        message = f"no service: its name is the last word: {' '.join(words)}"
        raise UsageError(message, hint="`docker compose` calls this verb; a person uses `appliance run`")
    model, made = "", []
    for flag in flags:
        name, _, value = flag.removeprefix("--").partition("=")
        option = name.replace("_", "-")
        if option == "model":
            model = value
        elif option in VALUES:
            made.append(f"--{option}={value}")
        elif option in SWITCHES:
            made += [f"--{option}"] if _is_on(option, value) else []
        else:
            near = difflib.get_close_matches(option, [*VALUES, *SWITCHES], 1)
            message = f"service {service}: no such option of the provider: {name}"
            known = f"known are {', '.join([*VALUES, *SWITCHES])}"
            raise UsageError(message, hint=f"perhaps you meant '{near[0]}'" if near else known)
    return service, [*([model] if model else []), *made]


def _is_on(option: str, value: str) -> bool:
    if value not in ("true", "false"):
        message = f"the provider's option {option} is true or false: {value!r}"
        raise UsageError(message, hint=f"{option}: true")
    return value == "true"


def _up(client: APIClient, project: str, service: str, name: str, words: Sequence[str]) -> None:
    """Start the container, or take the one that already serves the same; then tell Compose how to reach it."""
    if not words or words[0].startswith("-"):
        message = f"service {service}: the provider's option model is missing"
        raise UsageError(message, hint="options: {model: qwen}, a recipe or org/repo[:quant] of Hugging Face")
    parser = argparse.ArgumentParser(prog="appliance compose up", exit_on_error=False, allow_abbrev=False)
    run_verb.add_arguments(parser)
    try:
        options = parser.parse_args([*words, "--detach", "--name", name])
    except argparse.ArgumentError as error:
        message = f"service {service}: {error}"
        raise UsageError(message, hint="`appliance run --help` says what each option takes") from error
    environment, err = process_environment(), Terminal(file=Messages(), width=WIDTH, highlight=False)
    prepared = prepare(client, options, environment, err, may_run=True)
    launch = replace(prepared.launch, networks=networks(client, project), alias=service)
    other = prepared.replaces
    if other and other.is_up and is_same(other, launch, has_port=options.port is not None):
        gateway = _wait(client, other, launch, err)
    else:
        if other:
            stop(client, other)
        gateway = start(client, launch, environment, err, fixed_port=options.port is not None)
    found = containers.choose(containers.all_of_ours(client), launch.name)
    url = f"http://{service}:{PORT}/v1" if launch.networks else gateway.url
    variables = {"URL": url, "API_KEY": gateway.key, "MODEL": query_status(client, found).model}
    for variable, value in variables.items():
        say("setenv", f"{variable}={value}")


def networks(client: APIClient, project: str) -> tuple[str, ...]:
    """Return the project's networks by name; Compose makes them before it calls a provider."""
    return tuple(sorted(each["Name"] for each in client.networks(filters={"label": f"{PROJECT}={project}"})))


def is_same(found: Found, launch: Launch, *, has_port: bool) -> bool:
    """True if the running container was started with the same launch; a port counts only if the user chose it."""
    return found.launch is not None and found.launch == (
        launch if has_port else replace(launch, port=found.launch.port)
    )


def _wait(client: APIClient, found: Found, launch: Launch, err: Console) -> Gateway:
    """Wait for a container that runs already: an earlier `up` may have been interrupted before it was ready."""
    with display_on(err) as display:
        until_ready(client, found.id, containers.unlocked(found), display)
    containers.set_restarts(client, found.id, restarts=launch.restarts)
    return containers.gateway(client, found)


def _down(client: APIClient, name: str) -> None:
    found = containers.by_name(client, container_name(name))
    if found is None or found.launch is None:
        say("info", "nothing to stop")
        return
    say("info", "stopping: running answers get their time")
    stop(client, found)


def in_one_line(error: FatalError) -> str:
    """Return message and hint: Compose shows nothing that the program writes to stderr."""
    if isinstance(error, SeveralErrors):
        return "; ".join(in_one_line(each) for each in error.errors)
    return f"{error.message}; {error.hint}" if error.hint else error.message


def say(kind: str, message: str) -> None:
    print(json.dumps({"type": kind, "message": message}), flush=True)


class Messages(io.StringIO):
    """A file that sends each line to Compose as an info message."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                say("info", line.strip())
        return len(text)
