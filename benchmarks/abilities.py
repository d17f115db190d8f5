"""Abilities by chat template: the suite of a served model, with random weights, on the bare engine and on ours.

Random weights say nothing by themselves, so only rows that need no judgement are asked: a grammar makes their answers,
or the prompt alone is looked at. Each template of a folder is given to the engine with a made-up model, whose
vocabulary is of bytes. What a template has no notation for is `not offered`, as in a start of the appliance.

    python3 -m benchmarks.abilities --templates llama.cpp/models/templates --engine bare=DIR --engine ours=DIR

The table has a mark for each engine: `+` passed, `F` failed, `?` not judged, `-` not offered. Below it are the reasons.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from appliance.abilities import Ability, Result
from appliance.abilities.rows import ROWS
from appliance.abilities.suite import Offered, check
from appliance.command import Command
from appliance.engines.json_socket import JsonSocket
from appliance.errors import EngineNotReadyError
from appliance.model.architecture.facts import CALLS_TOOLS, REASONS
from tests.shapes import SMALL, write_gguf

MARKS = {Result.PASSED: "+", Result.FAILED: "F", Result.NOT_JUDGED: "?", Result.NOT_OFFERED: "-"}
# Whether a model makes two calls is its own choice.
SURE = tuple(
    row
    for row in ROWS
    if row.name != "tool_parallel" and (row.is_sure or row.judge is None or row.name == "reasoning_off")
)
READY_S = 120.0
CONTEXT = 8192


async def _never() -> bool:
    return False


@contextmanager
def engine(folder: Path, model: Path, template: Path, socket_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [str(folder / "llama-server"), "-m", str(model), "--host", str(socket_path), "-c", str(CONTEXT), "-np", "1"]
    argv += ["-t", "1", "--chat-template-file", str(template)]
    socket_path.unlink(missing_ok=True)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


async def until_ready(process: subprocess.Popen[bytes], socket_path: Path) -> bool:
    """Wait until the engine answers; False if it ended, as it does for a template that it cannot read."""
    ends = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < ends:
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(socket_path))) as session,
                session.get("http://engine/health") as answer,
            ):
                if answer.status == 200:
                    return True
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    return False


async def results(folder: Path, model: Path, template: Path, socket_path: Path) -> dict[str, Ability]:
    """Return the results by row; none if the engine does not start with this template."""
    text = await asyncio.to_thread(template.read_text)
    offered = Offered(
        why_no_tools="" if CALLS_TOOLS.search(text) else "the chat template has no tools",
        why_no_reasoning="" if REASONS.search(text) else "the chat template has no reasoning",
    )
    found: dict[str, Ability] = {}
    with engine(folder, model, template, socket_path) as process:
        if not await until_ready(process, socket_path):
            return found
        command = Command(argv=(), environment={}, is_ready=_never, socket_path=socket_path)
        async with JsonSocket(command, doing="the benchmark", keeps_connections=False) as client:
            for row in SURE:
                try:
                    found[row.name] = await check(client, row, "model", offered)
                except EngineNotReadyError:
                    died = Result.FAILED
                    found[row.name] = Ability(name=row.name, whole=died, streamed=died, reason="the engine ended")
                    break
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, Ability]]], engines: tuple[str, ...]) -> Iterator[str]:
    yield f"| template | {' | '.join(row.name for row in SURE)} |"
    yield f"|---|{'---|' * len(SURE)}"
    for template, by_engine in found.items():
        cells = [" ".join(mark(by_engine[name].get(row.name)) for name in engines) for row in SURE]
        yield f"| {template} | {' | '.join(cells)} |"


def mark(ability: Ability | None) -> str:
    return "x" if ability is None else MARKS[ability.result]


def reasons(found: Mapping[str, Mapping[str, Mapping[str, Ability]]]) -> Iterator[str]:
    for template, by_engine in found.items():
        for name, rows in by_engine.items():
            for row in rows.values():
                if row.result in (Result.FAILED, Result.NOT_JUDGED):
                    yield f"{template}, {name}: {row.name} {row.result}: {row.reason}"


def summary(found: Mapping[str, Mapping[str, Mapping[str, Ability]]], name: str) -> str:
    rows = [row for by_engine in found.values() for row in by_engine[name].values()]
    counts = {each: sum(row.result is each for row in rows) for each in Result}
    return f"{name}: {', '.join(f'{count} {each}' for each, count in counts.items())}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--templates", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="templates whose name has this text")
    parser.add_argument("--engine", action="append", required=True, metavar="NAME=DIR", help="folder of llama-server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    engines = {name: Path(folder) for name, _, folder in (each.partition("=") for each in options.engine)}
    found: dict[str, dict[str, dict[str, Ability]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.gguf"
        write_gguf(model, SMALL["gqa"].changed(block_count=1), quantization="Q8_0", with_data=True)
        for template in sorted(options.templates.glob("*.jinja")):
            if options.only not in template.name:
                continue
            by_engine = found.setdefault(template.stem, {})
            for name, folder in engines.items():
                by_engine[name] = asyncio.run(results(folder, model, template, Path(scratch) / "engine.sock"))
                marks = "".join(mark(by_engine[name].get(row.name)) for row in SURE)
                print(f"{template.stem} {name} {marks}", file=sys.stderr, flush=True)
            if options.json:
                rows = {
                    template: {
                        name: {row.name: [row.whole, row.streamed, row.reason] for row in each.values()}
                        for name, each in of.items()
                    }
                    for template, of in found.items()
                }
                options.json.write_text(json.dumps(rows, indent=1))
    print(
        "\n".join((*table(found, tuple(engines)), "", *(summary(found, name) for name in engines), "", *reasons(found)))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
