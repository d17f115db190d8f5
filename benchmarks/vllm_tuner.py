"""The tuner's choice for vLLM against `vllm bench sweep serve` over the same space, on the CPU build.

    python3 -m benchmarks.vllm_tuner --model FOLDER --packages FOLDER [--setting NAME=VALUE …] [--table FILE]

The space is the appliance's own: every plan that it makes of the model and the settings, without speculative decoding.
`appliance tune` searches it; the sweep loads every plan and asks each as often as `--runs`. Both read prompts of one
text, one request at a time, of the workload's length. Both times include loads and compiling, on an empty cache each.
Then a third client measures both best points, each `--runs` times in turn, by the wall clock of whole requests; if both
chose one plan, nothing is left to measure. The table holds what each found, with the machine's load.

The sweep needs pandas, which no image has:

    python3 -m pip install --target FOLDER --no-deps 'pandas<3' python-dateutil six pytz tzdata
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.profile.record import parse_profile
from appliance.settings import SETTINGS
from appliance.tune.figures.workload import CHAT
from benchmarks.vllm_start import IMAGE, LIMIT_S, PORT, answers, published, variables, volume

TABLE = Path(__file__).with_name("vllm_tuner_table.json")
TEXT = Path(__file__).parents[1] / "appliance/tune/trials/text.txt"
OURS = {
    "APPLIANCE_MODEL": "/model", "APPLIANCE_ALIAS": "m", "APPLIANCE_AUTH": "off", "APPLIANCE_SPECULATION": "off",
    "APPLIANCE_MODE": "speed", "APPLIANCE_LOG": "json",
}  # fmt: skip
SOCKET = "/tmp/bench.sock"
# Folders that the appliance makes before it starts an engine.
PLACES = {"HOME": "/data", "VLLM_RPC_BASE_PATH": "/tmp"}
LIBRARY = "/opt/appliance/lib"
# Run in the image by the appliance's own Python: every plan as a key and a command line.
PLANS = f"""
import json, os, sys
sys.path.insert(0, {LIBRARY!r})
from pathlib import Path
from appliance.preview.preview import preview
from appliance.settings import resolve_settings
found = preview(resolve_settings({{}}, os.environ), os.environ)
start = found.start
command = lambda plan: start.engine.command(plan, start.install, Path({SOCKET!r}))
rows = [(plan.key, command(plan)) for plan in found.space.all()]
print(json.dumps([{{"key": key, "argv": of.argv, "environment": dict(of.environment)}} for key, of in rows]))
"""
# Run in the image by vLLM's Python: texts of so many tokens, each beginning elsewhere, so that none is a cached prefix.
PROMPTS = """
import json, sys
from tokenizers import Tokenizer
tokens, count = int(sys.argv[1]), int(sys.argv[2])
coder = Tokenizer.from_file("/model/tokenizer.json")
ids = coder.encode(sys.stdin.read(), add_special_tokens=False).ids
ids *= 1 + (tokens + count * 97) // len(ids)
print(json.dumps([coder.decode(ids[97 * at : 97 * at + tokens]) for at in range(count)]))
"""


class Box:
    """A container of the image that runs nothing by itself, without a network."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *argv: str, entered: str = "", environment: dict[str, str] | None = None) -> str:
        """Run a command in it and return its output. Ends the benchmark if it fails."""
        words = ("docker", "exec", "-i", *variables(environment or {}), self.name, *argv)
        done = subprocess.run(words, check=False, input=entered, capture_output=True, text=True)
        if done.returncode:
            said = f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
            message = f"error: {' '.join(argv)[:200]} ended with {done.returncode}\n{said}"
            raise SystemExit(message)
        return done.stdout

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", f"cat >{path}", entered=text)


def main() -> int:
    options = _parse()
    began = os.getloadavg()[0]
    with opened(options) as box:
        plans = json.loads(box.run("/usr/bin/python3", "-ISB", "-c", PLANS, environment=options.variables))
        words = ("/opt/vllm/bin/python", "-c", PROMPTS, str(CHAT.tokens_in), str(options.prompts))
        prompts = json.loads(box.run(*words, entered=TEXT.read_text()))
        print(f"{len(plans)} plans, {len(prompts)} prompts of {CHAT.tokens_in} tokens", file=sys.stderr)
        ours = tuned(box, options)
        print(f"appliance tune: {ours['best']} after {ours['seconds']:.0f} s", file=sys.stderr)
    with opened(options) as box:
        rival = swept(box, plans, prompts, options)
    print(f"sweep: {rival['best']} after {rival['seconds']:.0f} s", file=sys.stderr)
    by_key = {plan["key"]: plan for plan in plans}
    best = [by_key[each["best"]] for each in (ours, rival)]
    third = compared(lambda plan: job_s(plan, prompts, options), best, options.runs)
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": [began, os.getloadavg()[0]],
        "settings": options.variables,
        "plans": len(plans),
        "prompts": len(prompts),
        "runs": options.runs,
        "ours": ours,
        "sweep": rival,
        "third": third,
        "time_ratio": round(ours["seconds"] / rival["seconds"], 3),
    }
    options.table.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print("\n".join(in_words(found)))
    return 0


def tuned(box: Box, options: argparse.Namespace) -> dict[str, Any]:
    """Let the appliance search. Returns the best plan's key, the seconds, and what was measured."""
    began = time.monotonic()
    box.run("appliance", "tune", "--budget-s", str(options.budget_s), environment=options.variables)
    seconds = time.monotonic() - began
    profile = parse_profile(box.run("sh", "-c", "cat /data/profiles/*.json"))
    rows = [
        {"key": m.key, "is_long": m.is_long, "load_s": m.load_s, "seconds": m.seconds, "decode_ms": p.decode_ms}
        for m in profile.measurements
        for p in m.points[-1:]
    ]
    return {
        "best": profile.plan.key,
        "seconds": round(seconds, 1),
        "stopped_by": profile.stopped_by,
        "loads": len(rows),
        "measured": rows,
    }


def swept(
    box: Box, plans: Sequence[dict[str, Any]], prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Let vLLM's sweep load and ask every plan. Returns the key with the shortest mean job, and every job's time."""
    flags = [flags_of(plan["argv"]) for plan in plans]
    shared = {name: value for name, value in flags[0].items() if all(each.get(name) == value for each in flags)}
    names = {f"p{at}": plan["key"] for at, plan in enumerate(plans)}
    differing = [
        {"_benchmark_name": name, **{key.removeprefix("--"): value for key, value in own.items() if key not in shared}}
        for name, own in zip(names, flags, strict=True)
    ]
    box.write("/data/params.json", json.dumps(differing))
    box.write("/data/prompts.jsonl", "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    words = [word for name, value in shared.items() for word in ((name,) if value is True else (name, value))]
    serve = ["/opt/vllm/bin/vllm", *plans[0]["argv"][1:3], "--host", "127.0.0.1", "--port", str(PORT), *words]
    ask = [
        *("/opt/vllm/bin/vllm", "bench", "serve", "--model", "/model", "--served-model-name", "m", "--backend", "vllm"),
        *(
            "--base-url",
            f"http://127.0.0.1:{PORT}",
            "--dataset-name",
            "custom",
            "--dataset-path",
            "/data/prompts.jsonl",
        ),
        *("--custom-output-len", str(CHAT.tokens_out), "--skip-chat-template", "--disable-shuffle", "--ignore-eos"),
        *("--num-prompts", str(len(prompts)), "--max-concurrency", "1", "--temperature", "0"),
    ]
    began = time.monotonic()
    box.run(
        *("/opt/vllm/bin/vllm", "bench", "sweep", "serve", "--serve-cmd", shlex.join(serve)),
        *("--bench-cmd", shlex.join(ask), "--serve-params", "/data/params.json", "--num-runs", str(options.runs)),
        *("--warmup-num-prompts", "1"),
        *("--server-ready-timeout", str(int(LIMIT_S)), "-o", "/data/results", "-e", "sweep"),
        environment={**plans[0]["environment"], **PLACES},
    )
    seconds = time.monotonic() - began
    listed = box.run("sh", "-c", "for file in /data/results/sweep/*/run=*.json; do echo $file; cat $file; echo; done")
    jobs = jobs_by_name(listed)
    rows = [{"key": names[name], "job_s": times} for name, times in sorted(jobs.items())]
    best = min(rows, key=lambda row: statistics.mean(row["job_s"]))
    return {"best": best["key"], "seconds": round(seconds, 1), "loads": len(rows), "measured": rows}


def flags_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags of `vllm serve MODEL …` but those of the socket. A flag without a value is True."""
    found: dict[str, Any] = {}
    name = ""
    for word in argv[3:]:
        if word.startswith("--"):
            name = word
            found[name] = True
        else:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return {name: value for name, value in found.items() if name != "--uds"}


def jobs_by_name(listed: str) -> dict[str, list[float]]:
    """Return seconds of a job by the plan's name in the sweep, one for each run: time to first token and all others."""
    found: dict[str, list[float]] = {}
    name = ""
    for line in listed.splitlines():
        if line.startswith("/"):
            name = next(part for part in line.split("/")[-2].split("-") if part[:1] == "p" and part[1:].isdigit())
            text = ""
            continue
        text += line
        if line == "}" or (line.startswith("{") and line.endswith("}")):
            run = json.loads(text)
            job_s = (run["mean_ttft_ms"] + (CHAT.tokens_out - 1) * run["mean_tpot_ms"]) / 1000
            found.setdefault(name, []).append(round(job_s, 3))
    return found


def compared(job_s: Callable[[dict[str, Any]], float], best: Sequence[dict[str, Any]], runs: int) -> dict[str, Any]:
    """Measure both best points in turn. `ratio` is ours by theirs, of medians; above 1 ours is slower."""
    ours, theirs = best
    if ours["key"] == theirs["key"]:
        return {"ours_s": [], "sweep_s": [], "ratio": 1.0}
    seen: list[tuple[float, float]] = []
    for turn in range(runs):
        pair = {plan["key"]: job_s(plan) for plan in (best if turn % 2 else best[::-1])}
        seen.append((pair[ours["key"]], pair[theirs["key"]]))
    ours_s, theirs_s = (list(side) for side in zip(*seen, strict=True))
    ratio = statistics.median(ours_s) / statistics.median(theirs_s)
    return {"ours_s": ours_s, "sweep_s": theirs_s, "ratio": round(ratio, 3)}


def job_s(plan: dict[str, Any], prompts: Sequence[str], options: argparse.Namespace) -> float:
    """Load the plan in a container of its own and return the mean seconds of a whole request."""
    with volume() as data:
        at = plan["argv"].index("--uds")
        argv = [*plan["argv"][1:at], *plan["argv"][at + 2 :], "--host", "0.0.0.0", "--port", str(PORT)]
        words = (*variables({**plan["environment"], **PLACES}), "--publish", f"127.0.0.1::{PORT}")
        with _container(options, data, *words, "--entrypoint", plan["argv"][0], words=argv) as name:
            port, began = published(name, PORT), time.monotonic()
            while not answers(port):
                if time.monotonic() - began > LIMIT_S:
                    message = f"error: no answer within {LIMIT_S:g} s: {plan['key']}"
                    raise SystemExit(message)
                time.sleep(0.5)
            return round(statistics.mean(asked_s(port, prompt) for prompt in prompts), 3)


def asked_s(port: int, prompt: str) -> float:
    body = {"model": "m", "prompt": prompt, "max_tokens": CHAT.tokens_out, "ignore_eos": True, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    seconds = time.monotonic() - began
    connection.close()
    if answer["usage"]["completion_tokens"] != CHAT.tokens_out:
        message = f"error: {answer['usage']['completion_tokens']} tokens were made, {CHAT.tokens_out} were asked for"
        raise SystemExit(message)
    return seconds


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Box]:
    with (
        volume() as data,
        _container(options, data, "--network", "none", "--entrypoint", "sleep", words=["86400"]) as name,
    ):
        yield Box(name)


@contextmanager
def _container(options: argparse.Namespace, data: str, *flags: str, words: Sequence[str]) -> Iterator[str]:
    mounts = {data: "/data", f"{options.model.resolve()}": "/model:ro"}
    mounts |= {str(path.resolve()): f"/opt/vllm/lib/{path.name}:ro" for path in options.packages.iterdir()}
    mounts |= {str(options.source.resolve()): f"{LIBRARY}/appliance:ro"} if options.source else {}
    volumes = [word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}")]
    argv = ("docker", "run", "--detach", "--init", "--shm-size", "1g", *volumes, *flags, options.image, *words)
    name = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield name
    finally:
        subprocess.run(("docker", "rm", "--force", name), check=False, capture_output=True)


def in_words(found: dict[str, Any]) -> Iterator[str]:
    ours, rival, third = found["ours"], found["sweep"], found["third"]
    before, after = found["load"]
    yield f"{found['plans']} plans; {found['cpus']} CPUs, load {before:.1f} before and {after:.1f} after"
    yield f"appliance tune: {ours['seconds']:.0f} s, {ours['loads']} loads: {ours['best']}"
    yield f"    stopped: {ours['stopped_by']}"
    yield f"bench sweep serve: {rival['seconds']:.0f} s, {rival['loads']} loads: {rival['best']}"
    if ours["best"] == rival["best"]:
        yield "both chose the same plan: ratio of results 1"
    else:
        yield f"third client, seconds of a job: {third['ours_s']} and {third['sweep_s']}"
        yield f"ratio of results: {third['ratio']}"
    yield f"ratio of time: {found['time_ratio']}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="safetensors, config and tokenizer")
    parser.add_argument("--packages", type=Path, required=True, metavar="FOLDER", help="pandas, for the sweep")
    parser.add_argument("--image", default=IMAGE, help=f"which image [{IMAGE}]")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="an appliance/ to run instead of the image's own")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="of the appliance: narrows the space"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each point [3]")
    parser.add_argument("--prompts", type=int, default=6, help="in each run [6]")
    parser.add_argument("--budget-s", type=int, default=3600, help="of the appliance's search [3600]")
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help=f"where it is recorded [{TABLE.name}]"
    )
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        parser.error(f"--model is no folder with a config.json: {options.model}")
    if not (options.packages / "pandas").is_dir():
        parser.error(f"--packages is no folder with pandas: {options.packages}")
    given = dict(each.partition("=")[::2] for each in options.setting)
    if unknown := sorted(set(given) - set(SETTINGS)):
        parser.error(f"no such setting: {', '.join(unknown)}")
    options.variables = {**OURS, **{f"APPLIANCE_{name.upper()}": value for name, value in given.items()}}
    return options


if __name__ == "__main__":
    sys.exit(main())
