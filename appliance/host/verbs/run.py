"""`appliance run`: from what the user calls a model to an endpoint that answers."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from docker.api import APIClient
from rich.console import Console

from appliance.console.terminal import Terminal
from appliance.errors import ConfigError, FatalError
from appliance.host.docker import containers, image
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.docker.launch import GRACE_S, Launch, command_line
from appliance.host.docker.ports import PORT
from appliance.host.start.ask import agrees
from appliance.host.start.follow import display_on, duration, refuse_ended
from appliance.host.start.prepare import is_open_to_all, prepare
from appliance.host.start.start import forget_profiles, start
from appliance.host.verbs.status import as_line, query_status
from appliance.host.verbs.stop import stop
from appliance.settings import SETTINGS, process_environment

VOLUME = "appliance"
WATCH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a recipe (qwen, qwen:8b-q4), a GGUF file here, org/repo[:quant] of Hugging Face, or an address"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("--mode", metavar="MODE", help=SETTINGS["mode"].help)
    parser.add_argument("--ctx-size", metavar="N", help=SETTINGS["ctx_size"].help)
    about = "another setting of the appliance, as in parallel=8; may be given several times"
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=about)
    parser.add_argument("--fast", action="store_true", help="measure nothing: serve what is known or predicted")
    parser.add_argument("--reset", action="store_true", help="forget this model's profiles first: measure anew")
    parser.add_argument("--port", type=int, metavar="N", help=f"on this machine (default: the first free from {PORT})")
    about = "address to publish it at; 0.0.0.0 is reachable from the network, behind the key (default: 127.0.0.1)"
    parser.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help=about)
    about = "all, none, indices or UUIDs with commas, or CDI names as nvidia.com/gpu=0 (default: what is here)"
    parser.add_argument("--gpus", metavar="LIST", help=about)
    parser.add_argument("--cpu", action="store_true", help="use no GPU, also where there is one")
    parser.add_argument(
        "--detach", "-d", action="store_true", help="return once it serves; it goes on, also after a crash"
    )
    parser.add_argument("--name", metavar="NAME", help="of the container (default: from the model)")
    parser.add_argument(
        "--volume", metavar="NAME", default=VOLUME, help=f"keeps weights, profiles and the key [{VOLUME}]"
    )
    parser.add_argument("--image", metavar="IMAGE", help="this image instead of the one for this machine")
    parser.add_argument("--yes", "-y", action="store_true", help="build the image without asking")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the docker line that does the same, and do nothing"
    )


def run(options: argparse.Namespace) -> int:
    environment, err = process_environment(), Terminal(stderr=True, highlight=False)
    with connected(environment) as client:
        prepared = prepare(client, options, environment, err)
        launch = prepared.launch
        if options.dry_run:
            return _told(client, launch, err)
        if options.reset:
            forget_profiles(client, launch, environment, err)
        if prepared.replaces:
            containers.remove(client, prepared.replaces)
        if is_open_to_all(launch):
            err.print(f"warning: anybody who reaches {launch.bind}:{launch.port} may use it: no key is asked for")
        with _ending_by_signal():
            return _serve(client, launch, environment, err, options)


def _told(client: APIClient, launch: Launch, err: Console) -> int:
    print(shlex.join(command_line(launch)))
    if image.find(client, launch.image) is None:
        err.print(
            f"the image is not here: {launch.image}; `run` without --dry-run gets it", markup=False, soft_wrap=True
        )
    for name in launch.passed:
        err.print(f"{name} is taken from this environment", markup=False)
    return 0


def _serve(
    client: APIClient, launch: Launch, environment: Mapping[str, str], err: Console, options: argparse.Namespace
) -> int:
    began = time.monotonic()
    try:
        gateway = start(client, launch, environment, err, fixed_port=options.port is not None)
        found = containers.choose(containers.all_of_ours(client), launch.name)
        err.print(f"ready after {duration(time.monotonic() - began)}", markup=False)
        print(_report(client, found, gateway), flush=True)
        return 0 if options.detach else _watch(client, found, gateway, err)
    except KeyboardInterrupt:
        return _interrupted(client, launch, err)
    except SystemExit:  # told to end by a signal other than Ctrl-C: nobody is there to be asked
        _stop(client, launch.name, err)
        raise


def _report(client: APIClient, found: Found, gateway: Gateway) -> str:
    status = query_status(client, found)
    name = found.short_name
    rows = {
        "endpoint": gateway.url,
        "key": gateway.key or "none is asked for",
        "model": f"{status.model}, context {status.context or 0:,}, mode {status.mode}",
        "chosen": status.chosen or "",
        "speed": status.speed_words(),
        "next": f"appliance chat {name} | status {name} | logs -f {name} | stop {name}",
    }
    return "\n".join(f"{label:<9} {value}" for label, value in rows.items() if value)


def _watch(client: APIClient, found: Found, gateway: Gateway, err: Console) -> int:
    """In the foreground until Ctrl-C, or until the container ends: measuring and requests as they go."""
    err.print("Ctrl-C ends it", markup=False)
    with display_on(err) as display:
        while True:
            if _is_stopped(client, found):
                err.print("it was stopped", markup=False)
                return 0
            refuse_ended(client, found.id)
            try:
                status = query_status(client, found)
                done = len(gateway.document("tuning")["measurements"]) if status.tuning == "measuring" else 0
                words = as_line(status, is_terminal=err.is_terminal, measurements=done)
                display.show({"message": words})
            except NoAnswerError as error:  # it says why when it has ended
                display.show({"message": f"no answer: {error}"})
            except FatalError:
                if not _is_stopped(client, found):  # since it was looked at
                    raise
            time.sleep(WATCH_S)


def _is_stopped(client: APIClient, found: Found) -> bool:
    """By somebody else, for an upgrade too: ended well, or gone."""
    try:
        state = containers.state(client, found.id)
    except ConfigError:
        return True
    return bool(state["Status"] == "exited" and state["ExitCode"] == 0)


def _interrupted(client: APIClient, launch: Launch, err: Console) -> int:
    """In a terminal Ctrl-C asks, and a second one means yes; elsewhere it means to stop."""
    try:
        goes_on = sys.stdin.isatty() and not agrees(f"\nstop {launch.short_name}?", default=True)
    except KeyboardInterrupt:
        goes_on = False
    if goes_on:
        if found := containers.by_name(client, launch.name):
            containers.set_restarts(client, found.id, restarts=launch.restarts)
        err.print(f"it goes on; appliance stop {launch.short_name} ends it", markup=False)
        return 0
    _stop(client, launch.name, err)
    return 130


def _stop(client: APIClient, name: str, err: Console) -> None:
    found = containers.by_name(client, name)
    if found is None:
        return
    err.print(f"stopping {found.short_name}: running answers get {GRACE_S} s", markup=False)
    stop(client, found)


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    """SIGTERM and a closed terminal end the program as Ctrl-C does, so that no container stays behind unseen."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
