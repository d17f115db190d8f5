"""`appliance list`: every appliance on this machine, whoever started it."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

from appliance.host import containers
from appliance.host.containers import Found
from appliance.host.daemon import connected
from appliance.host.gateway import READY, Gateway, NoAnswerError
from appliance.settings import process_environment

ASK_S = 0.25  # one that hangs is shown as that; all are asked at once
HEADS = ("NAME", "MODEL", "PHASE", "ENDPOINT", "SINCE", "IMAGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for scripts")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.all_of_ours(client)
    with ThreadPoolExecutor(max_workers=8) as pool:
        phases = list(pool.map(_phase, found))
    if options.json:
        print(json.dumps([_row(each, phase) for each, phase in zip(found, phases, strict=True)], indent=1))
    elif not found:
        print("no appliance on this machine; start one: appliance run qwen")
    else:
        print(_table([_cells(each, phase) for each, phase in zip(found, phases, strict=True)]))
    return 0


def _phase(found: Found) -> str:
    """Without the key: readiness is open."""
    if not found.is_up or found.address is None:
        return found.state
    host, port = found.address
    try:
        document = Gateway(host=host, port=port).get(READY, timeout_s=ASK_S).document
    except NoAnswerError:
        return "no answer"
    return str(document.get("phase") or document.get("status") or "unknown")


def _row(found: Found, phase: str) -> dict[str, object]:
    at = Gateway(host=found.address[0], port=found.address[1]).url if found.address else None
    row = {"name": found.short_name, "container": found.name, "model": found.model or None, "phase": phase}
    return {**row, "state": found.state, "endpoint": at, "created_s": found.created_s, "image": found.image,
            "cell": found.labels.get(containers.CELL), "is_ours": found.launch is not None}  # fmt: skip


def _cells(found: Found, phase: str) -> tuple[str, ...]:
    row = _row(found, phase)
    return (
        found.short_name,
        found.model.rsplit("/", 1)[-1] or "-",
        phase,
        str(row["endpoint"] or "-"),
        found.words,
        found.image,
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    all_rows = [HEADS, *rows]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in all_rows)
    return "\n".join(line.rstrip() for line in lines)
