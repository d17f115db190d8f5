"""What a gateway costs: CPU per chunk of a stream, time to first token, memory per stream. Ours beside two others.

The same streams of a fake engine with a set pace pass in turn directly, through our gateway, through vllm-router and
through nginx (those that are installed), in interleaved rounds of one run; medians count. CPU is that of the gateway's
threads (/proc/PID/task/TID/schedstat), so the fake engine and the client do not count. Times added are against the
direct way of the same round.

The ways differ in more than their cost. Ours checks keys, counts usage and watches requests for receipts; it lacks the
fleet's look-up of a model. It writes usage 3 s after a request, 1 to 2 ms of CPU that mostly fall outside of what is
counted. vllm-router checks no key and keeps its connections to the engine, on TCP; ours and nginx open one a request,
on a unix socket. nginx only copies bytes. Clients open a connection for each request. On a busy machine
Python suffers most, since other programs take its place in the caches.

    apt-get install nginx-light; pip install vllm-router==0.1.17   # in any environment
    python3 -m benchmarks.gateway [--rounds 10] [--router PATH] [--json]
    python3 -m benchmarks.gateway --soak-minutes 10    # ours only: 64 streams that leave at random moments
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gateway_ways import KEY, Way, engine, open_ways, ours

STREAMS = (1, 16, 64, 256)
SECONDS = 3.0
CHUNKS_PER_S_MAX = 4000.0  # of all streams: more, and the fake engine and the client would not keep up on two cores
PACE_MAX = 50.0  # tokens a second of one stream
LONG_BYTES = 500_000  # of a prompt of about 100,000 tokens


# The client


@dataclass
class Seen:
    """What the client saw of one measurement; times in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    chunks: int = 0
    failed: int = 0


async def stream(port: int, body: dict[str, object], seen: Seen, *, until: Callable[[], bool] = lambda: False) -> None:
    """Ask for one stream and read it to its end, or leave after a chunk at which `until` is true."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began = time.perf_counter()
        writer.write(head.encode() + data)
        has_begun, tail = False, b""
        while piece := await reader.read(65536):
            count = piece.count(b'"delta"')
            if count and not has_begun:
                has_begun = True
                seen.ttft_s.append(time.perf_counter() - began)
            seen.chunks += count
            tail = (tail + piece)[-64:]
            if b"[DONE]" in tail or until():
                return
        seen.failed += 1
    finally:
        writer.close()


def asked(tokens: int, pace: float, prompt_bytes: int = 200) -> dict[str, object]:
    prompt = "word " * (prompt_bytes // 5)
    messages = [{"role": "user", "content": prompt}]
    return {"model": "m", "messages": messages, "stream": True, "max_tokens": tokens, "pace": pace}


async def streams_at_once(port: int, count: int) -> Seen:
    """Read `count` streams, whose beginnings are spread over half a second."""
    pace = min(PACE_MAX, CHUNKS_PER_S_MAX / count)
    seen = Seen()

    async def one(number: int) -> None:
        await asyncio.sleep(0.5 * number / count)
        await stream(port, asked(max(2, round(pace * SECONDS)), pace), seen)

    await asyncio.gather(*(one(number) for number in range(count)))
    return seen


async def short_beside_long(port: int) -> Seen:
    """Read short answers one after the other while prompts of 100,000 tokens come in."""
    seen, others, is_over = Seen(), Seen(), False

    async def long_ones() -> None:
        while not is_over:
            await stream(port, asked(2, PACE_MAX, LONG_BYTES), others)

    async with asyncio.TaskGroup() as group:
        group.create_task(long_ones())
        for _ in range(60):
            await stream(port, asked(1, PACE_MAX), seen)
            await asyncio.sleep(0.02)
        is_over = True
    return seen


# Measurements


@asynccontextmanager
async def _ways(names: Sequence[str], router: str | None) -> AsyncIterator[list[Way]]:
    async with open_ways(names, router) as ways:
        await _warm_up(ways)
        yield ways


async def _warm_up(ways: Sequence[Way]) -> None:
    for way in ways:
        deadline = time.monotonic() + 60
        while True:  # a router answers once it has found its worker healthy
            seen = Seen()
            await stream(way.port, asked(20, 1000.0), seen)
            if not seen.failed:
                break
            if time.monotonic() > deadline:
                message = f"{way.name} does not pass the engine's stream on"
                raise RuntimeError(message)
            await asyncio.sleep(0.2)


Row = dict[str, float]


async def measured(way: Way, streams: int) -> Row:
    """Return figures of one round: `cpu_us` per chunk, times in ms."""
    before = way.cpu_s()
    seen = await streams_at_once(way.port, streams)
    if seen.failed:
        message = f"{way.name}: {seen.failed} of {streams} streams ended before their end"
        raise RuntimeError(message)
    return {"cpu_us": 1e6 * (way.cpu_s() - before) / seen.chunks, **_times(seen)}


def _times(seen: Seen) -> Row:
    ordered = sorted(seen.ttft_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"ttft_p50_ms": 1e3 * statistics.median(ordered), "ttft_p99_ms": 1e3 * p99}


async def idle_memory(way: Way, streams: int = 256) -> float:
    """Return KiB of memory for each stream that waits for its next token."""
    before, seen = way.rss_kib(), Seen()
    waiting = [asyncio.create_task(stream(way.port, asked(9, 0.0), seen)) for _ in range(streams)]
    while seen.chunks < streams:  # noqa: ASYNC110 - counted by many tasks
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    used = way.rss_kib() - before
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return used / streams


async def compare(rounds: int, router: str | None, streams: Sequence[int]) -> dict[str, object]:
    names = ["direct", "ours", *(["vllm-router"] if router else []), *(["nginx"] if shutil.which("nginx") else [])]
    async with _ways(names, router) as ways:
        # First, since memory that a round has freed is used again.
        memory = {way.name: round(await idle_memory(way), 1) for way in ways if way.pid}
        rows: dict[str, dict[str, list[Row]]] = {}
        for number in range(rounds):
            for count in streams:
                for way in ways:
                    rows.setdefault(str(count), {}).setdefault(way.name, []).append(await measured(way, count))
            for way in ways:
                row = _times(await short_beside_long(way.port))
                rows.setdefault("short beside 100K", {}).setdefault(way.name, []).append(row)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "cases": {case: _medians(found) for case, found in rows.items()},
        "kib_per_stream": memory,
    }


def _medians(found: dict[str, list[Row]]) -> dict[str, Row]:
    direct = found["direct"]
    result = {}
    for name, rows in found.items():
        figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for key in ("ttft_p50_ms", "ttft_p99_ms"):
            added = (row[key] - other[key] for row, other in zip(rows, direct, strict=True))
            figures[f"added_{key}"] = statistics.median(added)
        result[name] = {key: round(value, 2) for key, value in figures.items()}
    return result


def in_words(result: dict[str, object]) -> str:
    lines = ["| streams | way | CPU a chunk | TTFT added, p50 | p99 |", "|---|---|---|---|---|"]
    cases: dict[str, dict[str, Row]] = result["cases"]  # type: ignore[assignment]
    for case, ways in cases.items():
        for name, row in ways.items():
            if name == "direct":
                continue
            cpu = f"{row['cpu_us']:.1f} µs" if "cpu_us" in row else "–"
            times = f"{row['added_ttft_p50_ms']:+.2f} ms | {row['added_ttft_p99_ms']:+.2f} ms"
            lines.append(f"| {case} | {name} | {cpu} | {times} |")
    memory: dict[str, float] = result["kib_per_stream"]  # type: ignore[assignment]
    lines.append("")
    lines.append("memory per waiting stream: " + ", ".join(f"{name} {kib:.0f} KiB" for name, kib in memory.items()))
    return "\n".join(lines)


async def soak(minutes: float) -> int:
    """Run 64 streams that leave at random moments; 1 if memory grew, a descriptor is left, or a request is missing."""
    async with _ways(["ours"], None) as (way,):
        chance = random.Random(1)
        seen, sent, ends_at = Seen(), 1, time.monotonic() + 60 * minutes  # one to warm up
        begun, warm_kib = way.descriptors(), 0

        async def client() -> None:
            nonlocal sent
            while time.monotonic() < ends_at:
                sent += 1
                leaves_after = chance.choice((None, 1, 5, 20))
                mine = Seen()
                leaves = (lambda: mine.chunks >= leaves_after) if leaves_after else (lambda: False)  # noqa: B023
                await stream(way.port, asked(chance.randint(1, 60), PACE_MAX), mine, until=leaves)
                seen.chunks, seen.failed = seen.chunks + mine.chunks, seen.failed + mine.failed

        async def note_memory() -> None:
            nonlocal warm_kib
            await asyncio.sleep(60 * minutes / 5)
            warm_kib = way.rss_kib()

        await asyncio.gather(note_memory(), *(client() for _ in range(64)))
        await asyncio.sleep(2)
        counted = await _counted(way.port)
        grown = way.rss_kib() - warm_kib
        left = way.descriptors() - begun
        print(f"{sent} requests in {minutes:g} min, {seen.chunks} chunks, {seen.failed} failed")
        memory = f"memory {warm_kib / 1024:.1f} MiB after a fifth, {grown:+d} KiB since"
        print(f"{counted} counted in metrics; {memory}; {left:+d} descriptors")
        return int(counted != sent or seen.failed > 0 or left > 1 or grown > 2048)


async def _counted(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    text = (await reader.read()).decode()
    writer.close()
    lines = [
        line for line in text.splitlines() if line.startswith("appliance_requests_total{") and "completions" in line
    ]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="interleaved; medians count [10]")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="numbers of parallel streams")
    parser.add_argument("--router", default=shutil.which("vllm-router"), metavar="PATH", help="program of vllm-router")
    parser.add_argument("--soak-minutes", type=float, metavar="N", help="only the soak of our gateway")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--be", choices=["engine", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        uvloop.run((engine if options.be == "engine" else ours)(options.socket, options.port))
        return 0
    if options.soak_minutes:
        return uvloop.run(soak(options.soak_minutes))
    result = uvloop.run(compare(options.rounds, options.router, options.streams))
    print(json.dumps(result, indent=1) if options.json else in_words(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
