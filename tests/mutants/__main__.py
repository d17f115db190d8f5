"""`make mutants SEED=N COUNT=60`: plants faults, runs the tests that reach each, prints those that no test found."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from tests.mutants import reach
from tests.mutants.faults import Fault, drawn
from tests.mutants.plugin import CHOSEN

ROOT = Path(__file__).parents[2]
# Kept between runs: which test reaches what, for a tree and its folders of tests.
KEPT = ROOT / ".make/mutants"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider")
FOLDERS = ("tests/unit", "tests/process")
LISTED = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
# Of tests that reach one fault, by the time that they took before: those of the file's own tests, then the shortest.
MOST_S = 120
LEAST_LIMIT_S = 120  # for pytest to begin, on a machine with other work


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--least", type=float, default=0, help="percent to be found; 1 below it")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="of tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        return _run(options, Path(scratch))


def _run(options: argparse.Namespace, scratch: Path) -> int:
    faults = list(islice(_type_checked(drawn(ROOT, options.seed), scratch / "types", options.count), options.count))
    reached = [_reach(folder, scratch / "reach") for folder in options.folders]
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(options.workers):
        trees.put(_copy(scratch / f"tree{number}"))
    with ThreadPoolExecutor(options.workers) as pool:
        results = list(pool.map(lambda fault: _try(fault, reached, trees), faults))
    lived = [fault for fault, is_found in zip(faults, results, strict=True) if not is_found]
    rate = 100 * (1 - len(lived) / len(faults))
    print(f"\nseed {options.seed}: {len(faults) - len(lived)} of {len(faults)} faults were found ({rate:.0f} %)")
    for fault in lived:
        print(f"\nlived: {fault.place}\n{fault.diff}")
    return int(rate < options.least)


def _copy(to: Path) -> Path:
    """The tree as it stands, without what git ignores; the engine and the model of `make test` are linked."""
    names = _output(*LISTED).split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, to / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    (to / ".make").mkdir()
    for name in ("engine", "models"):
        if (ROOT / ".make" / name).exists():
            (to / ".make" / name).symlink_to((ROOT / ".make" / name).resolve())
    (to / ".venv").symlink_to(Path(sys.prefix))
    return to


def _output(*argv: str) -> str:
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _type_checked(faults: Iterable[Fault], tree: Path, count: int) -> Iterable[Fault]:
    """Leaves out what mypy refuses, as `make lint` does: many faults in one run, since each has a file of its own."""
    _copy(tree)
    pending = iter(faults)
    while portion := list(islice(pending, 2 * count)):
        for fault in portion:
            (tree / fault.file).write_text(fault.code, encoding="utf-8")
        argv = (sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(KEPT / "mypy"))
        found = subprocess.run(argv, cwd=tree, check=False, capture_output=True, text=True)
        if found.returncode not in (0, 1):
            sys.exit(found.stdout + found.stderr)
        refused = {line.partition(":")[0] for line in found.stdout.splitlines()}
        print(f"{len(portion)} faults drawn, {sum(f.file in refused for f in portion)} refused by mypy", flush=True)
        for fault in portion:
            shutil.copy2(ROOT / fault.file, tree / fault.file)
        yield from (fault for fault in portion if fault.file not in refused)


def _reach(folder: str, tree: Path) -> reach.Reach:
    seen = KEPT / f"{Path(folder).name}-{_digest(folder)}"
    if not (seen / "whole").exists():
        shutil.rmtree(seen, ignore_errors=True)
        shutil.rmtree(tree, ignore_errors=True)
        reach.plant(_copy(tree), seen)
        began = time.monotonic()
        subprocess.run(
            [*PYTEST, "-n", "logical", "--dist", "worksteal", folder], cwd=tree, check=False, stdout=subprocess.DEVNULL
        )
        (seen / "whole").touch()
        print(f"{folder}: which test reaches what was looked up in {time.monotonic() - began:.0f} s", flush=True)
    return reach.read(seen)


def _digest(folder: str) -> str:
    names = _output(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "appliance", "images", folder
    )
    digest = hashlib.sha256()
    for name in sorted(filter(None, names.split("\0"))):
        if (path := ROOT / name).is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _try(fault: Fault, reached: Sequence[reach.Reach], trees: SimpleQueue[Path]) -> bool:
    tree = trees.get()
    began = time.monotonic()
    try:
        (tree / fault.file).write_text(fault.code, encoding="utf-8")
        found = next(filter(None, (_found_by(fault, tests, tree) for tests in reached)), None)
    finally:
        shutil.copy2(ROOT / fault.file, tree / fault.file)
        trees.put(tree)
    print(f"{time.monotonic() - began:4.0f} s  {fault.place}: {found or 'LIVED'}", flush=True)
    return found is not None


def _found_by(fault: Fault, tests: reach.Reach, tree: Path) -> str | None:
    """The test that fails, or None."""
    chosen = _in_order(fault, tests)
    if not chosen:
        return None
    order = tree / ".make/chosen"
    order.write_text("\n".join(chosen), encoding="utf-8")
    files = sorted({test.partition("::")[0] for test in chosen})
    limit = LEAST_LIMIT_S + 5 * sum(tests.seconds[test] for test in chosen)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as told:
        process = subprocess.Popen(
            [*PYTEST, "-x", *files],
            cwd=tree,
            stdout=told,
            stderr=subprocess.STDOUT,
            env=dict(os.environ, **{CHOSEN: str(order)}),
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"a test that did not end in {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told.seek(0)
        lines = [line for line in told if line.startswith(("FAILED ", "ERROR "))]
    return None if code == 0 else (lines[0].split(" - ")[0].strip() if lines else f"pytest, which ended with {code}")


def _in_order(fault: Fault, tests: reach.Reach) -> list[str]:
    stem = Path(fault.file).stem.lstrip("_")
    near = Path(fault.file).parent.name

    def rank(test: str) -> tuple[bool, bool, float]:
        file = Path(test.partition("::")[0])
        return stem not in file.stem, near not in file.parts, tests.seconds[test]

    chosen: list[str] = []
    sum_s = 0.0
    for test in sorted(tests.tests_of(fault.file, fault.line), key=rank):
        sum_s += tests.seconds[test]
        if chosen and sum_s > MOST_S:
            continue
        chosen.append(test)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
