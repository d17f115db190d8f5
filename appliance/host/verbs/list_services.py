"""`appliance list`: all appliances on this machine, also those not started by this command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from docker.api import APIClient

from appliance.errors import FatalError, VolumeError
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import READY, Gateway, NoAnswerError
from appliance.settings import process_environment

ASK_S = 0.25  # time limit; an appliance that hangs is shown as such, and all are asked at the same time
HEADS = ("NAME", "MODEL", "PHASE", "ENDPOINT", "SINCE", "IMAGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.all_of_ours(client)
        keys = [_key(client, each) for each in found]
    with ThreadPoolExecutor(max_workers=8) as pool:
        phases, models = pool.map(_phase, found), pool.map(_model, found, keys)
        rows = [_row(*each) for each in zip(found, phases, models, strict=True)]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif not found:
        print("no appliance on this machine; start one: appliance run qwen")
    else:
        print(_table([_cells(each, row) for each, row in zip(found, rows, strict=True)]))
    return 0


def _key(client: APIClient, found: Found) -> str | None:
    """Return the key of an appliance that must be asked for its model; None if it need not or cannot be asked."""
    if found.launch or not found.is_up or found.address is None:
        return None
    with suppress(VolumeError):
        return containers.key(client, found)
    return None


def _model(found: Found, key: str | None) -> str:
    """Return the model named at the start. An appliance not started by this command is asked, since its weights may be
    in its image."""
    if key is None or found.address is None:
        return found.model
    host, port = found.address
    try:
        status = Gateway(host=host, port=port, key=key).document("status", timeout_s=ASK_S)
        return str(status.get("model") or found.model)
    except (NoAnswerError, FatalError):  # not ready yet, or the key was refused
        return found.model


def _phase(found: Found) -> str:
    """Return the phase from the readiness route, which needs no key."""
    if not found.is_up or found.address is None:
        return found.state
    host, port = found.address
    try:
        document = Gateway(host=host, port=port).get(READY, timeout_s=ASK_S).document
    except NoAnswerError:
        return "no answer"
    return str(document.get("phase") or document.get("status") or "unknown")


def _row(found: Found, phase: str, model: str) -> dict[str, object]:
    at = Gateway(host=found.address[0], port=found.address[1]).url if found.address else None
    row = {"name": found.short_name, "container": found.name, "model": model or None, "phase": phase}
    return {**row, "state": found.state, "endpoint": at, "created_s": found.created_s, "image": found.image,
            "cell": found.labels.get(containers.CELL), "is_ours": found.launch is not None}  # fmt: skip


def _cells(found: Found, row: Mapping[str, object]) -> tuple[str, ...]:
    return (
        found.short_name,
        str(row["model"] or "-").rsplit("/", 1)[-1],
        str(row["phase"]),
        str(row["endpoint"] or "-"),
        found.words,
        found.image,
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    all_rows = [HEADS, *rows]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in all_rows)
    return "\n".join(line.rstrip() for line in lines)
