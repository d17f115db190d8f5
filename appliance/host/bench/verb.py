"""The verb `bench`: its flags, the checks before the measurement, and its output."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import EngineNotReadyError, FatalError
from appliance.host.bench.figures import Row
from appliance.host.bench.measure import Doing, Workload
from appliance.host.docker.endpoint import Endpoint, choose_model, given_endpoint, local_endpoint, query_models
from appliance.settings import process_environment
from appliance.values import dataclass

if TYPE_CHECKING:
    from rich.console import Console

_TABLE_WIDTH = 120
DESCRIPTION = "Measure prefill, decode, time to first token and inter-token latency of an OpenAI endpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="URL of the endpoint [the appliance on this machine]")
    parser.add_argument("--name", metavar="NAME", help="name of the container, if several run here")
    parser.add_argument("--model", metavar="NAME", help="the endpoint's name of the model [the only one in its list]")
    parser.add_argument("--key-file", metavar="FILE", help="file with the key [variable OPENAI_API_KEY]")
    parser.add_argument(
        "--prompts",
        type=_sizes,
        metavar="LIST",
        default=(1024, 2048, 4096, 16384),
        help="prompt lengths in tokens [1K,2K,4K,16K]",
    )
    parser.add_argument(
        "--concurrency",
        type=_levels,
        metavar="N",
        default=(1, 2, 4),
        help="1, 2, 4 … N parallel requests, or a list such as 1,3 [4]",
    )
    parser.add_argument(
        "--tokens", type=_integer(2, 100_000), metavar="N", default=128, help="tokens of each answer [128]"
    )
    parser.add_argument(
        "--requests",
        type=_integer(1, 10_000),
        metavar="N",
        default=3,
        help="requests of a row, multiplied by its concurrency [3]",
    )
    parser.add_argument(
        "--limit-s",
        type=_integer(1, 86_400),
        metavar="S",
        default=60,
        help="start no request of a row after so many seconds [60]",
    )
    parser.add_argument(
        "--timeout-s",
        type=_integer(1, 86_400),
        metavar="S",
        default=600,
        help="give up after so many seconds without a byte [600]",
    )
    parser.add_argument(
        "--seed", type=_integer(0, 2**63), metavar="N", help="seed of the prompts [from the clock, new each time]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the results: .png, .svg or .pdf")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            message = f"not a whole number from {low} to {high}: {text!r}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


def _sizes(text: str) -> tuple[int, ...]:
    """Return prompt lengths in tokens; 1K is 1,024."""
    found = []
    for word in text.split(","):
        number = word.strip().lower().removesuffix("k")
        tokens = int(number) * (1024 if word.strip().lower().endswith("k") else 1) if number.isdecimal() else 0
        if not 64 <= tokens <= 2**24:
            message = f"not a prompt length of 64 tokens or more: {word!r} (as in 1K,2K,4096)"
            raise argparse.ArgumentTypeError(message)
        found.append(tokens)
    return tuple(dict.fromkeys(found))


def _levels(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 1 <= int(word) <= 4096 for word in words):
        message = f"not a number of parallel requests from 1 to 4096: {text!r}"
        raise argparse.ArgumentTypeError(message)
    numbers = tuple(dict.fromkeys(int(word) for word in words))
    if "," in text:
        return numbers
    (most,) = numbers
    return (*(2**power for power in range(most.bit_length()) if 2**power < most), most)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    rows: tuple[Row, ...]
    failure: FatalError | None = None
    was_stopped: bool = False


def run(options: argparse.Namespace) -> int:
    # imported here: aiohttp and rich cost 0.3 s, which `--help` does not need
    from appliance.host.bench.plot import check_plot

    if options.plot:
        check_plot(options.plot)
    endpoint = _endpoint(options)
    model = choose_model(endpoint, options.model, query_models(endpoint)).id
    seed = options.seed if options.seed is not None else time.time_ns()
    workload = Workload(
        prompts=options.prompts,
        concurrency=options.concurrency,
        tokens=options.tokens,
        requests=options.requests,
        limit_s=options.limit_s,
        seed=seed,
    )
    measured = _run_loop(endpoint, model, workload, options.timeout_s)
    if measured.rows:
        _print(options, endpoint, model, workload, measured.rows)
    if measured.failure:
        raise measured.failure
    if measured.was_stopped:
        return 130
    _raise_if_nothing(measured.rows, workload)
    return 0


def _endpoint(options: argparse.Namespace) -> Endpoint:
    if options.url:
        return given_endpoint(options.url, options.key_file, process_environment())
    return local_endpoint(options.name)


def _run_loop(endpoint: Endpoint, model: str, workload: Workload, timeout_s: float) -> _Measured:
    """Run the measurement. If an error or Ctrl-C ends it early, the finished rows are kept."""
    # imported here: they cost 0.3 s, which `--help` does not need
    from appliance.console.terminal import Terminal
    from appliance.host.bench.client import connect
    from appliance.host.bench.measure import measure

    err = Terminal(stderr=True, highlight=False)
    rows: list[Row] = []

    async def main() -> None:
        with _shown(err) as show:
            async with connect(endpoint, model, timeout_s) as client:
                async for row in measure(client, workload, lambda doing: show(_words(doing))):
                    rows.append(row)
                    if not err.is_terminal:
                        err.print(f"{len(rows)} of {workload.rows} rows", markup=False)

    try:
        asyncio.run(main())
    except FatalError as error:
        return _Measured(rows=tuple(rows), failure=error)
    except KeyboardInterrupt:
        return _Measured(rows=tuple(rows), was_stopped=True)
    return _Measured(rows=tuple(rows))


@contextmanager
def _shown(err: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one changing line on a terminal, and nothing elsewhere."""
    if not err.is_terminal:
        yield lambda _: None
        return
    with err.status("warming up") as status:
        yield lambda words: status.update(words)


def _words(doing: Doing) -> str:
    return (
        f"row {doing.row} of {doing.rows}: prompts of {doing.prompt:,} tokens, {doing.concurrency} at once: "
        f"{doing.done} of {doing.of} requests"
    )


def _print(
    options: argparse.Namespace, endpoint: Endpoint, model: str, workload: Workload, rows: tuple[Row, ...]
) -> None:
    # imported here: they cost 0.1 s, which `--help` does not need
    from appliance.console.terminal import Terminal
    from appliance.host.bench.plot import plot
    from appliance.host.bench.show import document, notes, table

    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if options.json:
        print(json.dumps(document(endpoint.base, model, created, workload, rows), indent=1))
    else:
        print(f"{model} at {endpoint.base}, answers of {workload.tokens} tokens, seed {workload.seed}\n")
        # Fixed width: in a narrower table digits would be cut off. A terminal wraps the lines instead.
        Terminal(width=_TABLE_WIDTH, highlight=False).print(table(rows))
    for note in notes(rows, workload):
        print(note, file=sys.stderr if options.json else sys.stdout)
    if options.plot:
        plot(f"{model} at {endpoint.base}, {created}", rows, options.plot)
        print(f"drawn: {options.plot}", file=sys.stderr)


def _raise_if_nothing(rows: tuple[Row, ...], workload: Workload) -> None:
    """Raise EngineNotReadyError if the last row has no answer, because the server is gone or would fail the rest too,
    or if no prompt fits."""
    last = rows[-1]
    if last.failed and not last.answered:
        reason = max(last.failures, key=lambda each: last.failures[each])
        left = workload.rows - len(rows)
        message = f"every request failed at {last.prompt:,} tokens and {last.concurrency} at once: {reason}" + (
            f"; {left} rows were not measured" if left else ""
        )
        raise EngineNotReadyError(message, hint="see the server's log")
    if all(row.skipped for row in rows):
        message = f"nothing was measured: no prompt fits the endpoint's context: {last.skipped}"
        raise EngineNotReadyError(message, hint="use shorter prompts, as in --prompts 256,512")
