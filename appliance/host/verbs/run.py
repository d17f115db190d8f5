"""`appliance run`: starts a model by any of its names and returns an endpoint that answers."""

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
    about = "a recipe (qwen, qwen:8b-q4), a GGUF file, org/repo[:quant] on Hugging Face, or a URL"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("--mode", metavar="MODE", help=SETTINGS["mode"].help)
    parser.add_argument("--ctx-size", metavar="N", help=SETTINGS["ctx_size"].help)
    about = "any other setting, as in parallel=8; may be given several times"
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=about)
    parser.add_argument("--fast", action="store_true", help="do not measure: serve the stored or the predicted plan")
    parser.add_argument(
        "--reset", action="store_true", help="delete this model's profiles first, so that it is measured again"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"port on this machine (default: the first free one from {PORT})"
    )
    about = "address to publish the port at; 0.0.0.0 allows the network, with the key (default: 127.0.0.1)"
    parser.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help=about)
    about = "all, none, indices or UUIDs separated by commas, or CDI names such as nvidia.com/gpu=0 (default: all)"
    parser.add_argument("--gpus", metavar="LIST", help=about)
    parser.add_argument("--cpu", action="store_true", help="use no GPU, even if there is one")
    parser.add_argument(
        "--detach", "-d", action="store_true", help="return once it serves; it keeps running and restarts after a crash"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the container (default: made from the model)")
    parser.add_argument(
        "--volume", metavar="NAME", default=VOLUME, help=f"volume for weights, profiles and the key [{VOLUME}]"
    )
    parser.add_argument("--image", metavar="IMAGE", help="use this image instead of the one chosen for this machine")
    about = "build the image from this clone of the project instead of pulling a published one"
    parser.add_argument("--build", action="store_true", help=about)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before building")
    parser.add_argument("--dry-run", action="store_true", help="print the equivalent docker command and do nothing")


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
            err.print(f"warning: no key is required: everyone who reaches {launch.bind}:{launch.port} can use it")
        with _ending_by_signal():
            return _serve(client, launch, environment, err, options)


def _told(client: APIClient, launch: Launch, err: Console) -> int:
    print(shlex.join(command_line(launch)))
    if image.find(client, launch.image) is None:
        err.print(
            f"the image is not on this machine: {launch.image}; `run` without --dry-run gets it",
            markup=False,
            soft_wrap=True,
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
    except SystemExit:  # a signal other than Ctrl-C: there is no user to ask
        _stop(client, launch.name, err)
        raise


def _report(client: APIClient, found: Found, gateway: Gateway) -> str:
    status = query_status(client, found)
    name = found.short_name
    rows = {
        "endpoint": gateway.url,
        "key": gateway.key or "not required",
        "model": f"{status.model}, context {status.context or 0:,}, mode {status.mode}",
        "chosen": status.chosen or "",
        "speed": status.speed_words(),
        "next": f"appliance chat {name} | status {name} | logs -f {name} | stop {name}",
    }
    return "\n".join(f"{label:<9} {value}" for label, value in rows.items() if value)


def _watch(client: APIClient, found: Found, gateway: Gateway, err: Console) -> int:
    """Stay in the foreground until Ctrl-C or the container's end; show measuring and requests."""
    err.print("Ctrl-C stops it", markup=False)
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
            except NoAnswerError as error:  # if the container has ended, the next turn reports why
                display.show({"message": f"no answer: {error}"})
            except FatalError:
                if not _is_stopped(client, found):  # the container was stopped since the last look
                    raise
            time.sleep(WATCH_S)


def _is_stopped(client: APIClient, found: Found) -> bool:
    """True if the container exited with 0 or was removed by someone else, for an upgrade too."""
    try:
        state = containers.state(client, found.id)
    except ConfigError:
        return True
    return bool(state["Status"] == "exited" and state["ExitCode"] == 0)


def _interrupted(client: APIClient, launch: Launch, err: Console) -> int:
    """Handle Ctrl-C: on a terminal ask whether to stop, and a second Ctrl-C means yes; elsewhere stop."""
    try:
        goes_on = sys.stdin.isatty() and not agrees(f"\nstop {launch.short_name}?", default=True)
    except KeyboardInterrupt:
        goes_on = False
    if goes_on:
        if found := containers.by_name(client, launch.name):
            containers.set_restarts(client, found.id, restarts=launch.restarts)
        err.print(f"it keeps running; stop it with: appliance stop {launch.short_name}", markup=False)
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
    """Make SIGTERM and a closed terminal end the program as Ctrl-C does, so that no container stays unnoticed."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
