"""The GPUs that the engine itself sees. NVML may list GPUs that its CUDA backend cannot use; it would then silently run
on the CPU."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from appliance.engines.engine import Devices
from appliance.engines.llama.process.facts import BINARY, CUDA_BACKEND
from appliance.engines.llama.process.server import gpu_environment
from appliance.run import RunTimeout, run

TIMEOUT_S = 60.0  # a cold driver wakes its GPUs one after another
_DEVICE = re.compile(r"^ {2}(CUDA\d+): .+ \(\d+ MiB, \d+ MiB free\)$", re.MULTILINE)
_CAUSE = re.compile(r"cuda|fail|error|cannot", re.IGNORECASE)


def query_devices(
    engine_dir: Path,
    cache_dir: Path,
    *,
    driver_dir: Path | None = None,
    cpu_variant: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Devices:
    """Return the GPUs that the engine lists. It makes a CUDA context on each one.

    If it fails, the cause is in `said`; nothing is raised.
    """
    environment = gpu_environment(engine_dir, cache_dir, driver_dir, cpu_variant=cpu_variant)
    try:
        done = run((str(engine_dir / BINARY), "--list-devices"), timeout_s=timeout_s, environment=environment)
    except RunTimeout:
        return Devices(said=f"{BINARY} --list-devices did not answer within {timeout_s:g} s")
    except OSError as error:
        return Devices(said=f"{BINARY} cannot be started: {error}")
    if done.returncode != 0:
        return Devices(said=_last_cause(done.stderr) or f"{BINARY} --list-devices ended with {done.returncode}")
    names = parse_devices(done.stdout)
    return Devices(
        names=names, said=_last_cause(done.stderr) or ("" if names else _why_unloadable(engine_dir, environment))
    )


def query_devices_once(
    engine_dir: Path,
    cache_dir: Path,
    *,
    driver: str | None,
    uuids: tuple[str, ...],
    driver_dir: Path | None = None,
    cpu_variant: str | None = None,
) -> Devices:
    """Return the GPUs that the engine lists, from the cache if driver and GPUs are the same as in an earlier start.

    Running the engine would delay every start. `cache_dir` is the folder of this build. Only answers with GPUs are
    cached.
    """
    key = hashlib.sha256(json.dumps([driver, *sorted(uuids)]).encode()).hexdigest()[:24]
    path = cache_dir / f"devices-{key}"
    with suppress(OSError):  # no cached answer
        if names := parse_kept(path.read_text(encoding="utf-8", errors="replace")):
            return Devices(names=names)
    found = query_devices(engine_dir, cache_dir, driver_dir=driver_dir, cpu_variant=cpu_variant)
    if found.names:
        with suppress(OSError):  # a full volume: the next start asks again
            path.write_text("".join(f"{name}\n" for name in found.names), encoding="utf-8")
    return found


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the GPUs' names in the output of --list-devices: `  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)`."""
    return tuple(_DEVICE.findall(text))


def parse_kept(text: str) -> tuple[str, ...]:
    """Return the names in a cache file, one a line; empty if the file was not written whole."""
    names = tuple(text.splitlines())
    return names if text.endswith("\n") and all(re.fullmatch(r"CUDA\d+", name) for name in names) else ()


def _why_unloadable(engine_dir: Path, environment: Mapping[str, str]) -> str:
    """Return the dynamic loader's error for the CUDA backend, which the engine does not print; "" if it loads."""
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    try:
        argv = (sys.executable, "-I", "-S", "-c", load, str(engine_dir / CUDA_BACKEND))
        done = run(argv, timeout_s=TIMEOUT_S, environment=environment)
    except (RunTimeout, OSError) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [""])[-1].removeprefix("OSError: ")[:300]


def _last_cause(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if _CAUSE.search(line)), "")
