"""What fetching costs: one connection of ours against curl's, the hash of what a killed run left, and the memory.

A fake hub on this machine sends a file of noise; what is measured is this machine's CPU and disk, not a network. Each
run is a process of its own, in turn.

    python3 -m benchmarks.fetch [--mib 1024] [--runs 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from appliance.settings import HubSettings
from appliance.weights.cache.hub_layout import RepoFolder
from appliance.weights.download.fetch import fetch
from appliance.weights.download.hub import resolve
from tests.fakes.hub.running import MIB, REPO, RunningHub, running_hub

NAME = "Big-Q8_0.gguf"


def main() -> int:
    options = _parse()
    if options.one:
        print(json.dumps(asyncio.run(_one(Path(options.one[0]), options.one[1]))))
        return 0
    with tempfile.TemporaryDirectory(prefix="fetch-") as folder:
        result = _measure(Path(folder), options.mib, options.runs)
    print(json.dumps(result, indent=1) if options.json else _in_words(result))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file [1024]")
    parser.add_argument("--runs", type=int, default=3, help="of each [3]")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a run of ours: folder, endpoint
    return parser.parse_args()


def _measure(folder: Path, mib: int, runs: int) -> dict[str, Any]:
    path = folder / "hub" / REPO / NAME
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for seed in range(mib):
            file.write(random.Random(seed).randbytes(MIB))
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with running_hub(folder / "hub") as hub:
        _curl(hub, folder)  # the fake hashes its file once
        ours, theirs, resumed = [], [], []
        for _ in range(runs):
            ours.append(_ours(folder, hub, sha256, left=0))
            theirs.append(_curl(hub, folder))
            resumed.append(_ours(folder, hub, sha256, left=mib - 1))
    return {
        "mib": mib,
        "runs": runs,
        "cpus": len(os.sched_getaffinity(0)),
        "ours_mb_per_s": _rate(mib, [run["seconds"] for run in ours]),
        "curl_mb_per_s": _rate(mib, theirs),
        "hash_of_what_is_left_mb_per_s": _rate(mib, [run["seconds"] for run in resumed]),
        "peak_rss_mib": max(run["peak_rss_mib"] for run in ours),
        "cpu_s_per_gb": round(statistics.median(run["cpu_s"] for run in ours) / (mib * MIB / 1e9), 2),
    }


def _rate(mib: int, seconds: list[float]) -> float:
    return round(mib * MIB / 1e6 / statistics.median(seconds), 1)


def _ours(folder: Path, hub: RunningHub, sha256: str, left: int) -> dict[str, float]:
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    if left:
        repo = RepoFolder(root=models, name="models--org--Tiny-GGUF")
        repo.make()
        with (folder / "hub" / REPO / NAME).open("rb") as source, repo.partial(sha256).open("wb") as partial:
            for _ in range(left):
                partial.write(source.read(MIB))
    argv = [sys.executable, "-m", "benchmarks.fetch", "--one", str(models), hub.endpoint]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    run: dict[str, float] = json.loads(done.stdout)
    return run


async def _one(models: Path, endpoint: str) -> dict[str, float]:
    hub = HubSettings(endpoint=endpoint)
    wanted = await resolve(REPO, hub)
    began, cpu = time.monotonic(), time.process_time()
    await fetch(wanted, models, hub, lambda _: None)
    return {
        "seconds": time.monotonic() - began,
        "cpu_s": time.process_time() - cpu,
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _curl(hub: RunningHub, folder: Path) -> float:
    """With the hash that we take and it does not, and the same flush to the disk."""
    out = folder / "curl.out"
    out.unlink(missing_ok=True)
    url = f"{hub.endpoint}/{REPO}/resolve/main/{NAME}"
    began = time.monotonic()
    subprocess.run(["curl", "-sSL", "-o", str(out), url], check=True)
    subprocess.run(["sync", str(out)], check=True)
    subprocess.run(["sha256sum", str(out)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def _in_words(result: dict[str, Any]) -> str:
    return "\n".join(
        (
            f"a file of {result['mib']} MiB from this machine, medians of {result['runs']}, {result['cpus']} CPUs",
            f"  fetched and checked, one connection   {result['ours_mb_per_s']:8,.1f} MB/s",
            f"  curl, sync, sha256sum                 {result['curl_mb_per_s']:8,.1f} MB/s",
            f"  hash of what a killed run left        {result['hash_of_what_is_left_mb_per_s']:8,.1f} MB/s",
            f"  CPU time                              {result['cpu_s_per_gb']:8.2f} s a GB",
            f"  peak memory of the process            {result['peak_rss_mib']:8,.0f} MiB",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
