"""The regression court of `appliance upgrade`: how often it finds a planted slowdown, and how often one that is not
there.

    python3 -m benchmarks.court record --engine DIR --model FILE --minutes 5 >series.json
    python3 -m benchmarks.court simulate series.json [--courts 200]
    python3 -m benchmarks.court real --engine DIR --model FILE [--courts 20] [--limit-s 150]
    python3 -m benchmarks.court answers --engine DIR --model FILE
    python3 -m benchmarks.court builds --engine NEW --against OLD --model FILE

`record` does the same pass again and again on one llama-server, and notes what else the machine did. `simulate` draws
stretches of such a series, in which the times that would be the new build's are longer by what is planted; and the same
with made-up noise. `real` starts two servers for each court: the second one is stopped for 5 ms in every 100 ms, which
makes it 1 / 0.95 times as slow, or is left alone. Courts take turns: one with the plant, one without; each
begins when nothing else has worked for five seconds.
`answers` shows how far right builds differ in their answers: other kernels, another type of the KV cache. `builds`
compares two engines once, whatever else works, and prints by how much the new one is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil

from appliance.host.court import answers
from appliance.host.court.hearing import Hearing
from appliance.host.court.judge import Pair, Times, Verdict, judge
from appliance.host.court.mix import Job, Mix
from appliance.host.court.replay import Build, replay, warm
from appliance.host.court.sides import Beside, Side
from appliance.host.court.watch import Sample, disturbance
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.verbs.upgrade import COURT_S
from benchmarks.start import cpu_name, free_port

PERIOD_S, PLANTED = 0.1, 0.05
QUIET_S = 5.0
# Two short jobs, the second with a part of its prompt in the cache: a pass of about a second for a small model.
MIX = Mix(
    bursts=((Job(after_s=0.0, cached=0, fresh=128, out=24),), (Job(after_s=0.0, cached=128, fresh=32, out=24),)),
    source="two short jobs",
)
NOISES = (0.01, 0.02, 0.03, 0.05, 0.08)


class Engine(Build):
    """A bare llama-server. It has no metrics of ours, and no other client."""

    def posted(self) -> int:
        return 0

    def came_since(self, posted: int, own: int) -> int:
        return 0

    def running(self) -> int:
        return 0


def main() -> int:
    options = _parse()
    if options.verb == "simulate":
        _simulate(json.loads(options.series.read_text()), options.courts)
    elif options.verb == "record":
        json.dump(_record(options), sys.stdout)
    elif options.verb == "answers":
        _answers(options)
    elif options.verb == "builds":
        print(f"new against old, more is slower: {_heard(options, options.against)[1]}")
    else:
        _real(options)
    return 0


# Real engines.


@contextmanager
def _served(
    options: argparse.Namespace, *words: str, planted: float = 0.0, engine: Path | None = None
) -> Iterator[tuple[Build, int]]:
    port = free_port()
    argv = [
        str((engine or options.engine) / "llama-server"),
        "-m",
        str(options.model),
        "--port",
        str(port),
        "-c",
        "4096",
    ]
    argv += ["-np", "1", "-t", str(len(os.sched_getaffinity(0))), *words]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ends = threading.Event()
        stopping = threading.Thread(target=_stop_now_and_then, args=(process.pid, planted, ends))
        try:
            _until_ready(Gateway(host="127.0.0.1", port=port))
            if planted:
                stopping.start()
            yield Engine(gateway=Gateway(host="127.0.0.1", port=port), model=""), process.pid
        finally:
            ends.set()
            if planted:
                stopping.join()
            process.terminate()


def _stop_now_and_then(pid: int, share: float, ends: threading.Event) -> None:
    while not ends.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(share * PERIOD_S)
        os.kill(pid, signal.SIGCONT)
        ends.wait((1 - share) * PERIOD_S)


def _until_ready(gateway: Gateway) -> None:
    ends, said = time.monotonic() + 120, ""
    while time.monotonic() < ends:
        try:
            if gateway.get("/health").status == 200:
                return
        except NoAnswerError as error:
            said = str(error)
        time.sleep(0.2)
    sys.exit(f"error: the engine does not become ready: {said}")


def _sample(ids: Sequence[str]) -> Sample:
    """Sample as the court does, with processes in place of containers."""
    times = psutil.cpu_times()
    own = [psutil.Process(int(each)).cpu_times() for each in (*ids, os.getpid())]
    own_s = sum(each.user + each.system for each in own)
    busy_s = times.user + times.nice + times.system
    return Sample(time_s=time.monotonic(), busy_s=busy_s, steal_s=getattr(times, "steal", 0.0), own_s=own_s)


def _record(options: argparse.Namespace) -> dict[str, object]:
    passes: list[dict[str, object]] = []
    with _served(options) as (build, pid):
        warm(build, MIX)
        ends = time.monotonic() + 60 * options.minutes
        while time.monotonic() < ends:
            before = _sample([str(pid)])
            times = replay(build, MIX, len(passes) + 1)
            words = disturbance(before, _sample([str(pid)]), cpus=os.cpu_count() or 1)
            passes.append({"prefill_s": times.prefill_s, "decode_s": times.decode_s, "disturbance": words})
    return {"cpu": cpu_name(), "cpus": os.cpu_count(), "passes": passes}


def _real(options: argparse.Namespace) -> None:
    counts: dict[float, Counter[str]] = {PLANTED: Counter(), 0.0: Counter()}
    for number in range(options.courts):
        for planted in counts:
            _wait_until_quiet()
            verdict, words = _heard(options, options.engine, planted=planted)
            counts[planted][verdict] += 1
            print(f"{number + 1} planted {planted:.0%}: {words}", flush=True)
    print(f"{cpu_name()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[1]:.1f}")
    for planted, found in counts.items():
        print(f"planted {planted:.0%}: {dict(found)}")


def _heard(options: argparse.Namespace, old: Path, *, planted: float = 0.0) -> tuple[Verdict, str]:
    """Hold court once on the engine of `old` and that of the options. Return the verdict and a line."""
    with ExitStack() as stack:
        first, first_pid = stack.enter_context(_served(options, engine=old))
        second, second_pid = stack.enter_context(_served(options, planted=planted))
        sides = Beside(builds={Side.OLD: first, Side.NEW: second}, working=(str(first_pid), str(second_pid)))
        hearing = Hearing(sides, MIX, limit_s=options.limit_s, sampler=_sample, tell=lambda _: None)
        began = time.monotonic()
        speeds = hearing.speeds(MIX)
    figures = [f"{each.what} {each.share:+.1%} ({each.low:+.1%} to {each.high:+.1%})" for each in speeds.slowdowns]
    took = f"{speeds.pairs} pairs, {time.monotonic() - began:.0f} s"
    return speeds.verdict, "; ".join([str(speeds.verdict), took, *figures, *([speeds.why] if speeds.why else [])])


def _wait_until_quiet() -> None:
    """Wait for `QUIET_S` in which nothing else works, as a user of `upgrade` would choose the time."""
    while True:
        before = _sample([])
        time.sleep(QUIET_S)
        if not disturbance(before, _sample([]), cpus=os.cpu_count() or 1):
            return


def _answers(options: argparse.Namespace) -> None:
    kinds = {"again": (), "1 thread": ("-t", "1"), "without flash attention": ("-fa", "off")}
    kinds |= {f"KV cache {name}": ("-ctk", name, "-ctv", name, "-fa", "on") for name in ("q8_0", "q4_0")}
    with _served(options) as (build, _):
        old = answers.ask(build)
    for name, words in kinds.items():
        with _served(options, *words) as (build, _):
            found = answers.compare(old, answers.ask(build))
        print(f"{name}: {found.same} of {found.prompts} the same, {found.clear} clearly others, {found.mean_nats} nats")


# Simulated courts.


def _simulate(series: dict[str, list[dict[str, float | str]]], courts: int) -> None:
    passes = [Times(prefill_s=float(p["prefill_s"]), decode_s=float(p["decode_s"])) for p in series["passes"]]
    quiet = [t for t, p in zip(passes, series["passes"], strict=True) if not p["disturbance"]]
    print(f"{series['cpu']}, {series['cpus']} CPUs: {len(passes)} passes, {len(quiet)} of them undisturbed")
    sources = {"recorded, all": passes, "recorded, undisturbed": quiet}
    for name, times in sources.items():
        if len(times) > 2 * 8:
            _show(name, partial(_stretch, times), courts)
    for noise in NOISES:
        _show(f"made up, {noise:.0%} noise of each pass", partial(_made_up, noise), courts)


def _show(name: str, source: partial[Iterator[Times]], courts: int) -> None:
    for planted in (PLANTED, 0.0):
        found = Counter(_court(source(random.Random(seed)), planted) for seed in range(courts))
        print(f"{name}; planted {planted:.0%}: { ({str(k): v for k, v in found.items()}) }", flush=True)


def _stretch(times: Sequence[Times], numbers: random.Random) -> Iterator[Times]:
    """Yield a series from a random place on, so that slow phases stay together; at its end it begins again."""
    place = numbers.randrange(len(times))
    while True:
        yield times[place % len(times)]
        place += 1


def _made_up(noise: float, numbers: random.Random) -> Iterator[Times]:
    """Yield passes of 1.5 s with lognormal noise. One in twenty takes a quarter longer."""
    while True:
        late = 1.25 if numbers.random() < 0.05 else 1.0
        yield Times(
            prefill_s=0.5 * late * numbers.lognormvariate(0, noise), decode_s=late * numbers.lognormvariate(0, noise)
        )


def _court(series: Iterator[Times], planted: float) -> Verdict:
    """Hear one court, as `Hearing.speeds` does, on the series' own clock."""
    pairs: list[Pair] = []
    seconds, is_old_first = 0.0, True
    while seconds < COURT_S:
        first, second = next(series), next(series)
        old, new = (first, second) if is_old_first else (second, first)
        slower = Times(prefill_s=new.prefill_s / (1 - planted), decode_s=new.decode_s / (1 - planted))
        pairs.append(Pair(old=old, new=slower))
        seconds += old.prefill_s + old.decode_s + slower.prefill_s + slower.decode_s
        is_old_first = not is_old_first
        if judge(pairs).is_precise:
            break
    return judge(pairs).verdict


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    simulate = verbs.add_parser("simulate")
    simulate.add_argument("series", type=Path)
    simulate.add_argument("--courts", type=int, default=200)
    for name in ("record", "real", "answers", "builds"):
        verb = verbs.add_parser(name)
        verb.add_argument("--engine", type=Path, required=True)
        verb.add_argument("--model", type=Path, required=True)
        if name == "record":
            verb.add_argument("--minutes", type=float, default=5.0)
        if name == "builds":
            verb.add_argument("--against", type=Path, required=True)
        if name == "real":
            verb.add_argument("--courts", type=int, default=20)
        if name in ("real", "builds"):
            verb.add_argument("--limit-s", type=float, default=COURT_S)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
