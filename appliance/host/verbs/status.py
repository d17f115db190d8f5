"""`appliance status`: shows what one appliance does now."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from docker.api import APIClient

from appliance.console.shown import beneath
from appliance.errors import ConfigError, FatalError
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import READY, Gateway, NoAnswerError
from appliance.settings import process_environment
from appliance.values import dataclass

WATCH_S = 1.0
CLEAR = "\x1b[H\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    containers.add_name(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts; with --watch one line each time")
    parser.add_argument("--watch", "-w", action="store_true", help=f"repeat every {WATCH_S:g} s until Ctrl-C")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        while True:
            found = containers.choose(containers.all_of_ours(client), containers.name_in(options))
            status = query_status(client, found)
            if options.watch and sys.stdout.isatty():
                print(CLEAR, end="", file=beneath(sys.stdout))
            indent = None if options.watch else 1
            print(json.dumps(asdict(status), indent=indent) if options.json else as_text(status), flush=True)
            if not options.watch:
                return status.exit_code
            time.sleep(WATCH_S)


@dataclass(frozen=True, kw_only=True)
class Status:
    """State of one appliance. A field is None if it is not known, or not yet. `allocated_mib` is all memory that the
    engine allocated, VRAM included."""

    name: str
    container: str
    state: str
    exit_code: int
    phase: str | None
    message: str | None
    model: str
    endpoint: str | None
    mode: str | None
    context: int | None
    chosen: str | None
    speed: str | None
    predicted_speed: str | None
    stale: str | None  # why the speeds are outdated, as far as is known
    tokens_per_s: float | None
    requests: int | None
    vram_mib: float | None
    allocated_mib: float | None
    tuning: str | None
    abilities: str | None  # counts of what was checked, and what failed
    fetch: dict[str, Any] | None
    uptime_s: float | None
    restarts: int | None
    image: str
    cell: str | None
    version: str | None
    volume_problem: str | None  # that the volume does not answer
    fleet: dict[str, Any] | None  # all models of the container, if there are several

    def speed_words(self) -> str:
        if self.speed:
            return f"{self.speed}; no longer: {self.stale}" if self.stale else self.speed
        return f"predicted: {self.predicted_speed}" if self.predicted_speed else "not measured"


def query_status(client: APIClient, found: Found) -> Status:
    """Return the status, from Docker, and from the appliance if it answers."""
    state = containers.state(client, found.id)
    is_running = state["Status"] == "running"
    gateway = containers.gateway(client, found) if is_running and found.address else None
    told, health = _ask(gateway) if gateway else ({}, {})
    gauges = _gauges(gateway) if gateway and told else {}
    requests = gauges.get("appliance_requests_in_flight")
    allocated = told.get("allocated") or {}
    devices = allocated.get("devices")
    parts = [allocated[name] for name in ("model", "kv", "compute", "output", "recurrent") if name in allocated]
    return Status(
        name=found.short_name,
        container=found.name,
        state=state["Status"],
        exit_code=0 if is_running else int(state["ExitCode"]) or 1,
        phase=told.get("phase") or health.get("phase") or ("starting" if is_running else None),
        message=told.get("message") or health.get("message") or (None if is_running else found.words),
        model=told.get("model") or found.model,
        endpoint=gateway.url if gateway else None,
        mode=told.get("mode"),
        context=told.get("context"),
        chosen=told.get("chosen"),
        speed=told.get("speed"),
        predicted_speed=told.get("predicted_speed"),
        stale=(told.get("standing") or {}).get("stale"),
        tokens_per_s=gauges.get("appliance_stream_events_per_second"),
        requests=None if requests is None else int(requests),
        vram_mib=sum(mib for _, mib in devices) if devices is not None else None,
        allocated_mib=sum(parts) if parts else None,
        tuning=told.get("tuning"),
        abilities=(told.get("abilities") or {}).get("summary"),
        fetch=told.get("fetch"),
        uptime_s=_seconds_since(state["StartedAt"]) if is_running else None,
        restarts=told.get("engine_restarts"),
        image=found.image,
        cell=found.labels.get(containers.CELL),
        version=told.get("version"),
        volume_problem=told.get("volume_problem"),
        fleet=told.get("fleet"),
    )


def _ask(gateway: Gateway) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the status document, and the readiness document if there is no status: before the key exists, or while
    stopping."""
    try:
        return gateway.document("status"), {}
    except NoAnswerError:
        return {}, {}
    except ConfigError:
        raise
    except FatalError as error:
        try:
            return {}, {"message": error.message, **gateway.get(READY).document}
        except NoAnswerError:
            return {}, {"message": error.message}


def _gauges(gateway: Gateway) -> dict[str, float]:
    """Return the gauges; empty if the appliance no longer answers: it may have ended a moment ago."""
    try:
        return gateway.gauges()
    except NoAnswerError:
        return {}


def _seconds_since(time_in_words: str) -> float:
    """Return the seconds since a time of Docker's. Docker writes nanoseconds, which datetime does not read."""
    whole = datetime.fromisoformat(time_in_words[:19]).replace(tzinfo=UTC)
    return max(0.0, time.time() - whole.timestamp())


def as_text(status: Status) -> str:
    # imported here: --json does not need rich, which costs 50 ms
    from appliance.host.start.follow import duration, fetching

    rows = {
        "name": status.name,
        "model": status.model,
        "phase": status.phase if status.phase == "ready" else f"{status.phase or status.state}: {status.message}",
        "fetched": fetching(status.fetch) if status.fetch else "",
        "now": _now(status),
        "speed": status.speed_words() if status.chosen else "",
        "chosen": status.chosen or "",
        "mode": f"{status.mode}, context {status.context or 0:,}" if status.mode else "",
        "memory": _memory(status),
        "tuning": status.tuning or "",
        "abilities": status.abilities or "",
        "volume": status.volume_problem or "",
        "uptime": duration(status.uptime_s) if status.uptime_s is not None else "",
        "restarts": f"{status.restarts} of the engine" if status.restarts else "",
        "endpoint": status.endpoint or "",
        "image": f"{status.image}{f', version {status.version}' if status.version else ''}",
    }
    lines = [f"{label:<9} {value}" for label, value in rows.items() if value]
    return "\n".join([*lines, *(_models(status.fleet) if status.fleet else ())])


def _models(fleet: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the models that are loaded, being loaded, pinned or waited for; the number of the others; and
    who waits for what."""
    from appliance.host.start.follow import duration  # here: --json does not need rich, which costs 50 ms

    models, waiting = fleet["models"], fleet["waiting"]
    wanted = {wish["name"] for wish in waiting}
    is_shown = ("is_loaded", "is_loading", "is_pinned")
    shown = [row for row in models if any(row[name] for name in is_shown) or row["name"] in wanted]
    table = [("models", "state", "memory", "idle", "keep"), *(_model_cells(row, duration) for row in shown)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    yield ""
    for cells in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
    if others := len(models) - len(shown):
        yield f"{others} more, which are loaded when they are asked for"
    for wish in waiting:
        who = f"{wish['requests']} waiting for {duration(wish['seconds'])}" if wish["requests"] else "to be loaded"
        yield f"{wish['name']}: {who}: {wish['reason']}"


def _model_cells(row: Mapping[str, Any], duration: Callable[[float], str]) -> tuple[str, ...]:
    """Return name, state, memory by place, seconds without a request, and for how long it stays."""
    if not row["is_loaded"]:
        return row["name"], row["state"], "", "", "pinned" if row["is_pinned"] else ""
    memory = ", ".join(f"{mib:,} MiB of {place}" for place, mib in row["holds_mib"].items() if mib)
    if row["answering"]:
        return row["name"], row["state"], memory, f"answers {row['answering']}", "pinned" if row["is_pinned"] else ""
    keep_s = row["keep_alive_s"]
    stays = "until its memory is needed" if keep_s is None else f"{duration(max(0.0, keep_s - row['idle_s']))} more"
    return row["name"], row["state"], memory, duration(row["idle_s"]), "pinned" if row["is_pinned"] else stays


def _now(status: Status) -> str:
    if status.tokens_per_s is None:
        return ""
    requests = f", {status.requests} running" if status.requests else ""
    return f"{status.tokens_per_s:.1f} tok/s{requests}"


def _memory(status: Status) -> str:
    if status.allocated_mib is None:
        return ""
    vram = f"{status.vram_mib:,.0f} MiB of VRAM, " if status.vram_mib else "no VRAM, "
    return f"{vram}{status.allocated_mib - (status.vram_mib or 0):,.0f} MiB of host memory"


def as_line(status: Status, *, is_terminal: bool, measurements: int = 0) -> str:
    """Return one line for a user who watches. A log gets only the parts that do not change all the time."""
    words = [status.message or status.phase or status.state]
    if status.tuning == "waiting":
        words.append("measuring starts when idle")
    elif status.tuning == "measuring":
        words.append(f"measuring: {measurements} measurements so far")
    elif status.speed:
        words.append(status.speed)
    if is_terminal and status.tokens_per_s is not None:
        words.append(_now(status))
    return "; ".join(words)
