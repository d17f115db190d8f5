"""`appliance mode`: shows the modes of a running appliance, and switches to another one."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from appliance.errors import EngineNotReadyError
from appliance.host.docker.http import Gateway, NoAnswerError, refusal, unanswered
from appliance.settings import MODES

POLL_S = 0.2
PATH = "/appliance/v1/mode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "mode to switch to until the appliance stops (default: show all)"
    parser.add_argument("to", nargs="?", choices=MODES, metavar="MODE", help=f"{', '.join(MODES)}: {words}")


def show_modes(gateway: Gateway, options: argparse.Namespace) -> int:
    """Switch if a mode is given and wait for the end of that, then print the modes. Returns 0.

    Raises EngineNotReadyError (43) if the appliance refuses, if the plan of that mode does not load, or if nothing
    answers.
    """
    try:
        status = _switched(gateway, options.to) if options.to else gateway.document("status")
    except NoAnswerError as error:
        raise unanswered(error) from error
    shown = {name: status.get(name) for name in ("mode", "modes", "mode_switch")}
    print(json.dumps(shown, indent=1) if options.json else as_text(shown))
    return 0


def _switched(gateway: Gateway, mode: str) -> dict[str, Any]:
    reply = gateway.ask("POST", PATH, {"mode": mode})
    if reply.status not in (200, 202):
        raise refusal(reply)
    while True:
        status = gateway.document("status")
        switch = status.get("mode_switch") or {}
        if switch.get("state") != "switching":
            break
        time.sleep(POLL_S)
    if reply.status == 202 and switch.get("state") == "failed":
        message = f"mode '{mode}' cannot be served: {switch.get('message')}"
        raise EngineNotReadyError(message, hint="see its log: `appliance logs` or `docker logs`")
    return status


def as_text(shown: dict[str, Any]) -> str:
    """Return one line for each mode; a star marks the one that is set."""
    lines = [_line(row, is_set=row["mode"] == shown["mode"]) for row in shown["modes"] or ()]
    if not lines:
        lines = [f"* {shown['mode']}; the plans of the modes are not known yet"]
    switch = shown["mode_switch"]
    return "\n".join([*lines, f"{switch['message']}"] if switch else lines)


def _line(row: dict[str, Any], *, is_set: bool) -> str:
    mark = "*" if is_set else " "
    if row["plan"] is None:
        return f"{mark} {row['mode']:<9} no plan of it fits"
    words = [f"context {row['context']:>9,}"]
    for name in ("decode", "prefill"):
        speed = row[f"{name}_tokens_per_s"]
        words.append(f"{name} {speed:,.1f} tok/s" if speed is not None else f"{name} unknown")
    how = "measured" if row["is_measured"] else "predicted"
    serves = "; serves" if row["is_serving"] else ""
    return f"{mark} {row['mode']:<9} {', '.join(words)}, {how}{serves}"
