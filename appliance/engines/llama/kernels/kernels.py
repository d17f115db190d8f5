"""kernel-check and test-backend-ops: programs that check the results of the engine's kernels on this machine.

kernel-check runs CPU variants, each in a process of its own, and compares their results with those of the plainest
variant (images/builder/kernel-check.cpp). test-backend-ops compares a GPU with the CPU; only CUDA images contain it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.engines.llama.process.server import cpu_environment, gpu_environment
from appliance.run import RunTimeout, run

CPU_PROGRAM = "kernel-check"
GPU_PROGRAM = "test-backend-ops"
REFERENCE = "x64"
TIMEOUT_S = 60.0  # one model's types take less than three seconds on an idle machine
GPU_TIMEOUT_S = 600.0
GPU_OPS = ("MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT")
THREADS_MAX = 4  # the matrices are small
# Types of numbers and of activations, which no weights of a matrix have.
_NO_WEIGHTS = re.compile(r"I\d+|F64|Q8_1|Q8_K")
# Signals that a wrong kernel or a damaged file causes. SIGKILL, SIGTERM and SIGALRM come from outside.
_FAULTS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Types of weights and of the KV cache to check, by their names in files and flags."""

    types: tuple[str, ...]
    kv_types: tuple[str, ...]

    def holds(self, other: Asked) -> bool:
        return set(other.types) <= set(self.types) and set(other.kv_types) <= set(self.kv_types)

    def with_more(self, other: Asked) -> Asked:
        types, kv_types = {*self.types, *other.types}, {*self.kv_types, *other.kv_types}
        return Asked(types=tuple(sorted(types)), kv_types=tuple(sorted(kv_types)))


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Check result of one CPU variant. It is good if neither `why_not` nor `problem` is set."""

    variant: str
    cases: int = 0
    worst_nmse: float | None = None
    is_compared: bool = False  # False if the reference variant does not run here
    seconds: float = 0.0
    why_not: str | None = None  # what is wrong with the variant
    problem: str | None = None  # why the check was inconclusive

    def describe(self) -> str:
        if self.why_not or self.problem:
            return self.why_not or self.problem or ""
        compared = f", worst NMSE {self.worst_nmse:.2g}" if self.is_compared and self.worst_nmse is not None else ""
        alone = "" if self.is_compared else f"; run, and compared with nothing: {REFERENCE} does not run"
        return f"{self.cases} cases{compared}{alone}"


def asked_of(type_names: Iterable[str], kv_types: Iterable[str]) -> Asked:
    types = {name.lower() for name in type_names if not _NO_WEIGHTS.fullmatch(name.upper())}
    return Asked(types=tuple(sorted(types)), kv_types=tuple(sorted(set(kv_types))))


def is_there(engine_dir: Path) -> bool:
    return (engine_dir / CPU_PROGRAM).exists()


def query_kernels(
    engine_dir: Path,
    variants: Sequence[str],
    asked: Asked,
    *,
    cache_dir: Path,
    threads: int,
    timeout_s: float = TIMEOUT_S,
    is_wanted: Callable[[], bool] = lambda: True,
) -> tuple[KernelReport, ...]:
    """Return a report for each variant, in their order.

    Nothing is raised: if the program itself fails, the cause is the `problem` of each report.
    """
    argv = (
        *(str(engine_dir / CPU_PROGRAM), "--dir", str(engine_dir)),
        *("--variant", ",".join(variants), "--reference", REFERENCE),
        *("--types", ",".join(asked.types), "--kv", ",".join(asked.kv_types)),
        *("--threads", str(max(1, min(threads, THREADS_MAX)))),
    )
    try:
        done = run(argv, timeout_s=timeout_s, environment=cpu_environment(cache_dir, None), is_wanted=is_wanted)
    except RunTimeout:
        return _all(variants, f"{CPU_PROGRAM} did not end within {timeout_s:g} s")
    except OSError as error:
        return _all(variants, f"{CPU_PROGRAM} cannot be started: {(error.strerror or str(error)).lower()}")
    found = parse_reports(done.stdout)
    said = (done.stderr.strip().splitlines() or ["it printed nothing"])[0][:300]
    lacking = f"{CPU_PROGRAM} ended with {done.returncode} without a report of this variant: {said}"
    return tuple(found.get(name) or KernelReport(variant=name, problem=lacking) for name in variants)


def parse_reports(text: str) -> dict[str, KernelReport]:
    """Return the reports by variant. Lines that are no report are skipped."""
    rows = []
    for line in text.splitlines():
        try:
            rows.append(_report(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the caller reports the variant as missing
    return {row.variant: row for row in rows}


def _report(row: dict[str, Any]) -> KernelReport:
    name, status, at = str(row["variant"]), str(row["status"]), str(row["at"])
    nmse, limit, signal = row["worst_nmse"], float(row["limit"]), row["signal"]
    why_not = problem = None
    match status:
        case "ok":
            pass
        case "wrong":
            size = "no number" if nmse is None else f"NMSE {float(nmse):.2g}"
            why_not = f"wrong results: {size} against {REFERENCE}, {limit:g} allowed ({at})"
        case "died" if signal in _FAULTS:
            why_not = f"the kernel check died of {signal} ({at})"
        case "died":
            problem = f"the kernel check was ended by {signal or 'an error of its own'} ({at})"
        case "refused":
            why_not = "the engine says that this CPU cannot run it"
        case "unloadable":
            why_not = "its file cannot be loaded: it is missing or damaged"
        case _:
            problem = f"{CPU_PROGRAM} reported an unknown status: {status[:80]}"
    return KernelReport(
        variant=name,
        cases=int(row["cases"]),
        worst_nmse=None if nmse is None else float(nmse),
        is_compared=bool(row["compared"]),
        seconds=float(row["seconds"]),
        why_not=why_not,
        problem=problem,
    )


def _all(variants: Iterable[str], problem: str) -> tuple[KernelReport, ...]:
    return tuple(KernelReport(variant=name, problem=problem) for name in variants)


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """Check result of one GPU. `why_not` and `problem` as in a KernelReport."""

    device: str
    cases: int | None = None
    why_not: str | None = None
    problem: str | None = None


def query_gpu_kernels(
    engine_dir: Path,
    device: str,
    asked: Asked,
    *,
    cache_dir: Path,
    driver_dir: Path | None,
    cpu_variant: str | None,
    timeout_s: float = GPU_TIMEOUT_S,
) -> GpuReport:
    """Return the report for a GPU: all cases of the program with weights or KV caches of these types.

    It takes minutes. Nothing is raised.
    """
    argv = (
        *(str(engine_dir / GPU_PROGRAM), "test", "-b", device, "-o", ",".join(GPU_OPS)),
        *("-p", gpu_pattern(asked)),
    )
    environment = gpu_environment(engine_dir, cache_dir, driver_dir, cpu_variant=cpu_variant)
    try:
        done = run(argv, timeout_s=timeout_s, environment=environment)
    except RunTimeout:
        return GpuReport(device=device, problem=f"{GPU_PROGRAM} did not end within {timeout_s:g} s")
    except OSError as error:
        return GpuReport(device=device, problem=f"{GPU_PROGRAM} cannot be started: {(error.strerror or '').lower()}")
    if done.is_cut and done.returncode == 0:  # the output was cut before the count of cases, at its end
        return GpuReport(device=device)
    return parse_gpu_report(device, f"{done.stderr}\n{done.stdout}", done.returncode)


def gpu_pattern(asked: Asked) -> str:
    """Return a pattern for the parameters of the cases to run.

    The program prints parameters as `type_a=q4_K,type_b=f32,…` and `…,type_K=q8_0,type_V=q8_0,…`.
    """
    names = "|".join(ggml_name(name) for name in asked.types)
    kv_names = "|".join(ggml_name(name) for name in asked.kv_types)
    return f"type_a=({names}),|type_K=({kv_names}),"


def ggml_name(name: str) -> str:
    """Return a type's name as ggml prints it: in lower case, except the K of K-quants."""
    return re.sub(r"_k$", "_K", name.lower())


def parse_gpu_report(device: str, text: str, code: int) -> GpuReport:
    """Return the report from the program's output, whose last lines count the cases: `1120/1120 tests passed`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    counts = re.search(r"(\d+)/(\d+) tests passed", plain)
    failing = re.findall(r"^ *(\w+\(.*?\)): .*FAIL", plain, re.MULTILINE)
    if code < 0:
        return GpuReport(device=device, why_not=f"{GPU_PROGRAM} was killed by signal {-code}")
    if counts is None or int(counts[2]) == 0:
        last = next((line.strip() for line in reversed(plain.splitlines()) if line.strip()), "nothing")
        return GpuReport(device=device, problem=f"{GPU_PROGRAM} ended with {code} and ran no cases: {last[:200]}")
    passed, all_cases = int(counts[1]), int(counts[2])
    if passed < all_cases or code:
        first = f": {failing[0][:200]}" if failing else ""
        return GpuReport(
            device=device, cases=all_cases, why_not=f"{all_cases - passed} of {all_cases} cases fail{first}"
        )
    return GpuReport(device=device, cases=all_cases)
